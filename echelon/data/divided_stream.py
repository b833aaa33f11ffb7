"""Source of streams with shards, of which each rank reads its own: ``engine.loader(stream, divide=True)``.

The order takes one sample of each shard in turn, as ``datasets.interleave_datasets`` does, and shuffles each shard in
windows. Place p of the order is of shard ``p % shards`` and belongs to rank ``p % ranks``: so the order is the same for
any number of ranks, and a rank reads only the shards that have places of its own, ``shards / gcd(shards, ranks)`` of
them. A shard that has ended leaves its places empty.

Each rank knows the states (``state_dict``) of its own shards. Every few steps the ranks exchange them, so that a
checkpoint has those of all shards, and another number of ranks can go on from it.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from echelon.base.errors import DataError, UsageError
from echelon.data.cursor import Cursor
from echelon.data.data_source import RankBatch, is_stream, kind_name
from echelon.data.hugging_face import shuffles_in_buffer
from echelon.data.loader_options import LoaderOptions
from echelon.data.order import Indices
from echelon.data.seeding import SeedPurpose, chain, mix, numpy_stream, preserve_global_rng, python_stream, seed_all
from echelon.data.shard_source import Agreement, RaggedBatch, Vote
from echelon.data.stream import StreamCollator, StreamItem, alone, announce
from echelon.distributed.collectives import gather_json

#: Samples of a shard between two of its states, at least.
RECORDED = 64
#: Steps, and samples, between two exchanges of states, at least.
EXCHANGED_STEPS, EXCHANGED_SAMPLES = 16, 1024


class ShardRecord(NamedTuple):
    """The state of a shard after ``given`` samples of an epoch; the state None is its beginning."""

    given: int
    state: Mapping[str, Any] | None


class DividedStep(NamedTuple):
    """Step ``step`` of a pass that begins at place ``start`` of an epoch's order.

    records: state of each shard at an earlier place, by its number; none to read from the beginning
    """

    epoch: int
    start: int
    step: int
    records: Mapping[str, Any]


def has_shards(dataset: Any) -> bool:
    """Return True for a stream with ``num_shards`` and ``shard(num_shards, index)``, as in the library datasets."""
    shard = getattr(dataset, "shard", None)
    return (
        is_stream(dataset)
        and isinstance(getattr(dataset, "num_shards", None), int)
        and callable(shard)
        and {"num_shards", "index"} <= set(inspect.signature(shard).parameters)
    )


def streams_of(dataset: Any, options: LoaderOptions) -> int:
    """Return the number of parts, of one shard or more, into which a stream is divided."""
    return int(dataset.num_shards if isinstance(options.divide, bool) else options.divide)


def whole_reading(dataset: Any, options: LoaderOptions) -> str | None:
    """Return a line if ranks read more of a stream with shards than they could, else None."""
    ranks = options.world_size
    if ranks == 1 or not has_shards(dataset):
        return None
    shards = streams_of(dataset, options)
    each = shards // gcd(shards, ranks)
    if options.divide:
        return None if each * ranks == shards else (
            f"stream: {shards} shards cannot be divided evenly over {ranks} ranks, and each rank reads {each} of them; "
            f"a multiple of {ranks} shards lets each rank read its own"
        )  # fmt: skip
    if each == shards:
        return None
    return f"stream: each of {ranks} ranks reads all {shards} shards; with divide=True it reads {each} of them"


class ShardReader:
    """One shard in one epoch, in windows that are shuffled each for itself."""

    def __init__(self, dataset: Any, number: int, options: LoaderOptions, epoch: int, record: ShardRecord) -> None:
        streams = streams_of(dataset, options)
        self._stream = dataset.shard(num_shards=streams, index=number)
        self._options, self._number, self._epoch = options, number, epoch
        self._window = max(1, options.shuffle_buffer // streams) if options.shuffle else 1
        self._recorded = -(-RECORDED // self._window) * self._window
        self._is_stateful = _has_state(self._stream)
        self._given, self.record = record.given, record
        self._seed = mix(options.seed, SeedPurpose.SAMPLE, epoch, number)
        announce(self._stream, epoch)
        if record.state is not None:
            self._stream.load_state_dict(record.state)
        self._samples: Iterator[Any] | None = None
        self._items: Iterator[Any] = iter(())
        self._left = 0  # of the window
        self._has_ended = False

    @property
    def given(self) -> int:
        """The samples of the epoch that were taken, or that the shard did not have any more."""
        return self._given - self._left

    def skip_to(self, given: int) -> None:
        while self.given < given and self.take() is not None:
            pass

    def take(self) -> Any:
        """Return a list of the next sample; None after the end."""
        if not self._left and not self._has_ended:
            self._read_window()
        if not self._left:
            return None
        self._left -= 1
        return [next(self._items)]

    def _read_window(self) -> None:
        if self._given % self._recorded == 0 and self._is_stateful and self._samples is not None:
            self._take_state()
        window = []
        for position in range(self._given, self._given + self._window):
            seed_all(chain(self._seed, position))
            if self._samples is None:
                self._samples = iter(self._stream)
            try:
                window.append(next(self._samples))
            except StopIteration:
                self._has_ended = True
                break
        if self._window > 1:
            key = (self._options.seed, SeedPurpose.BUFFER, self._epoch, self._number, self._given // self._window)
            python_stream(*key).shuffle(window)
        self._given += len(window)
        self._left, self._items = len(window), iter(window)

    def _take_state(self) -> None:
        state = self._stream.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            self._is_stateful = False  # a checkpoint's head is JSON; the shard is read again from its last record
            return
        self.record = ShardRecord(self._given, state)


class DividedPass:
    """One rank's places of one epoch, in order."""

    def __init__(self, dataset: Any, options: LoaderOptions, turn: DividedStep) -> None:
        self._options, self.turn = options, turn
        self._ranks, self._shards = options.world_size, streams_of(dataset, options)
        self._stride = gcd(self._ranks, self._shards)
        announce(dataset, turn.epoch)
        self._order = _shard_order(options, turn.epoch, self._shards)
        own = range(options.rank % self._stride, self._shards, self._stride)
        self._readers = {place: self._open(dataset, place, turn) for place in own}
        self.position = turn.start

    def reaches(self, turn: DividedStep, position: int) -> bool:
        return turn.epoch == self.turn.epoch and turn.start == self.turn.start and position >= self.position

    def records(self) -> dict[str, Any]:
        """Return the states of this rank's shards, by their numbers."""
        return {str(self._order[place]): list(reader.record) for place, reader in self._readers.items()}

    def pass_over(self, position: int) -> None:
        """Skip the places before ``position``."""
        self._walk(position)

    def items(self, count: int) -> list[StreamItem]:
        """Return this rank's samples among the next ``count`` places."""
        return self._walk(self.position + count)

    def _walk(self, end: int) -> list[StreamItem]:
        rank, found = self._options.rank, []
        first = self.position + (rank - self.position) % self._stride
        for position in range(first, end, self._stride):
            sample = self._readers[position % self._shards].take()
            if sample is not None and position % self._ranks == rank:
                found.append(StreamItem(position, sample[0], 0))
        self.position = end
        return found

    def _open(self, dataset: Any, place: int, turn: DividedStep) -> ShardReader:
        number = int(self._order[place])
        record = ShardRecord(*turn.records.get(str(number), (0, None)))
        reader = ShardReader(dataset, number, self._options, turn.epoch, record)
        reader.skip_to(-(-(turn.start - place) // self._shards))
        return reader


class DividedSource:
    """A stream with shards, of which each rank reads its own."""

    size: int | None = None

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        _refuse(dataset, options)
        self._dataset, self._options = dataset, options
        self.bind = StreamCollator(options, salt=0, dataset=dataset)
        self._pass: DividedPass | None = None
        self._spare: list[StreamItem] = []
        steps = -(-EXCHANGED_SAMPLES // options.global_batch)
        self._exchanged = max(EXCHANGED_STEPS, steps) if _has_state(dataset) else 0

    def requests(self, cursor: Cursor) -> Iterator[DividedStep]:
        records = cursor.anchor[0] if cursor.anchor is not None else {}
        return (DividedStep(cursor.epoch, cursor.samples, step, records) for step in itertools.count())

    def fetch(self, request: DividedStep) -> RankBatch | RaggedBatch:
        options = self._options
        position = request.start + request.step * options.global_batch
        with preserve_global_rng(), alone():
            current, self._pass = self._pass, None  # a stream that raised cannot continue: keep it only on success
            if current is None or not current.reaches(request, position):
                current = DividedPass(self._dataset, options, request)
            current.pass_over(position)
            records = current.records() if self._is_exchanged(request) else None
            items = current.items(options.global_batch)
            self._pass = current
            if len(items) == options.batch_size:
                piece = self.bind(items, request.epoch, share=len(items), taken=options.global_batch)
                return piece._replace(anchor=records)
            return self._ragged(items, request.epoch, position, records)

    def _is_exchanged(self, request: DividedStep) -> bool:
        return bool(self._exchanged) and request.step % self._exchanged == 0

    def _ragged(self, items: list[StreamItem], epoch: int, position: int, records: Any) -> RaggedBatch:
        options, own = self._options, len(items)
        if options.uneven == "pad":
            draw = python_stream(options.seed, SeedPurpose.PAD, epoch, position, options.rank)
            again = draw.choices(items or self._earlier(epoch), k=options.batch_size - own)
            return RaggedBatch(items + again, own, epoch, records)
        return RaggedBatch(items or self._earlier(epoch), own, epoch, records)

    def _earlier(self, epoch: int) -> list[StreamItem]:
        """Return samples from the beginning of a shard, for a rank that has none in this step."""
        if not self._spare:
            streams, count = streams_of(self._dataset, self._options), 1
            if self._options.uneven == "pad":
                count = self._options.batch_size
            numbers = ((self._options.rank + number) % streams for number in range(streams))
            readers = (ShardReader(self._dataset, at, self._options, epoch, ShardRecord(0, None)) for at in numbers)
            samples = itertools.chain.from_iterable(iter(reader.take, None) for reader in readers)
            self._spare = [StreamItem(0, sample[0], 0) for sample in itertools.islice(samples, count)]
        if not self._spare:
            raise DataError("the data set is empty; check its path or filter")
        return self._spare


class DividedAgreement(Agreement):
    """Turns one rank's batches into steps of all ranks, and exchanges the states of their shards."""

    def __init__(self, source: DividedSource, options: LoaderOptions, group: dist.ProcessGroup | None) -> None:
        super().__init__(source, options, group)
        self._records: dict[str, Any] = {}

    def pieces(self, own: Iterator[RankBatch | RaggedBatch], cursor: Cursor) -> Iterator[RankBatch]:
        self._records = {} if cursor.anchor is None else dict(cursor.anchor[0])
        yield from super().pieces(own, cursor)

    def _counted(self, vote: Vote) -> RankBatch | None:
        piece = super()._counted(vote)
        if piece is None:
            return None
        records = None if isinstance(vote.held, Exception) else vote.held.anchor
        if records is not None:
            every = [records] if self._group is None else gather_json(records, self._group, "states of shards")
            self._records = {number: record for each in every for number, record in each.items()}
        return piece._replace(anchor=[self._records] if self._records else None)


def _shard_order(options: LoaderOptions, epoch: int, shards: int) -> Indices:
    if not options.shuffle:
        return np.arange(shards)
    return numpy_stream(options.seed, SeedPurpose.FILES, epoch).permutation(shards)


def _has_state(dataset: Any) -> bool:
    """Return True if a shard is continued from its state; a shuffle buffer of the library's own is not in it."""
    able = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return able and not shuffles_in_buffer(dataset)


def _refuse(dataset: Any, options: LoaderOptions) -> None:
    if not has_shards(dataset):
        raise UsageError(
            f"divide=True: {kind_name(dataset)} is no stream with shards (num_shards, and shard(num_shards=, index=)); "
            "leave it out"
        )
    if options.divide > dataset.num_shards:
        raise UsageError(
            f"divide={options.divide}: {kind_name(dataset)} has {dataset.num_shards} shards; give that or less, or True"
        )
    for name, why in (
        ("lengths", "its samples have no numbers; pack=True needs no lengths"),
        ("cache", "nothing of it is kept"),
        ("shares", "each rank has as many places as the others"),
    ):
        if getattr(options, name):
            raise UsageError(f"{name}= does not go with divide=True: {why}; leave one of them out")
    if options.global_batch % options.world_size:
        raise UsageError(
            f"divide=True: a global batch of {options.global_batch} cannot be divided evenly over {options.world_size} "
            "ranks; choose a multiple"
        )
