"""Source of streams with places: a checkpoint holds the place, and a resumed run reads nothing before it again.

Every rank reads the stream in its own order and keeps its share of each global batch, so that the batches are those of
one process for any number of ranks. Shuffling is by windows of ``shuffle_buffer`` samples, each read as a whole: the
order follows from the number of the window, and a resumed run reads one window again at most.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from echelon.base.errors import DataError, UsageError
from echelon.data.checksums import samples_checksum
from echelon.data.cursor import Cursor
from echelon.data.data_source import RankBatch, kind_name, too_few
from echelon.data.loader_options import LoaderOptions
from echelon.data.seeding import SeedPurpose, chain, mix, numpy_stream, preserve_global_rng, python_stream, seed_all
from echelon.data.stream import StreamCollator, StreamItem


class ResumableStream:
    """A stream that can be continued at a place, which is a JSON value.

    parse:  function that makes a sample of a record, on the rank that keeps it only; None: the record is the sample
    repeat: True if every epoch reads it from its beginning; else an epoch reads on where the one before was left
    """

    def __init__(self, parse: Callable[[Any], Any] | None, repeat: bool) -> None:
        self.parse, self.repeat = parse, repeat

    def samples_after(self, place: Any) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of a place and the record there, from behind ``place`` on; None is the beginning."""
        raise NotImplementedError

    def join(self, rank: int, ranks: int) -> None:
        """Take part as one of several ranks; called before the first record is read."""

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples from the beginning."""
        return (record if self.parse is None else self.parse(record) for _, record in self.samples_after(None))


class Anchor(NamedTuple):
    """A place of the stream at which a window begins.

    samples: number of samples before it, of the epoch, or of the whole stream if epochs read on
    window:  samples in the window; 0: not known yet. A window is short where the stream ended, also if more came later
    """

    samples: int
    place: Any
    window: int


class ResumeStep(NamedTuple):
    """Step ``step`` of a pass that begins at sample ``start`` of an epoch, by reading from ``anchor`` on."""

    epoch: int
    start: int
    anchor: Anchor
    step: int


BEGINNING = Anchor(0, None, 0)


class ResumableSource:
    """A stream with places. All ranks see its end at the same step, without communication."""

    size: int | None = None

    def __init__(self, dataset: ResumableStream, options: LoaderOptions) -> None:
        _refuse_options(options)
        self._dataset, self._options = dataset, options
        self._bind = StreamCollator(options, salt=0, dataset=dataset)
        self._window = options.shuffle_buffer if options.shuffle else 1
        self._pass: ResumablePass | None = None
        self.goes_on = not dataset.repeat  #: epochs are parts of one order
        dataset.join(options.rank, options.world_size)

    def requests(self, cursor: Cursor) -> Iterator[ResumeStep]:
        anchor = Anchor(*cursor.anchor) if cursor.anchor is not None else BEGINNING
        if cursor.samples and cursor.anchor is None:
            raise DataError("the state of this loader has no place in the stream; it was saved with other data")
        self._pass = None
        epoch = 0 if self.goes_on else cursor.epoch
        return (ResumeStep(epoch, cursor.samples, anchor, step) for step in itertools.count())

    def fetch(self, request: ResumeStep) -> RankBatch | None:
        with preserve_global_rng():
            current, self._pass = self._pass, None  # a stream that raised cannot continue: keep it only on success
            if current is None:
                current = ResumablePass(self._dataset, self._options.seed, self._window, request)
            items = list(itertools.islice(current, self._options.global_batch))
            self._pass = current
            return self._share(items, current, request)

    def _share(self, items: list[StreamItem], current: ResumablePass, request: ResumeStep) -> RankBatch | None:
        """Return this rank's part of a global batch; None at the end."""
        options, taken = self._options, len(items)
        if taken < options.global_batch:
            if problem := too_few(current.read, options.uneven, options.world_size, options.global_batch):
                raise DataError(problem)
            if not items or options.uneven == "drop":
                return None
        if request.step == 0:
            _check_place(current.anchor.place)
        padded = items + self._again(items, request.epoch) if options.uneven == "pad" else items
        own = padded[options.own(len(padded))]
        piece = self._bind(self._parsed(own or items[:1], request.epoch), request.epoch, share=len(own), taken=taken)
        mark = samples_checksum([item.sample for item in items]) if request.step == 0 else None
        return piece._replace(anchor=current.anchor, mark=mark)

    def _again(self, items: list[StreamItem], epoch: int) -> list[StreamItem]:
        """Return items of the last batch that fill it up; after a resume no earlier ones are known."""
        missing = self._options.missing(len(items))
        draw = python_stream(self._options.seed, SeedPurpose.PAD, epoch, items[0].position)
        return draw.choices(items, k=missing) if missing else []

    def _parsed(self, items: list[StreamItem], epoch: int) -> list[StreamItem]:
        parse = self._dataset.parse
        if parse is None:
            return items
        seed = mix(self._options.seed, SeedPurpose.SAMPLE, epoch)
        parsed = []
        for item in items:
            seed_all(chain(seed, item.position))
            parsed.append(item._replace(sample=parse(item.sample)))
        return parsed


