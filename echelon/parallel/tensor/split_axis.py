"""SplitAxis: the ranks that share split modules, and the cache of their last input."""

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
    """Cache of the last tensor that entered a split layer, by identity of the tensor that it was made from.

    Query, key and value projections get the same input tensor: with the cache, they share one all-reduce of its
    gradients. Only the last tensor is kept, and only while its origin is alive, so memory does not grow.
    """

    def __init__(self) -> None:
        self.rows: Sizes | None = None  #: rows of each rank in the batch gathered last
        self.parts_about = False  #: True once a layer with gather=False has returned its part as a plain tensor
        self._origin: weakref.ref[Tensor] | None = None
        self._facts: tuple[Any, ...] = ()
        self._made: Any = None

    def find(self, origin: Tensor, *facts: Any) -> Any:
        """Return the result kept for this tensor object with equal facts; else ``None``."""
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
    """The ranks that hold the shards of one part of the model.

    group:   process group of the ranks; None for a single rank
    batch_per_rank: True if each rank has a batch of its own; False if all ranks share one batch (default)
    memory:  cache of the last input
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    batch_per_rank: bool = False
    memory: SplitInputCache = field(default_factory=SplitInputCache, compare=False, repr=False)

    def ranges(self, total: int, weights: tuple[float, ...] | None = None) -> list[Range]:
        """Return every rank's range of ``total``."""
        return shares(total, self.size, weights)

    def sizes(self, total: int, weights: tuple[float, ...] | None = None) -> Sizes:
        return tuple(end - begin for begin, end in self.ranges(total, weights))
