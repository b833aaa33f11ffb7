"""Sources of which every rank reads its own part, so that no rank knows when another's data ends.

Before each step the ranks agree on the largest and smallest number of samples that any of them holds, with an
all-reduce of three numbers that overlaps with the previous step.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from echelon.base.errors import DataError, PeerLost, one_line
from echelon.data.cache import CachedFiles, CachedStream
from echelon.data.cursor import Cursor
from echelon.data.data_source import RankBatch, lengths_function
from echelon.data.file_list import FileList
from echelon.data.loader_options import LoaderOptions
from echelon.data.seeding import preserve_global_rng
from echelon.data.stream import StreamCollator, StreamItem, StreamPasses, StreamPassReader, StreamStep, announce
from echelon.distributed.activity import waiting


class RaggedBatch(NamedTuple):
    """The end of a rank's data: remaining and padding samples; collated after the ranks have agreed."""

    items: list[StreamItem]
    own: int
    epoch: int
    anchor: Any = None


class DividableSource(Protocol):
    """A source whose last batches are collated when the ranks have agreed on them."""

    bind: StreamCollator


def is_sharded(dataset: Any) -> bool:
    """Return True if it has ``shard(index, count)``. A ``shard`` of other libraries has other parameters."""
    shard = getattr(dataset, "shard", None)
    return callable(shard) and {"index", "count"} <= set(inspect.signature(shard).parameters)


class ShardSource:
    """A data set with ``shard(index, count)``: the samples of part ``index`` of ``count``."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.size: int | None = None
        lengths_function(options.lengths)
        if options.shares:
            raise DataError("shares= deals out one global order, but these ranks read files of their own; leave it out")
        if isinstance(dataset, FileList):
            dataset.check(options.world_size)
            if options.cache:
                dataset = FileList(dataset.paths, CachedFiles(dataset.read, options.seed))
        self._dataset, self._options = dataset, options
        self._kept: CachedStream | None = None
        self.bind = StreamCollator(options, salt=options.rank)
        self._passes = StreamPasses(self._open, options, salt=options.rank, batch=options.batch_size)

    def requests(self, cursor: Cursor) -> Iterator[StreamStep]:
        world = self._options.world_size
        start, cut = cursor.samples // world, cursor.cut // world
        return (StreamStep(cursor.epoch, cut, start, step) for step in itertools.count())

    def fetch(self, request: StreamStep) -> RankBatch | RaggedBatch:
        with preserve_global_rng():
            reader, items = self._passes.at(request)
            if len(items) == self._options.batch_size:
                return self.bind(items, request.epoch, share=len(items), taken=self._options.global_batch)
            return self._ragged(reader, items, request)

    def _ragged(self, reader: StreamPassReader, items: list[StreamItem], turn: StreamStep) -> RaggedBatch:
        if reader.reservoir.seen == 0:
            raise DataError(
                f"rank {self._options.rank} found no sample in its part of the data; every rank needs one: "
                "remove the empty files, or use fewer ranks"
            )
        if self._options.uneven == "pad":
            missing = self._options.batch_size - len(items)
            return RaggedBatch(items + reader.reservoir.again(missing, self._passes.key(turn)), len(items), turn.epoch)
        return RaggedBatch(items or reader.previous, len(items), turn.epoch)

    def _open(self, epoch: int, record: object = None) -> Iterable[Any]:
        options = self._options
        if isinstance(self._dataset, FileList):
            files = self._dataset.arranged(options.seed, epoch) if options.shuffle else self._dataset
            return files.shard(options.rank, options.world_size)
        announce(self._dataset, 0 if options.cache else epoch)
        begin = partial(self._dataset.shard, index=options.rank, count=options.world_size)
        if not options.cache:
            return begin()  # type: ignore[no-any-return]
        self._kept = self._kept or CachedStream(begin)
        return self._kept


@dataclass
class Vote:
    """This rank's batch for a step, and the all-reduce of the sample counts while it is in progress."""

    held: RankBatch | RaggedBatch | Exception
    counts: torch.Tensor
    under_way: dist.Work | None


class Agreement:
    """Turns one rank's batches into steps that all ranks take together."""

    def __init__(self, source: DividableSource, options: LoaderOptions, group: dist.ProcessGroup | None) -> None:
        if options.world_size > 1 and group is None:
            raise DataError(
                f"{options.world_size} ranks that read files of their own must agree when to stop; "
                "use engine.loader(...), or pass group= a gloo process group"
            )
        self._source, self._options, self._group = source, options, group

    def pieces(self, own: Iterator[RankBatch | RaggedBatch], cursor: Cursor) -> Iterator[RankBatch]:
        vote = self._cast(own)
        if cursor.samples == 0:
            self._check_full_batch(vote)
        while True:
            coming = None if isinstance(vote.held, Exception) else self._cast(own)
            piece = self._counted(vote)
            if piece is None or coming is None:
                return
            yield piece
            vote = coming

    def _cast(self, own: Iterator[RankBatch | RaggedBatch]) -> Vote:
        """Start the all-reduce for the next batch. A rank that cannot read reports it there, so that all ranks stop."""
        held: RankBatch | RaggedBatch | Exception
        try:
            held = next(own)
        except Exception as error:
            held = error
        count, failed = 0, 0
        if isinstance(held, Exception):
            failed = self._options.rank + 1
        else:
            count = held.share if isinstance(held, RankBatch) else held.own
        counts = torch.tensor([count, -count, failed])
        work = dist.all_reduce(counts, dist.ReduceOp.MAX, self._group, async_op=True) if self._group else None
        return Vote(held, counts, work)

    def _counted(self, vote: Vote) -> RankBatch | None:
        """Return the batch for this step, or None if the epoch is over according to ``uneven``."""
        most, least = self._count_votes(vote)
        assert not isinstance(vote.held, Exception)
        over = least < self._options.batch_size if self._options.uneven == "drop" else most == 0
        if over:
            return None
        if isinstance(vote.held, RankBatch):
            return vote.held
        ragged = vote.held
        padded = self._options.uneven == "pad"
        items = ragged.items[:most] if padded else ragged.items
        with preserve_global_rng():
            share = len(items) if padded else ragged.own
            return self._source.bind(items, ragged.epoch, share=share, taken=self._options.global_batch)

    def _check_full_batch(self, vote: Vote) -> None:
        _, least = self._count_votes(vote)
        if self._options.uneven == "drop" and least < self._options.batch_size:
            raise DataError(
                f"uneven='drop' keeps full batches only, but one rank's part of the data holds {least} samples and "
                f"not {self._options.batch_size}; use a smaller batch_size or uneven='pad'"
            )

    def _count_votes(self, vote: Vote) -> tuple[int, int]:
        try:
            if vote.under_way is not None:
                with waiting("agreement on the data left", "", self._group):
                    vote.under_way.wait()
                vote.under_way = None
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self._options.rank} asked the other ranks how much data they have left, and one did not "
                f"answer: {one_line(error)}; look at its log"
            ) from None
        if isinstance(vote.held, Exception):
            raise vote.held
        most, least, failed = vote.counts.tolist()
        if failed:
            raise PeerLost(f"rank {failed - 1} could not read its data, so all ranks stop; its own log says why")
        return most, -least