class ResumablePass:
    """One pass over a stream from an anchor on, without the samples before ``start``, which were used already."""

    def __init__(self, dataset: ResumableStream, seed: int, window: int, request: ResumeStep) -> None:
        self._seed, self._size, self._epoch = seed, window, request.epoch
        self._start = request.anchor  # the anchor before the window
        self._records = iter(dataset.samples_after(request.anchor.place))
        self._window: list[StreamItem] = []  # from the last one to the next one
        self._next = request.anchor  # the anchor behind the window
        self._kind = kind_name(dataset)
        for _ in range(request.start - request.anchor.samples):
            if next(self, None) is None:
                raise DataError(
                    f"the {self._kind} ended before the place at which this run goes on; was it changed since then?"
                )

    @property
    def anchor(self) -> Anchor:
        """The place from which to read what was not taken yet."""
        return self._start if self._window else self._next

    @property
    def read(self) -> int:
        """The samples of the epoch that were read up to here."""
        return self._next.samples

    def __iter__(self) -> Iterator[StreamItem]:
        return self

    def __next__(self) -> StreamItem:
        if not self._window:
            self._read_window()
        if not self._window:
            raise StopIteration
        return self._window.pop()

    def _read_window(self) -> None:
        self._start, items = self._next, list[StreamItem]()
        seed = mix(self._seed, SeedPurpose.SAMPLE, self._epoch)
        for position in range(self._start.samples, self._start.samples + (self._start.window or self._size)):
            seed_all(chain(seed, position))
            pair = next(self._records, None)
            if pair is None:
                break
            place, sample = pair
            self._next = Anchor(position + 1, place, 0)
            items.append(StreamItem(position, sample, 0))
        self._start = self._start._replace(window=len(items))
        if self._size > 1:
            number = self._start.samples // self._size
            order = numpy_stream(self._seed, SeedPurpose.BUFFER, self._epoch, number).permutation(len(items))
            items = [items[at] for at in order]
        self._window = items[::-1]


def _check_place(place: Any) -> None:
    try:
        json.dumps(place)
    except (TypeError, ValueError):
        raise DataError(
            f"the stream has {type(place).__name__} as a place, which no checkpoint can hold; give numbers, texts, or "
            "lists and dicts of them"
        ) from None


def _refuse_options(options: LoaderOptions) -> None:
    for name, remedy in (
        ("lengths", "it is read in its own order; pack=True needs no buckets"),
        ("cache", "nothing of it is kept"),
        ("workers", "it is read in this process, at one place"),
    ):
        if getattr(options, name):
            raise UsageError(f"{name}= is not for a stream with places: {remedy}; leave it out")
