"""SplitAxis: who shares a split, and what its ranks remember while the model runs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.tensor_layout import Range, shares

Sizes = tuple[int, ...]  # along one dimension, one for each rank of the axis


class SplitInputCache:
    """The tensor that entered a split layer last, by identity of what it was made from.

    Query, key and value projections are fed the same tensor: entering it once gives them one sum of gradients together.
    Only the last is kept, and only while its origin lives, so nothing piles up.
    """

    def __init__(self) -> None:
        self.rows: Sizes | None = None  #: of the batch that was gathered last (spread mode)
        self.parts_about = False  #: whether a layer with gather=False hands on parts as plain tensors
        self._origin: weakref.ref[Tensor] | None = None
        self._facts: tuple[Any, ...] = ()
        self._made: Any = None

    def find(self, origin: Tensor, *facts: Any) -> Any:
        """What was kept for this very tensor under the same facts; else ``None``."""
        same = self._origin is not None and self._origin() is origin
        return self._made if same and self._facts == self._all(origin, facts) else None

    def keep(self, origin: Tensor, made: Any, *facts: Any) -> None:
        self._origin = weakref.ref(origin, self._forget)
        self._facts, self._made = self._all(origin, facts), made

    def _forget(self, died: weakref.ref[Tensor]) -> None:
        if died is self._origin:
            self._origin, self._made = None, None

    @staticmethod
    def _all(origin: Tensor, facts: tuple[Any, ...]) -> tuple[Any, ...]:
        version = 0 if origin.is_inference() else origin._version
        return (version, torch.is_grad_enabled(), *facts)


@dataclass(frozen=True)
class SplitAxis:
    """The ranks that hold the shards of one part of the model; ``group`` is ``None`` for one rank alone.

    Shared: all of them are given the same batch. ``spread``: each has a batch of its own.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    spread: bool = False
    memory: SplitInputCache = field(default_factory=SplitInputCache, compare=False, repr=False)

    def ranges(self, total: int, weights: tuple[float, ...] | None = None) -> list[Range]:
        """Every rank's part of ``total``."""
        return shares(total, self.size, weights)

    def sizes(self, total: int, weights: tuple[float, ...] | None = None) -> Sizes:
        return tuple(end - begin for begin, end in self.ranges(total, weights))
