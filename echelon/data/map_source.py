"""Sources for map-style data: a global order of indices, divided into steps and shares before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import TensorDataset

from echelon.base.errors import DataError, UsageError
from echelon.data.batch_place import BatchPlace
from echelon.data.cache import CachedItems
from echelon.data.collate import BatchCollator
from echelon.data.cursor import Cursor
from echelon.data.data_source import RankBatch, seen_lengths, too_few
from echelon.data.hugging_face import reads_rows_at_once
from echelon.data.loader_options import LoaderOptions
from echelon.data.order import BucketedOrder, EpochOrder, Indices, epoch_order
from echelon.data.repeated import Repeated
from echelon.data.sampling import EpochSampler
from echelon.data.seeding import SeedPurpose, chain, mix, numpy_stream, preserve_global_rng, seed_all


class DatasetOrder(Protocol):
    """Returns the order of an epoch."""

    def __call__(self, *, seed: int, epoch: int, shuffle: bool) -> EpochOrder: ...


class StepIndices(NamedTuple):
    """The samples of one step for this rank: their indices in the data set, and their positions in the epoch."""

    epoch: int
    indices: Indices
    positions: Indices
    share: int
    taken: int
    real: int
    room: int


class MapSource:
    """A data set with ``__len__`` and ``__getitem__``.

    size:  samples of an epoch
    order: returns the order of an epoch, whose indices are those of ``dataset``; default: the loader's own
    """

    def __init__(self, dataset: Any, size: int, options: LoaderOptions, order: DatasetOrder | None = None) -> None:
        self.size: int | None = size
        self._own_order, self._is_whole = order or partial(epoch_order, size), order is None
        self._count, self._options, self._collate = size, options, BatchCollator(options, dataset)
        if problem := too_few(size, options.uneven, options.world_size, options.global_batch):
            raise DataError(problem)
        # indexing these types runs no user code, so there is no randomness to isolate
        inert = type(dataset) in (list, ColumnDataset, torch.Tensor, np.ndarray)
        self._reads_at_once = reads_rows_at_once(dataset) and not options.cache
        self._seeds_itself = inert or options.cache
        self._calm = (inert or self._reads_at_once) and self._collate.is_ours
        self._dataset: Any = CachedItems(dataset, options.seed) if options.cache and not inert else dataset
        self._lengths = _known_lengths(options, size if order is None else len(dataset))
        self.sampling: EpochSampler | None = None  #: sampler that draws the order of epochs, in place of the loader

    def draw_from(self, sampling: EpochSampler) -> None:
        """Take the order of every epoch from a sampler."""
        options = self._options
        if sampling.in_batches and self._lengths is not None:
            raise UsageError("batch_sampler= and lengths= both choose the samples of a batch; leave one of them out")
        if sampling.size == 0:
            raise DataError(f"{sampling.name} yields no samples; check its arguments")
        if sampling.size is not None and not sampling.in_batches:
            problem = too_few(sampling.size, options.uneven, options.world_size, options.global_batch)
            if problem:
                raise DataError(f"{sampling.name}: {problem}")
        self.sampling = sampling

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without the sampler: the main process draws the order."""
        return {**self.__dict__, "sampling": None}

    @property
    def steps(self) -> int | None:
        """The number of steps in an epoch; None if a sampler has no length."""
        if self.sampling is None:
            return self._options.steps(self._count)
        if self.sampling.in_batches or self.sampling.size is None:
            return self.sampling.size
        return self._options.steps(self.sampling.size)

    def requests(self, cursor: Cursor) -> Iterator[StepIndices]:
        order, start = self._order(cursor), cursor.samples
        in_batches = self.sampling is not None and self.sampling.in_batches
        while (stop := order.end(start, self._options.global_batch)) > start:
            if in_batches:
                yield self._joined(cursor.epoch, order, start, stop)
            elif stop - start == self._options.global_batch:
                yield self._pick(cursor.epoch, order.take(start, stop), start, stop - start)
            elif self._options.uneven == "pad":
                yield self._padded(cursor.epoch, order, start, stop)
            elif self._options.uneven == "join":
                yield self._joined(cursor.epoch, order, start, stop)
            start = stop

    def indices_of(self, place: BatchPlace) -> list[int]:
        """Return this rank's samples in a batch, without padding; none if a sampler or lengths decide on the order."""
        if self.sampling is not None or self._lengths is not None:
            return []
        order = self._own_order(seed=self._options.seed, epoch=place.epoch, shuffle=self._options.shuffle)
        taken = order.take(place.start, place.start + place.taken)
        found: list[int] = taken[self._options.own(len(taken))].tolist()
        return found

    def fetch(self, request: StepIndices) -> RankBatch:
        if self._calm:
            batch = self._gather(request)
        else:
            with preserve_global_rng():
                batch = self._gather(request)
        return RankBatch(batch, request.share, request.taken, request.real, request.room)

    def _gather(self, request: StepIndices) -> Any:
        indices = request.indices.tolist()
        samples = self._rows(indices) if self._reads_at_once else self._samples(indices, request)
        first = int(request.positions[0])
        return self._collate(samples, indices, mix(self._options.seed, SeedPurpose.COLLATE, request.epoch, first))

    def _rows(self, indices: list[int]) -> list[Any]:
        rows: list[Any] = self._dataset.__getitems__(indices)
        return rows

    def _samples(self, indices: list[int], request: StepIndices) -> list[Any]:
        seed = mix(self._options.seed, SeedPurpose.SAMPLE, request.epoch)
        return [
            self._sample(index, chain(seed, position))
            for index, position in zip(indices, request.positions.tolist(), strict=True)
        ]

    def _sample(self, index: int, seed: int) -> Any:
        if not self._seeds_itself:
            seed_all(seed)
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"echelon: while reading sample {index}")
            raise

    def _order(self, cursor: Cursor) -> EpochOrder:
        seed, shuffle = self._options.seed, self._options.shuffle
        if self.sampling is not None and self._lengths is None:
            return self.sampling.order(cursor.epoch, self._options.global_batch)
        if self.sampling is not None:
            indices = self.sampling.whole(cursor.epoch)
        else:
            order = self._own_order(seed=seed, epoch=cursor.epoch, shuffle=shuffle)
            if self._lengths is None:
                return order
            indices = order.take(0, self._count)
        shuffler = partial(numpy_stream, seed, SeedPurpose.BUCKET, cursor.epoch) if shuffle else lambda window: None
        return BucketedOrder(indices, self._measure, cursor.cut, self._options.bucket_window, shuffler)

    def _pick(self, epoch: int, indices: Indices, start: int, taken: int) -> StepIndices:
        own = self._options.own(len(indices))
        share = len(indices[own])
        shown = own if share else slice(0, 1)  # fewer samples than ranks: a stand-in batch of weight 0
        chosen, positions = indices[shown], np.arange(start, start + len(indices))[shown]
        return StepIndices(epoch, chosen, positions, share, taken, *self._elements(chosen))

    def _padded(self, epoch: int, order: EpochOrder, start: int, stop: int) -> StepIndices:
        extra, draw = self._options.missing(stop - start), numpy_stream(self._options.seed, SeedPurpose.PAD, epoch)
        if self.sampling is None and self._is_whole:
            again = draw.randint(0, self._count, extra)
        else:  # a sampler or a mixture may leave samples out, so repeat only samples that it has drawn
            recent = order.take(max(0, start - self._options.global_batch), stop)
            again = recent[draw.randint(0, len(recent), extra)]
        return self._pick(epoch, np.concatenate([order.take(start, stop), again]), start, stop - start)

    def _joined(self, epoch: int, order: EpochOrder, start: int, stop: int) -> StepIndices:
        pick = self._pick(epoch, order.take(start, stop), start, stop - start)
        if pick.share or not start:  # before the first batch there is none that could stand in
            return pick
        before = max(0, start - self._options.global_batch)
        last = self._pick(epoch, order.take(before, start), before, 0)
        if not last.share:  # the epoch was begun by fewer ranks, whose last batch is too small for all ranks
            last = StepIndices(epoch, order.take(before, start), np.arange(before, start), 0, 0, 0, 0)
        return last._replace(share=0, taken=stop - start)

    def _elements(self, indices: Indices) -> tuple[int, int]:
        return (0, 0) if self._lengths is None else seen_lengths(self._measure(indices).tolist())

    def _measure(self, indices: Indices) -> Indices:
        """Return the lengths of these samples; unknown ones are measured by reading the sample, once per loader."""
        assert self._lengths is not None
        unknown = [index for index in indices.tolist() if self._lengths[index] < 0]
        if unknown and callable(self._options.lengths):
            seed = mix(self._options.seed, SeedPurpose.KEPT)
            with preserve_global_rng():
                for index in unknown:
                    self._lengths[index] = self._options.lengths(self._sample_to_measure(index, seed))
        return self._lengths[indices]

    def _sample_to_measure(self, index: int, seed: int) -> Any:
        seed_all(chain(seed, index))  # depends on the sample alone, so that every rank measures the same
        return self._dataset[index]


