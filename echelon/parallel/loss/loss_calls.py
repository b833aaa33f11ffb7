"""Finds what losses average over in evaluation, where there is no autograd graph."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.parallel.loss.loss_reduction import Count, number_of


class LossCall(NamedTuple):
    """One call of cross_entropy or nll_loss, and how many targets it counted."""

    kind: Literal["mean", "sum"]
    targets: Count


class SeenLoss(NamedTuple):
    """Record of a loss computed without a graph: the loss traced by itself, if possible, and the recorded calls."""

    traced: Tensor | None
    calls: list[LossCall]


@contextlib.contextmanager
def record_loss_calls() -> Iterator[list[LossCall]]:
    """Record calls of torch's losses that can ignore targets: cross_entropy and nll_loss."""
    calls: list[LossCall] = []
    plain = {name: getattr(F, name) for name in ("cross_entropy", "nll_loss")}
    for name, function in plain.items():
        setattr(F, name, _recorded(function, calls))
    try:
        yield calls
    finally:
        for name, function in plain.items():
            setattr(F, name, function)


def _recorded(function: Callable[..., Tensor], calls: list[LossCall]) -> Callable[..., Tensor]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        found = _seen(**given.arguments)
        if found is not None:
            calls.append(found)
        return function(*args, **kwargs)

    return call


def _seen(target: Any, weight: Any, ignore_index: int, reduction: str, **others: Any) -> LossCall | None:
    if reduction not in ("mean", "sum") or not isinstance(target, Tensor) or isinstance(target, FakeTensor):
        return None
    if target.is_floating_point():  # probabilities: torch divides by the number of rows
        return LossCall(reduction, float(target.numel() // target.shape[1] if target.dim() > 1 else 1))  # type: ignore[arg-type]
    counted = target != ignore_index
    total = counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()
    return LossCall(reduction, number_of(total))  # type: ignore[arg-type]


def can_trace(output: Any) -> bool:
    """Return True if a loss of these outputs can be computed with its own graph."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(type(tensor) is Tensor for tensor in tensors)


def as_leaves(output: Any) -> Any:
    """Return the outputs as leaf tensors, so that the graph of a loss begins at them."""
    return tree_map(lambda leaf: _as_leaf(leaf) if isinstance(leaf, Tensor) else leaf, output)


def _as_leaf(tensor: Tensor) -> Tensor:
    alone = tensor.detach()
    return alone.requires_grad_() if alone.is_floating_point() or alone.is_complex() else alone


def trace_loss(loss: Callable[..., Tensor], output: Any, *targets: Any) -> Tensor:
    """Return the loss with a graph of only its own operations, which begins at ``output``."""
    with torch.enable_grad():
        return loss(as_leaves(output), *targets)
