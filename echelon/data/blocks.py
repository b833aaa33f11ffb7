"""Reads data in blocks of rows as columns, and cuts batches from the columns without touching single samples.

The number of rows in each block is known before any is read. So the ranks divide the rows of an epoch without
communication, all know when it ends, and resuming starts at the right block.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.data.cursor import Cursor
from echelon.data.data_source import RankBatch, too_few
from echelon.data.loader_options import LoaderOptions
from echelon.data.order import Indices, block
from echelon.data.seeding import SeedPurpose, numpy_stream

#: Number of consecutive blocks whose rows are mixed with each other when the data is shuffled.
MIXED = 4


class ColumnBlock(NamedTuple):
    """The rows of one block as columns of equal length."""

    columns: list[torch.Tensor]
    #: mask of the rows that are valid; None if all are
    whole: NDArray[np.bool_] | None = None


class BlockReader(Protocol):
    """Reads blocks in one pass over the data."""

    def fetch(self, number: int) -> Any:
        """Return a block as stored in the file. One thread calls it, in the order of the pass."""

    def columns(self, fetched: Any) -> ColumnBlock:
        """Convert the result of ``fetch`` to columns. Any thread may call it."""


class BlockData(Protocol):
    """A data set of blocks."""

    #: rows of each block
    block_rows: Sequence[int]
    #: sequences of blocks that must be read in order, because compressed data has no random access
    runs: Sequence[range]

    def reader(self) -> BlockReader: ...


class BlockSlice(NamedTuple):
    """Rows ``start`` to ``stop`` of a block."""

    number: int
    start: int
    stop: int


def is_blocked(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("block_rows", "runs", "reader"))


class Window:
    """The rows of a few blocks in the order in which batches take them."""

    def __init__(self, blocks: list[ColumnBlock], order: Indices | None) -> None:
        self._columns = [
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*(b.columns for b in blocks), strict=True)
        ]
        self._whole: NDArray[np.bool_] | None = None
        if any(b.whole is not None for b in blocks):
            self._whole = np.concatenate(
                [np.ones(len(b.columns[0]), np.bool_) if b.whole is None else b.whole for b in blocks]
            )
        self._order = order
        self.rows = len(self._columns[0])

    def take(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the valid rows at positions ``start`` to ``stop``."""
        if self._order is None and self._whole is None:
            return [column[start:stop] for column in self._columns]
        rows = np.arange(start, stop) if self._order is None else self._order[start:stop]
        return self._select(rows if self._whole is None else rows[self._whole[rows]])

    def again(self, count: int, *seed: int) -> list[torch.Tensor]:
        """Return ``count`` rows drawn at random."""
        rows = np.arange(self.rows) if self._whole is None else np.flatnonzero(self._whole)
        if not len(rows):
            raise DataError(
                f"{self.rows} consecutive rows cannot be read, so no row is left to pad a batch with; repair the data"
            )
        return self._select(rows[numpy_stream(*seed).randint(0, len(rows), count)])

    def _select(self, rows: Indices) -> list[torch.Tensor]:
        at = torch.from_numpy(rows)
        return [column.index_select(0, at) for column in self._columns]


class RankEpochRows:
    """One rank's rows of one epoch: slices of blocks in order, grouped into windows of ``mixed`` slices."""

    def __init__(self, parts: list[BlockSlice], mixed: int) -> None:
        self.windows = [parts[at : at + mixed] for at in range(0, len(parts), mixed)]
        sizes = [sum(part.stop - part.start for part in window) for window in self.windows]
        self.starts = list(itertools.accumulate(sizes, initial=0))
        self.rows = self.starts[-1]

    def window_of(self, row: int) -> int:
        """Return the index of the window that has a row; the last one for a row beyond the end."""
        return min(bisect_right(self.starts, row), len(self.windows)) - 1


