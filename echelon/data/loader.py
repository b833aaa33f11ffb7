"""``Loader``: yields the batches of one rank, with ``for batch in loader``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import DataError, UsageError, nearest
from echelon.data.batch_fetcher import BatchFetcher
from echelon.data.batch_place import BatchPlace, numbers_text
from echelon.data.blocks import BlockSource
from echelon.data.collate import BatchCollator
from echelon.data.cursor import Cursor, from_state, to_state
from echelon.data.data_identity import DataIdentity, data_identity, stored_identity
from echelon.data.data_source import RankBatch, UnknownLengthError, kind_name
from echelon.data.divided_stream import DividedAgreement, DividedSource, streams_of, whole_reading
from echelon.data.fingerprint import DatasetFingerprint, dataset_fingerprint
from echelon.data.loader_options import LoaderOptions
from echelon.data.map_source import MapSource
from echelon.data.mixed_order import MixedEpoch
from echelon.data.mixture import Mixture
from echelon.data.open_source import draw_from, open_sampling, open_source, reads_apart
from echelon.data.order import COMPUTED_FROM
from echelon.data.resumable_source import ResumableSource
from echelon.data.sampling import EpochSampler, batches_of
from echelon.data.shard_source import Agreement, ShardSource
from echelon.data.stream import StreamSource
from echelon.data.torch_loader import CARED_FOR, RENAMED
from echelon.data.transfer import on_device
from echelon.distributed.activity import activity


class Loader:
    """This rank's share of a data set, epoch after epoch.

    ``batch_size`` is per rank. In every step, ranks together see the samples that one rank with the global batch would
    see; see docs/data.md for the incomplete last batch of an epoch (``uneven``).

    dataset: data set, tuple of tensors, or iterable of samples
    sampler: draws the global order of every epoch, in place of ``shuffle``; the same on every rank
    batch_sampler: draws it in global batches, which are divided among ranks, in place of ``batch_size``
    worker_init_fn: called in each worker process, with its index
    on_change: called if an epoch restarts because its data is divided by a number of ranks that has changed; without
        it that is an error
    device, group: device of the batches; group whose ranks agree on the end of an epoch
    on_share: called with the number of samples of each batch
    on_batch: called with each batch when it is yielded
    ahead: called with each batch before the previous one is yielded
    is_shared: False if each rank has data of its own, so that a state, which is rank 0's, does not say which
    options: fields of ``echelon.data.LoaderOptions``

    >>> loader = echelon.data.Loader(dataset, batch_size=8, shuffle=False)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: Any = None,
        batch_sampler: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        on_change: Callable[[str], None] | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        on_share: Callable[[int], None] | None = None,
        on_batch: Callable[[Any], None] | None = None,
        ahead: Callable[[Any], None] | None = None,
        is_shared: bool = True,
        **options: Any,
    ) -> None:
        for name in options.keys() - set(OPTIONS) - set(INNER):
            raise UsageError(f"the loader has no option '{name}'{TORCHS.get(name) or nearest(name, OPTIONS)}")
        self.dataset = dataset
        sampling = open_sampling(sampler, batch_sampler, options.get("seed", LoaderOptions.seed))
        self._options = _loader_options(options, batch_sampler)
        self._source = open_source(dataset, self._options)
        if sampling is not None:
            draw_from(self._source, sampling, dataset)
        self._agreement = _agreement(self._source, self._options, group)
        self._device, self._on_share, self._on_batch, self._ahead = device, on_share, on_batch, ahead
        self._on_change, self._is_shared = on_change, is_shared
        pin = device is not None and device.type == "cuda"
        in_processes = 0 if isinstance(self._source, BlockSource) else self.workers  # blocks are read by threads
        self._fetching = BatchFetcher(
            self._source,
            workers=in_processes,
            prefetch=self._options.prefetch,
            pin=pin,
            worker_init=worker_init_fn,
            dataset=dataset,
        )
        self._cursor = Cursor(cut=self.global_batch)
        self._continues = False
        self._iteration = 0
        self._wanted_epochs: int | None = None
        self._real, self._room = 0, 0
        self._samples, self._work = 0, 0.0
        self._mark: int | None = None
        self.latest: BatchPlace | None = None  #: place of the batch that was yielded last
        self._left_out: set[tuple[int, ...]] = set()
        self._is_rewound = False
        self._mixed: tuple[int, MixedEpoch] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch: the rest of it after ``load_state_dict``, else all of it.

        An epoch that was left early (``break``) counts as done; the next loop begins the next epoch.
        """
        if self._cursor.position and not self._continues:
            self._next_epoch()
        self._continues = self._is_rewound = False
        self._iteration += 1
        epoch = self._cursor.epoch
        while self._cursor.epoch <= epoch:  # a loop that was rewound into an earlier epoch completes both
            if not (yield from self._rest_of_epoch()):
                self._next_epoch()

    def _rest_of_epoch(self) -> Generator[Any, None, bool]:
        """Yield the batches from the cursor on; return True if the loop was rewound meanwhile."""
        own = self._iteration
        activity.enter("data")
        for piece in _one_ahead(self._pieces(), self._ahead) if self._ahead else self._pieces():
            place = BatchPlace(self._cursor.epoch, self._cursor.position, self._cursor.samples, piece.taken)
            if place.samples in self._left_out:
                self._cursor.advance(piece.taken)
                continue
            self._account(piece)
            self.latest = place
            activity.enter(activity.call or "user code")
            yield piece.batch
            activity.enter("data")
            if own != self._iteration and not self._is_rewound:
                raise DataError(
                    "this loader was restarted or repositioned inside a loop over it; use one loader for each loop"
                )
            if self._is_rewound:
                self._is_rewound = self._continues = False
                return True
        return False

    def leave_out(self, place: BatchPlace) -> None:
        """Leave this batch out from now on; the loop that is running goes on from the state that is loaded next.

        place: ``latest`` after the batch was yielded
        """
        self._left_out.add(place.samples)
        self._is_rewound = True

    def describe(self, place: BatchPlace) -> str:
        """Return a text that names a batch, and this rank's samples in it if their indices can be found."""
        if not isinstance(self._source, MapSource):
            return str(place)
        indices = self._source.indices_of(place)
        return f"{place}: {numbers_text(indices)}" if indices else str(place)

    def fingerprint(self) -> DatasetFingerprint | None:
        """Return the data set's fingerprint; None with one rank, or if ranks read different parts of the data."""
        size = self._source.size
        if self._options.world_size == 1 or reads_apart(self.dataset):
            return None
        if isinstance(self._source, StreamSource | ResumableSource):
            return DatasetFingerprint(size or 0, None, read=self._mark)
        if size is None:
            return None
        result = dataset_fingerprint(self.dataset, size)
        return result if self._sampling is None else result._replace(order=self._sampling.mark)

    def __len__(self) -> int:
        """Return the number of steps in a full epoch."""
        steps = self._steps_of_epoch()
        if steps is None:
            sampling = self._sampling
            what = kind_name(self.dataset) if sampling is None else sampling.name
            whose = "the data set" if sampling is None else "the sampler"
            raise UnknownLengthError(
                f"the number of batches in {what} is not known before it is read; "
                f"count steps yourself, or give {whose} a __len__"
            )
        return steps

    @property
    def samples_drawn_again(self) -> int:
        """The number of samples that fill up the last batch of an epoch; 0 also where it is not known beforehand."""
        if self._options.uneven != "pad" or not isinstance(self._source, MapSource) or self._sampling is not None:
            return 0
        return self._options.missing((self._source.size or 0) % self.global_batch)

    def _steps_of_epoch(self) -> int | None:
        if isinstance(self._source, MapSource):
            return self._source.steps
        return None if self._source.size is None else self._options.steps(self._source.size)

    @property
    def _sampling(self) -> EpochSampler | None:
        return self._source.sampling if isinstance(self._source, MapSource) else None

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs until ``count`` are done; each runs a loop over the loader inside.

        An epoch whose inner loop was left early, or not run at all, counts as done.

        count: number of epochs

        >>> for epoch in loader.epochs(2):
        ...     for x, y in loader:
        ...         engine.step(x, y)
        """
        self._wanted_epochs = count
        return self._epochs_until(count)

    @property
    def epoch(self) -> int:
        """The number of epochs done so far, which is the index of the current one."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """The number of batches yielded in this epoch, including the current one."""
        return self._cursor.position

    @property
    def total_steps(self) -> int | None:
        """The number of steps in all epochs of ``epochs()``; ``None`` if it is unknown."""
        steps = self._steps_of_epoch()
        return None if self._wanted_epochs is None or steps is None else self._wanted_epochs * steps

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch of one rank."""
        return self._options.batch_size

    @property
    def global_batch(self) -> int:
        """The number of samples in a step of all ranks together."""
        return self._options.global_batch

    @property
    def corpus_samples(self) -> dict[str, int] | None:
        """The samples that each corpus of a mixture has given so far, on all ranks; None for other data."""
        if not isinstance(self.dataset, Mixture) or self._sampling is not None:
            return None
        counts = self._mixed_epoch(self.epoch).counts(self._cursor.samples)
        return dict(zip(self.dataset.names, counts, strict=True))

    def _mixed_epoch(self, epoch: int) -> MixedEpoch:
        if self._mixed is None or self._mixed[0] != epoch:
            assert isinstance(self.dataset, Mixture)
            order = self.dataset.epoch_order(seed=self._options.seed, epoch=epoch, shuffle=self._options.shuffle)
            self._mixed = epoch, order
        return self._mixed[1]

    @property
    def reading_line(self) -> str | None:
        """Return a log line if ranks read more of a stream than they could, else None."""
        return whole_reading(self.dataset, self._options)

    @property
    def padding_waste(self) -> float:
        """The fraction of padding in the padded sequences of this rank so far; 0 without ``lengths``."""
        return 1 - self._real / self._room if self._room else 0.0

    @property
    def workers(self) -> int:
        """The number of processes (threads, for data in blocks) that read ahead; 0: batches are read on demand."""
        return self._options.workers

    @property
    def possible_rate(self) -> float | None:
        """The samples per second that could be read for this rank, from the reading time of the samples so far.

        It is None before the first batch, and for data that threads read in blocks.
        """
        if not self._work or isinstance(self._source, BlockSource):
            return None
        return self._samples / self._work * max(self.workers, 1)

    @property
    def collate(self) -> BatchCollator:
        """The collator that makes batches as this loader does."""
        return BatchCollator(self._options, self.dataset)

    def stop_workers(self) -> None:
        """Read in this process, so that it sees the samples of every batch (``echelon verify``)."""
        self._fetching.stop_workers()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain numbers, ready for JSON."""
        state = to_state(self._cursor, self._order_facts(), self._identity._asdict() if self._is_shared else {})
        return {**state, "left_out": sorted(self._left_out)} if self._left_out else state

    @functools.cached_property
    def _identity(self) -> DataIdentity:
        return data_identity(self.dataset, self._source.size)

    def changed_data(self, state: Mapping[str, Any]) -> str | None:
        """Return what the data was when ``state`` was saved, and what it is; None if it has not changed.

        state: result of ``state_dict``
        """
        before = stored_identity(state.get("data"))
        if not self._is_shared or not any(before) or not before.differs(self._identity):
            return None
        return f"it was {before}, and it is {self._identity}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with the same or another number of ranks or batch size.

        state: result of ``state_dict``

        >>> loader.load_state_dict(loader.state_dict())
        """
        order = self._order_facts()
        state = self._on_same_data(state)
        then, now = state.get("order", {}).get("world_size"), order.get("world_size")
        if self._on_change is not None and then != now and state.get("samples"):
            self._on_change(
                f"epoch {state['epoch']} was started by {then} ranks that read their own files, and there "
                f"are {now} now: it starts again"
            )
            state = {**state, "samples": 0, "position": 0}
        self._cursor = from_state(state, order, self.global_batch)
        self._left_out |= {tuple(samples) for samples in state.get("left_out", [])}
        self._continues = True
        self._iteration += 1

    def _on_same_data(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state to continue from; at the start of its epoch if its data had another size.

        Raises ``DataError`` in the middle of an epoch whose data has changed, unless the options accept that.
        """
        change = self.changed_data(state) if state.get("samples") else None
        if change is None:
            return state
        before, size = stored_identity(state["data"]).size, self._identity.size
        least = state["cut"] if self._options.uneven == "drop" else 1
        if size is not None and before is not None and state["samples"] + least > before:
            return {**state, "samples": size, "order": self._order_facts()}  # nothing was left of that epoch
        if self._options.changed_data == "refuse":
            raise DataError(
                f"the data has changed in the middle of epoch {state['epoch']}: {change}; use the same data until that "
                "epoch is done, or give the loader changed_data='accept'"
            )
        return state if before == size else {**state, "samples": 0, "position": 0}

    def _epochs_until(self, count: int) -> Iterator[int]:
        while self.epoch < count:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                self._next_epoch()

    def _order_facts(self) -> dict[str, Any]:
        """Return the facts that decide which samples follow a position. They must be equal to continue an epoch."""
        options = self._options
        facts: dict[str, Any] = {"seed": options.seed, "shuffle": options.shuffle}
        if isinstance(self._source, MapSource | BlockSource):
            facts["size"] = self._source.size
            if options.shuffle and (self._source.size or 0) >= COMPUTED_FROM:
                facts["order"] = "computed"  # by earlier versions the whole order was shuffled
            if isinstance(self.dataset, Mixture):
                facts |= self.dataset.facts()
            if self._sampling is not None:
                facts["sampler"] = self._sampling.name
        elif isinstance(self._source, DividedSource):
            facts |= {"divided": streams_of(self.dataset, options), "shuffle_buffer": options.shuffle_buffer}
        elif options.shuffle:
            facts["shuffle_buffer"] = options.shuffle_buffer
            if isinstance(self._source, StreamSource) and self._source.is_stateful:
                facts["shuffled_in"] = "windows"
        if isinstance(self._source, ShardSource | BlockSource):
            facts["world_size"] = options.world_size
        if isinstance(self._source, BlockSource) and options.shuffle:
            facts["blocks"] = self._source.blocks
        facts["bucket_window"] = options.bucket_window if options.lengths is not None else 0
        return facts

    def _pieces(self) -> Iterator[RankBatch]:
        # requests run ahead of the yielded batches, so they start from a copy of the cursor
        pieces = self._fetching.answers(self._source.requests(replace(self._cursor)))
        if self._agreement is not None:
            pieces = self._agreement.pieces(pieces, self._cursor)
        return on_device(pieces, self._device)

    def _account(self, piece: RankBatch) -> None:
        self._cursor.advance(piece.taken)
        self._cursor.anchor = piece.anchor
        self._real += piece.real
        self._room += piece.room
        self._samples += piece.share
        self._work += piece.seconds
        self._mark = self._mark if piece.mark is None else piece.mark
        if self._on_share is not None:
            self._on_share(piece.share)
        if self._on_batch is not None:
            self._on_batch(piece.batch)

    def _next_epoch(self) -> None:
        goes_on = isinstance(self._source, ResumableSource) and self._source.goes_on
        self._cursor.next_epoch(self.global_batch, goes_on=goes_on)
        self._continues = False


def _agreement(source: Any, options: LoaderOptions, group: dist.ProcessGroup | None) -> Agreement | None:
    """Return the agreement of ranks that each read their own part; None where they need none."""
    if isinstance(source, DividedSource):
        return DividedAgreement(source, options, group)
    return Agreement(source, options, group) if isinstance(source, ShardSource) else None


def _one_ahead(pieces: Iterator[RankBatch], show: Callable[[Any], None]) -> Iterator[RankBatch]:
    """Yield the same batches, but call ``show`` with each one before the previous one is yielded."""
    last = next(pieces, None)
    if last is None:
        return
    for piece in pieces:
        show(piece.batch)
        yield last
        last = piece
    yield last


#: Options that the engine sets.
INNER = ("device", "group", "on_share", "on_batch", "on_change", "ahead", "is_shared", "total", "multiple")
_NAMES = (*(field.name for field in fields(LoaderOptions)), *Loader.__init__.__annotations__)
OPTIONS = tuple(name for name in _NAMES if name not in ("options", "return", *INNER))
#: Names of torch's options, and the text that leads to Echelon's.
TORCHS = {
    **{theirs: f"; it is called {ours}= here" for theirs, ours in RENAMED.items()},
    **dict.fromkeys(CARED_FOR, "; leave it out, the loader sets it"),
    "drop_last": "; it is called uneven='drop' here",
    "generator": "; seed= decides the order here",
}


def _loader_options(options: dict[str, Any], batch_sampler: Any) -> LoaderOptions:
    if batch_sampler is not None and options.get("batch_size") is None:
        total = batches_of(batch_sampler)
        options |= {"total": total, "batch_size": -(-total // options.get("world_size", 1))}
    if options.get("batch_size") is None:
        raise UsageError("the loader needs batch_size=, or batch_sampler=")
    return LoaderOptions(**options | {"shares": tuple(float(share) for share in options.get("shares", ()))})
