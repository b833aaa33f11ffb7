"""Training and evaluating in micro-batches: on one process one after another, in a pipeline by its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.evaluate import Judged
from echelon.objective import Objective, count_samples
from echelon.parallel.batch_norm import idle
from echelon.parallel.layout import shares

if TYPE_CHECKING:
    from echelon.parallel.grid import Grid
    from echelon.plan import Plan
    from echelon.world import World


class Micro(NamedTuple):
    """Some rows of a batch, and which part of it they are. A stand-in, where rows do not suffice, is no part of it."""

    batch: Any
    part: float
    rows: int


def micro_batches(batch: Any, count: int) -> list[Micro]:
    """``batch`` in ``count`` pieces along the first dimension of its tensors, as even as they can be.

    What has another length goes to all of them. With fewer rows than pieces, the last pieces are stand-ins: the first
    row again, counting for nothing, so that all ranks of all replicas run equally many.
    """
    rows = count_samples(batch)
    return [_rows(batch, rows, begin, end) for begin, end in shares(rows, count)]


def _rows(batch: Any, rows: int, begin: int, end: int) -> Micro:
    low, high = (begin, end) if begin < end else (0, 1)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return leaf[low:high]
        return leaf

    return Micro(tree_map(cut, batch), (end - begin) / rows if rows else 0.0, end - begin)


class MicroBatches:
    """One process: micro-batches one after another, gradients adding up."""

    def __init__(self, objective: Objective, count: int) -> None:
        self._objective, self._count = objective, count

    def passes(self, name: str) -> int:
        """How many backward passes make up the gradient of a parameter."""
        return self._count

    def train(self, batch: Any, weight: Tensor | float) -> Tensor:
        """Forward and backward of the loss times ``weight``; the mean loss."""
        total: Tensor | float = 0.0
        for micro in micro_batches(batch, self._count):
            with idle(micro.part == 0):
                loss = self._objective(micro.batch)[1]
                (loss * (weight * micro.part)).backward()
            total = total + loss.detach() * micro.part
        assert isinstance(total, Tensor)
        return total

    def evaluate(self, batch: Any) -> list[Judged]:
        return [Judged(batch, *self._objective(batch), count_samples(batch))]
