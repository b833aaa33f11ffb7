"""Random operations whose draws are repeated later: states of generators, and draws in small pieces.

A piece of 64 K numbers stays in the processor's cache: 50 million normal numbers take 0.6 s in pieces and 2.7 s in one
call, and to advance the generator alone no tensor of that size is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 16
#: CPU kernels make normal numbers in groups of 16; a last group of fewer numbers is drawn again as a whole one.
_GROUP = 16
_IN_ORDER = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def is_random(func: Any) -> bool:
    """Return True if an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws_in_order(func: Any, tensor: Tensor) -> bool:
    """Return True if pieces of ``tensor``, filled one after another, get the numbers of one call."""
    return func in _IN_ORDER and tensor.is_contiguous()


@torch.no_grad()
def draw(func: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fill a contiguous tensor in place, piece by piece, with the numbers that one call gives."""
    flat = tensor.view(-1)
    for begin, end in pieces(flat.numel()):
        func(flat[begin:end], *args, **kwargs)


@torch.no_grad()
def advance(func: Any, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Advance the generator as a call on a tensor of this shape and dtype does."""
    buffer = torch.empty(min(like.numel(), PIECE + _GROUP), dtype=like.dtype, device="cpu")
    for begin, end in pieces(like.numel()):
        func(buffer[: end - begin], *args, **kwargs)


def pieces(total: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of pieces that get the numbers of one call if they are filled one after another."""
    begin = 0
    while total - begin >= PIECE + _GROUP:  # the last piece has a whole group
        yield begin, begin + PIECE
        begin += PIECE
    if total > begin or total == 0:
        yield begin, total


def state_of(generator: torch.Generator | None) -> Tensor:
    """Return the state of a CPU generator; ``None`` is the default one."""
    return (generator or torch.default_generator).get_state()


@contextlib.contextmanager
def restored_generator() -> Iterator[None]:
    """Restore the default CPU generator after the context."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def begin_at(state: Tensor) -> None:
    """Set the default CPU generator to a state, or to a seed: a tensor of one number."""
    if state.dtype == torch.uint8:
        torch.default_generator.set_state(state)
    else:
        torch.default_generator.manual_seed(int(state))
