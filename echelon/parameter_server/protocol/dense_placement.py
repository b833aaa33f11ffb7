"""Placement of dense parameters as blocks of whole rows on servers. Every worker computes the same placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from echelon.base.errors import UsageError
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.parameter_server.protocol.job_spec import DenseBlock

#: Smallest number of entries that is worth a separate block.
MIN_BLOCK = 8192

#: Maps the blocks' names and the number of servers to the server of each block.
Dispatcher = Callable[[Sequence[str], int], Sequence[int]]
SplitMethod = str | Dispatcher


class DenseParameter(NamedTuple):
    """A dense parameter before it is cut into blocks.

    group:  parameter group of the optimizer; default 0
    whole:  do not cut the parameter, because its optimizer needs the norm of all of it; default False
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    whole: bool = False


def place(
    pieces: Sequence[DenseParameter],
    servers: int,
    method: SplitMethod = "round_robin",
    *,
    slice_up: bool = True,
    min_block: int = MIN_BLOCK,
) -> tuple[DenseBlock, ...]:
    """Cut all parameters into blocks and assign each block to a server."""
    cut = [
        (piece, offset, length)
        for piece in pieces
        for offset, length in _cut(piece, servers if slice_up and not piece.whole else 1, min_block)
    ]
    names = [f"{piece.name}.block{index}" for index, (piece, _, _) in enumerate(cut)]
    homes = _dispatch(names, servers, method)
    return tuple(
        DenseBlock(
            parameter=piece.name,
            offset=offset,
            length=length,
            shape=_shape(piece, length),
            server=home,
            group=piece.group,
        )
        for (piece, offset, length), home in zip(cut, homes, strict=True)
    )


def _cut(piece: DenseParameter, servers: int, min_block: int) -> list[tuple[int, int]]:
    size, row = math.prod(piece.shape), max(1, math.prod(piece.shape[1:]))
    parts = min(servers, max(1, size // min_block))
    length = max(1, -(-math.ceil(size / parts) // row) * row)  # rounded up to whole rows
    return [(start, min(length, size - start)) for start in range(0, size, length)] or [(0, 0)]


def _shape(piece: DenseParameter, length: int) -> tuple[int, ...]:
    if not piece.shape or length == math.prod(piece.shape):
        return piece.shape
    return (length // math.prod(piece.shape[1:]), *piece.shape[1:])


def _dispatch(names: Sequence[str], servers: int, method: SplitMethod) -> list[int]:
    if method == "round_robin":
        return [index % servers for index in range(len(names))]
    if method == "hash_name":
        return [stable_hash(name) % servers for name in names]
    if not callable(method):
        raise UsageError(f"split_method={method!r} is neither 'round_robin' nor 'hash_name' nor a function")
    homes = [int(home) for home in method(names, servers)]
    if len(homes) != len(names):
        raise UsageError(f"split_method placed {len(homes)} of {len(names)} blocks; it must return a server for each")
    if wrong := next((home for home in homes if not 0 <= home < servers), None):
        raise UsageError(f"split_method chose server {wrong}, but there are {servers}, counted from 0")
    return homes
