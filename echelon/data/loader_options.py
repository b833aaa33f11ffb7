"""``LoaderOptions``: the options of a loader, validated once."""

from __future__ import annotations

from typing import Any, Literal

from echelon.base.config import strict
from echelon.base.errors import DataError, UsageError
from echelon.data.order import block, stride, weighted

Uneven = Literal["pad", "drop", "join"]
ChangedData = Literal["refuse", "accept"]


@strict
class LoaderOptions:
    """The options of ``Loader`` that decide which samples are read, and how.

    batch_size: samples of a batch of one rank
    rank, world_size: the share of this loader
    seed, shuffle: order of the samples
    uneven: treatment of an incomplete last batch of an epoch
    workers: processes that read ahead; 0 reads on demand
    prefetch: batches that each worker reads ahead
    cache: keep samples in memory as they are read
    collate: function that makes a batch of a list of samples
    lengths: lengths of the samples, or a function of a sample, to put samples of similar length into one batch
    pad_value: value of the padding, with ``lengths``
    bucket_window: batches among which samples are sorted by length
    shuffle_buffer: samples among which a stream is shuffled
    shares: relative speeds of the ranks, which divide a global batch; ``batch_size`` is then the average
    total: samples of a global batch, if ranks do not divide it
    multiple: number to whose multiple the last batch of an epoch is padded; default: the ranks
    changed_data: "refuse" (default) or "accept" to resume in the middle of an epoch although the data has changed
    divide: True: each rank reads its own shards of a stream that has shards, in place of the whole stream; a number:
        the parts, of one shard or more, into which the stream is divided
    pack: concatenate sequences without padding, as ``echelon.nn.Packed``; a number pads the tokens to its multiple

    >>> loader = engine.loader(dataset, global_batch=64, workers=2, uneven="drop")
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    uneven: Uneven = "pad"
    workers: int = 0
    prefetch: int = 2
    cache: bool = False
    collate: Any = None
    lengths: Any = None
    pad_value: Any = 0
    bucket_window: int = 64
    shuffle_buffer: int = 1024
    shares: tuple[float, ...] = ()
    total: int | None = None
    multiple: int | None = None
    changed_data: ChangedData = "refuse"
    pack: bool | int = False
    divide: bool | int = False

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
        for name in ("pack", "divide", "workers", "prefetch", "bucket_window", "shuffle_buffer"):
            least = int(name in ("prefetch", "bucket_window", "shuffle_buffer"))
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
