"""``LoaderOptions``: the options of a loader, validated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from echelon.base.config import strict
from echelon.base.errors import DataError, UsageError
from echelon.data.order import block, stride, weighted

Uneven = Literal["pad", "drop", "join"]
Lengths = Callable[[Any], int] | Sequence[int]


@strict
class LoaderOptions:
    batch_size: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    uneven: Uneven
    workers: int
    prefetch: int
    cache: bool
    collate: Any
    lengths: Any
    pad_value: Any
    bucket_window: int
    shuffle_buffer: int
    shares: tuple[float, ...] = ()
    total: int | None = None
    multiple: int | None = None
    pack: bool | int = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size}: a batch needs at least one sample for each rank")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank={self.rank} of world_size={self.world_size}: ranks count from 0")
        if self.shares and (len(self.shares) != self.world_size or min(self.shares) <= 0):
            raise UsageError(
                f"shares={self.shares}: one number above 0 for each of the {self.world_size} replicas, such as "
                f"{(2.0, *[1.0] * (self.world_size - 1))}"
            )
        if self.total is not None and self.total < 1:
            raise DataError(f"total={self.total}: a global batch needs at least one sample")
        if self.pack and (self.lengths is not None or self.collate is not None):
            other = "lengths=, since packed sequences need no buckets" if self.collate is None else "collate="
            raise UsageError(f"pack={self.pack} does not go with {other}; leave one of them out")
        for name, least in (("pack", 0), ("workers", 0), ("prefetch", 1), ("bucket_window", 1), ("shuffle_buffer", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: must be {least} or more")

    @property
    def global_batch(self) -> int:
        return self.total or self.batch_size * self.world_size

    def steps(self, samples: int) -> int:
        """Return the number of steps in an epoch of ``samples``."""
        whole, rest = divmod(samples, self.global_batch)
        return whole + (rest > 0 and self.uneven != "drop")

    def missing(self, count: int) -> int:
        """Return the number of samples that fill up the last batch of an epoch, which has ``count``."""
        return -count % (self.multiple or self.world_size)

    def own(self, count: int) -> slice:
        """Return this rank's share of a global batch of ``count``. Sorted batches are divided round-robin."""
        if self.shares:
            return weighted(count, self.rank, self.shares)
        share = stride if self.lengths is not None else block
        return share(count, self.rank, self.world_size)
