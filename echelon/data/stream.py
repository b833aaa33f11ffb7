"""Sources for streams, which can only be read in order: every rank reads the global stream and keeps its share."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data._utils.worker as torch_worker

from echelon.base.errors import DataError
from echelon.data.cache import CachedStream
from echelon.data.checksums import samples_checksum
from echelon.data.collate import BatchCollator
from echelon.data.cursor import Cursor
from echelon.data.data_source import RankBatch, lengths_function, seen_lengths, too_few
from echelon.data.loader_options import LoaderOptions
from echelon.data.order import bucketed_places
from echelon.data.sampling import known_length
from echelon.data.seeding import SeedPurpose, chain, mix, numpy_stream, preserve_global_rng, python_stream, seed_all
from echelon.data.stream_state import (
    RECENT,
    StreamRecord,
    StreamRecords,
    continued,
    is_stateful,
    record_interval,
)

#: Number of samples kept for padding at the end of a stream.
RESERVOIR = 256
#: Opens the stream of an epoch, from a recorded state on if there is one.
Begin = Callable[[int, StreamRecord | None], Iterable[Any]]


class StreamItem(NamedTuple):
    position: int
    sample: Any
    length: int


class StreamStep(NamedTuple):
    """Step ``step`` of an epoch's stream, which is divided into batches from sample ``start`` on."""

    epoch: int
    cut: int
    start: int
    step: int
    record: StreamRecord | None = None


class Reservoir:
    """A few of all samples read so far, each equally likely (Vitter's algorithm R), for padding."""

    def __init__(self, *seed: int) -> None:
        self._seed, self._draw = seed, python_stream(*seed)
        self.kept: list[StreamItem] = []
        self.seen = 0

    def add(self, item: StreamItem) -> None:
        self.seen += 1
        if len(self.kept) < RESERVOIR:
            self.kept.append(item)
        elif (at := self._draw.randrange(self.seen)) < RESERVOIR:
            self.kept[at] = item

    def again(self, count: int, step: int) -> list[StreamItem]:
        return python_stream(*self._seed, step).choices(self.kept, k=count) if count else []


class RecentItems(Reservoir):
    """The samples read last, in place of a choice of all, which a continued stream has not read."""

    def add(self, item: StreamItem) -> None:
        self.seen = item.position + 1
        self.kept.append(item)
        del self.kept[:-RECENT]