class BlockSource:
    """Yields batches that are cut from the blocks; one thread fetches ahead and other threads make columns."""

    def __init__(self, dataset: BlockData, options: LoaderOptions) -> None:
        _refuse_what_needs_samples(options)
        self._dataset, self._options = dataset, options
        self._rows = sum(dataset.block_rows)
        self.size: int | None = self._rows
        self.blocks = len(dataset.block_rows)
        if problem := too_few(self._rows, options.uneven, options.world_size, options.global_batch):
            raise DataError(problem)

    def requests(self, cursor: Cursor) -> Iterator[RankBatch]:
        """Yield the batches themselves. Closing the generator early ends its threads."""
        left = self._rows - cursor.samples
        if left <= 0:
            return
        section = self._section(cursor.epoch)
        row = min(cursor.samples // self._options.world_size, section.rows)
        windows = self._windows(section, cursor.epoch, section.window_of(row))
        try:
            start, window = next(windows)
            while left > 0 and not (self._options.uneven == "drop" and left < self._options.global_batch):
                own = min(self._options.batch_size, section.rows - row)
                parts, stop = [], row + own
                while row < stop:
                    if row == start + window.rows:
                        start, window = next(windows)
                    end = min(stop, start + window.rows)
                    parts.append(window.take(row - start, end - start))
                    row = end
                taken = min(left, self._options.global_batch)
                piece = self._piece(parts, own, taken, window, cursor.epoch)
                if piece.share or self._options.world_size > 1:  # a single rank need not yield empty batches
                    yield piece
                left -= taken
        finally:
            windows.close()

    def fetch(self, request: RankBatch) -> RankBatch:
        return request

    def _piece(self, parts: list[list[torch.Tensor]], own: int, taken: int, window: Window, epoch: int) -> RankBatch:
        options = self._options
        most = -(-taken // options.world_size)  # rows of the rank with the most rows
        if own < most and options.uneven == "pad":
            parts.append(window.again(most - own, options.seed, SeedPurpose.PAD, epoch, options.rank))
        batch = [torch.cat(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True)]
        if batch and len(batch[0]):
            return RankBatch(batch, len(batch[0]), taken)
        if own == options.batch_size:
            raise DataError(f"{own} consecutive rows, a whole batch, cannot be read; repair the data")
        # this rank has no rows left: a stand-in batch of weight 0
        stand_in = window.again(
            min(window.rows, options.batch_size), options.seed, SeedPurpose.PAD, epoch, options.rank
        )
        return RankBatch(stand_in, 0, taken)

    def _section(self, epoch: int) -> RankEpochRows:
        sizes, runs = self._dataset.block_rows, list(self._dataset.runs)
        if self._options.shuffle:
            order = numpy_stream(self._options.seed, SeedPurpose.FILES, epoch).permutation(len(runs))
            runs = [runs[at] for at in order]
        own = block(self._rows, self._options.rank, self._options.world_size)
        parts, behind = [], 0
        for number in itertools.chain.from_iterable(runs):
            first, last = max(own.start - behind, 0), min(own.stop - behind, sizes[number])
            if first < last:
                parts.append(BlockSlice(number, first, last))
            behind += sizes[number]
        return RankEpochRows(parts, MIXED if self._options.shuffle else 1)

    def _windows(self, section: RankEpochRows, epoch: int, first: int) -> Generator[tuple[int, Window]]:
        """Yield the windows from ``first`` on, each with the index of its first row."""
        reader, options = self._dataset.reader(), self._options
        parts = [part for window in section.windows[first:] for part in window]
        threads = max(1, options.workers)
        blocks = _read_ahead(reader, parts, threads=threads, depth=threads + options.prefetch)
        try:
            for number in range(first, len(section.windows)):
                rows = section.starts[number + 1] - section.starts[number]
                order = None
                if options.shuffle:
                    order = numpy_stream(options.seed, SeedPurpose.BUFFER, epoch, options.rank, number).permutation(
                        rows
                    )
                window = list(itertools.islice(blocks, len(section.windows[number])))
                yield section.starts[number], Window(window, order)
        finally:
            blocks.close()


def _read_ahead(
    reader: BlockReader, parts: Sequence[BlockSlice], *, threads: int, depth: int
) -> Generator[ColumnBlock]:
    """Yield the slices of blocks in order; up to ``depth`` of them are in progress or waiting."""
    fetching = ThreadPoolExecutor(1, "echelon-fetch")
    making = ThreadPoolExecutor(threads, "echelon-columns")

    def begin(part: BlockSlice) -> Future[ColumnBlock]:
        fetched = fetching.submit(reader.fetch, part.number)
        return making.submit(lambda: _cut(reader.columns(fetched.result()), part))

    waiting = iter(parts)
    under_way = deque(begin(part) for part in itertools.islice(waiting, depth))
    try:
        while under_way:
            made = under_way.popleft().result()
            under_way.extend(begin(part) for part in itertools.islice(waiting, 1))
            yield made
    finally:
        fetching.shutdown(wait=True, cancel_futures=True)
        making.shutdown(wait=True, cancel_futures=True)


def _cut(made: ColumnBlock, part: BlockSlice) -> ColumnBlock:
    whole = None if made.whole is None else made.whole[part.start : part.stop]
    return ColumnBlock([column[part.start : part.stop] for column in made.columns], whole)


def _refuse_what_needs_samples(options: LoaderOptions) -> None:
    for name, why in (
        ("collate", "its batches are made already"),
        ("lengths", "its rows have no length"),
        ("cache", "it is read block by block"),
        ("shares", "its ranks read blocks of their own"),
    ):
        if getattr(options, name):
            raise DataError(f"{name}= is not for this data set: {why}; leave it out")
