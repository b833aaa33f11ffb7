"""Data that can be indexed: a global order of indices, cut into steps and shares before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from echelon.data.cache import KeptItems
from echelon.data.collate import Collate
from echelon.data.cursor import Cursor
from echelon.data.options import LoaderOptions
from echelon.data.order import BucketedOrder, EpochOrder, Indices, permutation
from echelon.data.repeated import Repeated
from echelon.data.seeding import Use, apart, chain, mix, numpy_stream, seed_all
from echelon.data.source import Piece, seen_lengths, too_few
from echelon.errors import DataError


class Pick(NamedTuple):
    """The samples of one step for this rank: where they lie in the data set, and where in the epoch."""

    epoch: int
    indices: Indices
    positions: Indices
    share: int
    taken: int
    real: int
    room: int


class MapSource:
    """A data set with ``__len__`` and ``__getitem__``."""

    def __init__(self, dataset: Any, size: int, options: LoaderOptions) -> None:
        self.size: int | None = size
        self._count, self._options, self._collate = size, options, Collate(options)
        if problem := too_few(size, options.uneven, options.world_size, options.global_batch):
            raise DataError(problem)
        # indexing these runs nobody's code, so there is no randomness to keep apart
        inert = type(dataset) in (list, Columns, torch.Tensor, np.ndarray)
        self._seeds_itself = inert or options.cache
        self._calm = inert and self._collate.is_ours
        self._dataset = KeptItems(dataset, options.seed) if options.cache and not inert else dataset
        self._lengths = _known_lengths(options, size)

    def requests(self, cursor: Cursor) -> Iterator[Pick]:
        order = self._order(cursor)
        for start in range(cursor.samples, self._count, self._options.global_batch):
            stop = min(start + self._options.global_batch, self._count)
            if stop - start == self._options.global_batch:
                yield self._pick(cursor.epoch, order.take(start, stop), start, stop - start)
            elif self._options.uneven == "pad":
                yield self._padded(cursor.epoch, order, start, stop)
            elif self._options.uneven == "join":
                yield self._joined(cursor.epoch, order, start, stop)

    def fetch(self, request: Pick) -> Piece:
        if self._calm:
            batch = self._gather(request)
        else:
            with apart():
                batch = self._gather(request)
        return Piece(batch, request.share, request.taken, request.real, request.room)

    def _gather(self, request: Pick) -> Any:
        indices = request.indices.tolist()
        seed = mix(self._options.seed, Use.SAMPLE, request.epoch)
        samples = [
            self._sample(index, chain(seed, position))
            for index, position in zip(indices, request.positions.tolist(), strict=True)
        ]
        first = int(request.positions[0])
        return self._collate(samples, indices, mix(self._options.seed, Use.COLLATE, request.epoch, first))

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
        indices = permutation(self._count, seed=seed, epoch=cursor.epoch, shuffle=shuffle)
        if self._lengths is None:
            return EpochOrder(indices)
        shuffler = partial(numpy_stream, seed, Use.BUCKET, cursor.epoch) if shuffle else lambda window: None
        return BucketedOrder(indices, self._measure, cursor.cut, self._options.bucket_window, shuffler)

    def _pick(self, epoch: int, indices: Indices, start: int, taken: int) -> Pick:
        own = self._options.own(len(indices))
        share = len(indices[own])
        shown = own if share else slice(0, 1)  # fewer samples than ranks: a stand-in that counts for nothing
        mine, positions = indices[shown], np.arange(start, start + len(indices))[shown]
        return Pick(epoch, mine, positions, share, taken, *self._elements(mine))

    def _padded(self, epoch: int, order: EpochOrder, start: int, stop: int) -> Pick:
        extra = self._options.missing(stop - start)
        again = numpy_stream(self._options.seed, Use.PAD, epoch).randint(0, self._count, extra)
        return self._pick(epoch, np.concatenate([order.take(start, stop), again]), start, stop - start)

    def _joined(self, epoch: int, order: EpochOrder, start: int, stop: int) -> Pick:
        pick = self._pick(epoch, order.take(start, stop), start, stop - start)
        if pick.share:
            return pick
        before = max(0, start - self._options.global_batch)
        last = self._pick(epoch, order.take(before, start), before, 0)
        if not last.share:  # the epoch was begun by fewer ranks, and too few samples lie behind for all of these
            last = Pick(epoch, order.take(before, start), np.arange(before, start), 0, 0, 0, 0)
        return last._replace(share=0, taken=stop - start)

    def _elements(self, indices: Indices) -> tuple[int, int]:
        return (0, 0) if self._lengths is None else seen_lengths(self._measure(indices).tolist())

    def _measure(self, indices: Indices) -> Indices:
        """Lengths of these samples; those not known yet are read for it, once in the life of the loader."""
        assert self._lengths is not None
        unknown = [index for index in indices.tolist() if self._lengths[index] < 0]
        if unknown and callable(self._options.lengths):
            seed = mix(self._options.seed, Use.KEPT)
            with apart():
                for index in unknown:
                    self._lengths[index] = self._options.lengths(self._sample_to_measure(index, seed))
        return self._lengths[indices]

    def _sample_to_measure(self, index: int, seed: int) -> Any:
        seed_all(chain(seed, index))  # from the sample alone, so that every rank measures the same
        return self._dataset[index]


class TensorSource(MapSource):
    """Tensors or arrays with one row for each sample: a batch is one indexing of each, 10 times as quick."""

    def __init__(self, columns: Columns, options: LoaderOptions) -> None:
        super().__init__(columns, len(columns), options)
        self._columns, self._rows = columns.arrays, columns.rows

    def _gather(self, request: Pick) -> Any:
        rows = self._rows(request.indices)
        return [
            _selected(column, rows) if isinstance(column, torch.Tensor) else torch.from_numpy(column[rows])
            for column in self._columns
        ]


def _selected(column: torch.Tensor, rows: Indices) -> torch.Tensor:
    """index_select copies row by row, twice as quick as indexing."""
    where = torch.from_numpy(rows)
    if column.is_cuda:  # from pinned memory: any other copy would make the host wait until the GPU has nothing to do
        where = where.pin_memory().to(column.device, non_blocking=True)
    return column.index_select(0, where)


class Columns:
    """Tensors and arrays of equal length, read row by row.

    repeated: which rows the samples are, and how many samples, where they are not simply all rows
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
    """The tensors or arrays that a data set consists of; none where it is something else."""
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