class StreamPassReader:
    """One pass over a stream: numbered, shuffled, bucketed, divided into batches of ``batch`` items."""

    def __init__(
        self,
        stream: Begin,
        options: LoaderOptions,
        *,
        salt: int,
        batch: int,
        turn: StreamStep,
        records: StreamRecords | None = None,
    ) -> None:
        self._stream = stream
        self._options = options
        self._salt = salt
        self._batch = batch
        self._length = lengths_function(options.lengths)
        self.turn = turn
        self._begin = turn.record.position if turn.record else 0
        self.records = records
        pool = Reservoir if records is None else RecentItems
        self.reservoir = pool(options.seed, SeedPurpose.RESERVOIR, turn.epoch, salt)
        self._items = self._sequence()
        #: the last non-empty batch before the current one, for stand-in batches
        self.previous = self._skip(turn.start - self._begin)
        self._current: list[StreamItem] = []
        self._step = -1

    def reaches(self, turn: StreamStep) -> bool:
        return turn[:3] == self.turn[:3] and turn.step > self._step

    def take(self, step: int) -> list[StreamItem]:
        while self._step < step:
            self.previous = self._current or self.previous
            self._current = list(itertools.islice(self._items, self._batch))
            self._step += 1
        return self._current

    def _skip(self, count: int) -> list[StreamItem]:
        """Skip ``count`` items; return the last batch of them, which is short if the stream ended."""
        behind = deque(enumerate(itertools.islice(self._items, count), start=1), maxlen=self._batch)
        passed = self._begin + behind[-1][0] if behind else 0
        first = passed - (passed % self._batch or self._batch)
        return [item for number, item in behind if self._begin + number > first]

    def _sequence(self) -> Iterator[StreamItem]:
        items = self._numbered()
        if self._options.shuffle:
            items = self._shuffled(items) if self.records is None else self._shuffled_in_windows(items)
        return items if self._length is None else self._bucketed(items)

    def _numbered(self) -> Iterator[StreamItem]:
        # a cached stream is read once, in any epoch, so its randomness must not depend on the epoch
        epoch = 0 if self._options.cache else self.turn.epoch
        seed = mix(self._options.seed, SeedPurpose.SAMPLE, epoch, self._salt)
        seed_all(seed)
        stream = self._stream(self.turn.epoch, self.turn.record)
        samples = iter(stream if self.records is None else self.records.read(stream, self._begin))
        for position in itertools.count(self._begin):
            seed_all(chain(seed, position))
            try:
                sample = next(samples)
            except StopIteration:
                return
            item = StreamItem(position, sample, 0 if self._length is None else int(self._length(sample)))
            self.reservoir.add(item)
            yield item

    def _shuffled(self, items: Iterator[StreamItem]) -> Iterator[StreamItem]:
        draw = python_stream(self._options.seed, SeedPurpose.BUFFER, self.turn.epoch, self._salt)
        buffer = list(itertools.islice(items, self._options.shuffle_buffer))
        for item in items:
            at = draw.randrange(len(buffer))
            yield buffer[at]
            buffer[at] = item
        draw.shuffle(buffer)
        yield from buffer

    def _shuffled_in_windows(self, items: Iterator[StreamItem]) -> Iterator[StreamItem]:
        """Shuffle windows of the stream each for itself, so that the order after a window does not depend on it."""
        size = self._options.shuffle_buffer
        for number in itertools.count(self._begin // size):
            window = list(itertools.islice(items, size))
            if not window:
                return
            python_stream(self._options.seed, SeedPurpose.BUFFER, self.turn.epoch, self._salt, number).shuffle(window)
            yield from window

    def _bucketed(self, items: Iterator[StreamItem]) -> Iterator[StreamItem]:
        key = (self._options.seed, SeedPurpose.BUCKET, self.turn.epoch, self._salt)
        for number in itertools.count():
            window = list(itertools.islice(items, self._options.bucket_window * self.turn.cut))
            if not window:
                return
            shuffler = numpy_stream(*key, number) if self._options.shuffle else None
            lengths = np.array([item.length for item in window], dtype=np.int64)
            yield from (window[at] for at in bucketed_places(lengths, self.turn.cut, shuffler))


class StreamPasses:
    """The pass in progress; a step before its position, or in another epoch, starts a new pass."""

    def __init__(
        self, stream: Begin, options: LoaderOptions, *, salt: int, batch: int, is_stateful: bool = False
    ) -> None:
        self._stream = stream
        self._options = options
        self._salt = salt
        self._batch = batch
        self._is_stateful = is_stateful
        self._reader: StreamPassReader | None = None

    def at(self, turn: StreamStep) -> tuple[StreamPassReader, list[StreamItem]]:
        """Return the reader after this step, and the step's items."""
        reader, self._reader = self._reader, None  # a generator that raised cannot continue: keep it only on success
        with alone():
            if reader is None or not reader.reaches(turn):
                reader = self._begin(turn)
            items = reader.take(turn.step)
        self._reader = reader
        return reader, items

    def _begin(self, turn: StreamStep) -> StreamPassReader:
        records = StreamRecords(record_interval(self._options), turn.record) if self._is_stateful else None
        return StreamPassReader(
            self._stream, self._options, salt=self._salt, batch=self._batch, turn=turn, records=records
        )

    def key(self, turn: StreamStep) -> int:
        """Return the position of the step in the epoch, independent of the start of the pass."""
        return turn.start + turn.step * self._batch


class StreamSource:
    """An iterable data set. All ranks see its end at the same step, without communication."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.size: int | None = known_length(dataset)  # a ChainDataset has a __len__ that raises
        lengths_function(options.lengths)
        self._options, self._bind = options, StreamCollator(options, salt=0, dataset=dataset)
        self._dataset = dataset
        self._kept = CachedStream(partial(iter, dataset)) if options.cache else None
        self.is_stateful = is_stateful(dataset, options)
        self._passes = StreamPasses(
            self._open,
            options,
            salt=0,
            batch=options.global_batch,
            is_stateful=self.is_stateful,
        )

    def requests(self, cursor: Cursor) -> Iterator[StreamStep]:
        record = StreamRecord(*cursor.anchor) if self.is_stateful and cursor.anchor is not None else None
        return (StreamStep(cursor.epoch, cursor.cut, cursor.samples, step, record) for step in itertools.count())

    def fetch(self, request: StreamStep) -> RankBatch | None:
        with preserve_global_rng():
            reader, items = self._passes.at(request)
            taken, full = len(items), len(items) == self._options.global_batch
            if not full:
                self._check(reader)
            if not items or (not full and self._options.uneven == "drop"):
                return None
            if self._options.uneven == "pad":
                extra = self._options.missing(taken)
                items = items + reader.reservoir.again(extra, self._passes.key(request))
            own = items[self._options.own(len(items))]
            shown = own or reader.previous[self._options.own(len(reader.previous))] or reader.previous or items[:1]
            piece = self._bind(shown, request.epoch, share=len(own), taken=taken)
            if reader.records is not None:
                piece = piece._replace(anchor=reader.records.before(self._passes.key(request) + taken))
            is_first = request.step == 0 and self._options.world_size > 1
            return piece._replace(mark=samples_checksum([item.sample for item in items])) if is_first else piece

    def _open(self, epoch: int, record: StreamRecord | None = None) -> Iterable[Any]:
        announce(self._dataset, 0 if self._options.cache else epoch)
        if record is not None:
            return continued(self._dataset, record)
        return self._dataset if self._kept is None else self._kept

    def _check(self, reader: StreamPassReader) -> None:
        options = self._options
        found = reader.reservoir.seen
        if problem := too_few(found, options.uneven, options.world_size, options.global_batch):
            raise DataError(problem)


class StreamCollator:
    """Collates items into a ``RankBatch``."""

    def __init__(self, options: LoaderOptions, *, salt: int, dataset: Any = None) -> None:
        self._seed, self._salt, self._collate = options.seed, salt, BatchCollator(options, dataset)
        self._measured = options.lengths is not None

    def __call__(self, items: list[StreamItem], epoch: int, *, share: int, taken: int) -> RankBatch:
        seed = mix(self._seed, SeedPurpose.COLLATE, epoch, self._salt, items[0].position)
        batch = self._collate([item.sample for item in items], [item.position for item in items], seed)
        real, room = seen_lengths([item.length for item in items]) if self._measured else (0, 0)
        return RankBatch(batch, share, taken, real, room)


def announce(dataset: Any, epoch: int) -> None:
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


@contextmanager
def alone() -> Iterator[None]:
    """Hide from the stream that it runs in a worker process.

    Streams written for torch's DataLoader split themselves among its workers; here every worker reads the whole stream,
    because only then are the batches the same for any number of workers.
    """
    worker, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = worker