class TensorSource(MapSource):
    """Tensors or arrays with one row per sample: a batch is one indexing operation per column, 10 times as fast."""

    def __init__(self, columns: ColumnDataset, options: LoaderOptions) -> None:
        super().__init__(columns, len(columns), options)
        self._columns, self._places = columns.arrays, columns.rows

    def _gather(self, request: StepIndices) -> Any:
        rows = self._places(request.indices)
        return [
            _selected(column, rows) if isinstance(column, torch.Tensor) else torch.from_numpy(column[rows])
            for column in self._columns
        ]


def _selected(column: torch.Tensor, rows: Indices) -> torch.Tensor:
    """Return rows of a tensor. index_select copies row by row, which is twice as fast as indexing."""
    where = torch.from_numpy(rows)
    if column.is_cuda:  # from pinned memory, because any other copy would synchronize with the GPU
        where = where.pin_memory().to(column.device, non_blocking=True)
    return column.index_select(0, where)


class ColumnDataset:
    """Tensors and arrays of equal length, read row by row.

    repeated:  maps samples to rows if the samples are not simply all rows
    """

    def __init__(self, arrays: Sequence[Any], repeated: Repeated | None = None) -> None:
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise DataError(
                f"the tensors of one data set differ in length: {lengths}; each needs a row for every sample"
            )
        self.arrays = tuple(arrays)
        self._repeated = repeated

    def __len__(self) -> int:
        return len(self.arrays[0]) if self._repeated is None else len(self._repeated)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        row = int(self.rows(np.array(index)))
        return tuple(array[row] for array in self.arrays)

    def rows(self, indices: Indices) -> Indices:
        return indices if self._repeated is None else self._repeated.rows(indices)


def columns_of(dataset: Any) -> tuple[Any, ...]:
    """Return the tensors or arrays of which a data set consists; empty for other data sets."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if isinstance(dataset, tuple) and all(isinstance(t, torch.Tensor | np.ndarray) for t in dataset):
        return dataset
    return ()


def _known_lengths(options: LoaderOptions, size: int) -> Indices | None:
    if options.lengths is None:
        return None
    if callable(options.lengths):
        return np.full(size, -1, dtype=np.int64)
    known = np.asarray(options.lengths, dtype=np.int64)
    if known.shape != (size,):
        raise DataError(f"lengths= has {len(known)} entries for a data set of {size} samples; give one for each")
    return known
