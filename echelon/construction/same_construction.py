"""Comparison of the constructions of all ranks: the same operations, with rank 0's random states and constants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.base.errors import UsageError
from echelon.construction.tape import Tape, TapeEntry, TensorRef
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import gather_json


def same_on_all_ranks(tapes: Sequence[Tape], control: dist.ProcessGroup) -> None:
    """Give every rank the random states and constants of rank 0, as a broadcast of whole weights would do.

    Raises ``UsageError`` if ranks have recorded different operations.
    """
    values = [value for tape in tapes for value in _values(tape)]
    answers = gather_json([_hash_operations(tapes), _hash_values(values)], control)
    different = next((rank for rank, answer in enumerate(answers) if answer[0] != answers[0][0]), None)
    if different is not None:
        raise UsageError(
            f"deferred(): ranks 0 and {different} have built different models; build the same one on every rank, and "
            "seed random numbers of Python and NumPy that the constructor uses"
        )
    if all(answer == answers[0] for answer in answers):
        return
    for value in values:
        with waiting("broadcast of the model"):
            dist.broadcast(value, group=control, group_src=0)


def _values(tape: Tape) -> Iterator[Tensor]:
    for entry in tape.entries():
        if entry.state is not None:
            yield entry.state
        yield from (leaf for leaf in _operands(entry) if isinstance(leaf, Tensor))


def _operands(entry: TapeEntry) -> list[Any]:
    return tree_leaves((entry.args, entry.kwargs))


def _hash_values(values: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash_operations(tapes: Sequence[Tape]) -> str:
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}  # storages in the order of their use: their identity differs between processes

    def word(leaf: Any) -> str:
        if isinstance(leaf, TensorRef):
            number = numbers.setdefault(leaf.storage, len(numbers))
            return f"{number} {leaf.dtype} {leaf.shape} {leaf.stride} {leaf.offset}"
        return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)

    for entry in (entry for tape in tapes for entry in tape.entries()):
        digest.update(f"{entry.func} {[word(leaf) for leaf in (*_operands(entry), *entry.outputs)]}\n".encode())
    return digest.hexdigest()
