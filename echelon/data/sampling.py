"""Draws the order of epochs from samplers: one global order, the same on every rank and after a resume.

A sampler draws from Python's, numpy's and torch's global generators, or from its own ``torch.Generator``. Global
generators are seeded from the loader's seed and the epoch. A sampler's own generator continues from epoch to epoch, as
in torch's DataLoader; after a resume the previous epochs are drawn again to restore its state.
"""

from __future__ import annotations

import operator
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

from echelon.base.errors import DataError
from echelon.data.order import EpochOrder, Indices
from echelon.data.seeding import (
    GlobalRngState,
    SeedPurpose,
    global_state,
    mix,
    preserve_global_rng,
    restore_global_state,
    seed_all,
)

#: Indices read from a sampler at once, because swapping the states of generators takes 0.2 ms.
CHUNK = 1024
#: Longest epoch that is drawn again to restore a generator; with longer epochs each epoch has its own seed.
REPLAYED = 2**28


class EpochSampler:
    """A sampler or batch sampler as the source of every epoch's order.

    in_batches:  True if the sampler yields lists of indices, each a global batch
    mark:        checksum of the first drawn indices, for ranks to compare; None before that
    """

    def __init__(self, sampler: Any, seed: int, *, in_batches: bool) -> None:
        self.sampler, self.in_batches = sampler, in_batches
        self.mark: int | None = None
        self._seed, self._generators = seed, generators_of(sampler)
        self._beginnings = {0: [generator.get_state() for generator in self._generators]}  # by epoch
        self.size = known_length(sampler)

    @property
    def name(self) -> str:
        shown = self.sampler.sampler if isinstance(self.sampler, SeedDrawingSampler) else self.sampler
        return type(shown).__name__

    def order(self, epoch: int, global_batch: int) -> EpochOrder:
        """Return the order of an epoch; only the latest one can be read."""
        drawing = SamplerPass(self, epoch, self._states_before(epoch))
        return BatchedOrder(drawing, global_batch) if self.in_batches else SampledOrder(drawing, global_batch)

    def whole(self, epoch: int) -> Indices:
        """Return all indices of an epoch."""
        if self.size is None or self.size > REPLAYED:
            raise DataError(f"lengths= needs the whole order of an epoch, and {self.name} never ends; leave it out")
        return np.array(SamplerPass(self, epoch, self._states_before(epoch)).read(self.size + 1), dtype=np.int64)

    def ended(self, epoch: int, states: list[torch.Tensor]) -> None:
        """Remember the states of the generators after this epoch."""
        self._beginnings = {0: self._beginnings[0], epoch + 1: states}

    def first_batch(self) -> int:
        """Draw the first batch of a batch sampler, and return the number of its indices."""
        result = SamplerPass(self, 0, self._beginnings[0]).read(1)
        return len(result[0]) if result else 0

    def swapped(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Set the states of the sampler's generators; return the previous ones."""
        before = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return before

    def begin(self, epoch: int) -> Iterator[Any]:
        """Start the sampler with the seed of this epoch."""
        for each in nested(self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        seed_all(mix(self._seed, SeedPurpose.SAMPLER, epoch))
        return iter(self.sampler)

    def _states_before(self, epoch: int) -> list[torch.Tensor]:
        if not self._generators:
            return []
        if self.size is None or self.size > REPLAYED:
            return [_seeded(generator, epoch) for generator in self._generators]
        latest = max(known for known in self._beginnings if known <= epoch)
        for past in range(latest, epoch):
            SamplerPass(self, past, self._beginnings[past]).exhaust()
        return self._beginnings[epoch]


class SamplerPass:
    """One pass over a sampler. Its random state is active only while it is read."""

    def __init__(self, sampling: EpochSampler, epoch: int, states: list[torch.Tensor]) -> None:
        self._sampling, self._epoch, self._states = sampling, epoch, states
        self._globals: GlobalRngState | None = None  # None before the pass has begun
        self._iterator: Iterator[Any] = iter(())
        self.has_ended = False

    def read(self, count: int) -> list[Any]:
        """Return the next indices, or the next batches of indices: ``count`` of them, fewer at the end."""
        with self._in_force():
            found = list(islice(self._iterator, count))
        if len(found) < count:
            self.has_ended = True
            self._sampling.ended(self._epoch, self._states)
        checked = [self._checked(one) for one in found]
        if self._sampling.mark is None:
            self._sampling.mark = zlib.crc32(repr(checked[:CHUNK]).encode())
        return checked

    def exhaust(self) -> None:
        """Read to the end, to get the states of the generators after it."""
        with self._in_force():
            for _ in self._iterator:
                pass
        self._sampling.ended(self._epoch, self._states)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        with preserve_global_rng():
            before = self._sampling.swapped(self._states)
            try:
                if self._globals is None:
                    self._iterator = self._sampling.begin(self._epoch)
                else:
                    restore_global_state(self._globals)
                yield
            finally:
                self._globals = global_state()
                self._states = self._sampling.swapped(before)

    def _checked(self, drawn: Any) -> Any:
        if self._sampling.in_batches:
            if not isinstance(drawn, Iterable):
                raise DataError(
                    f"batch_sampler={self._sampling.name} yields {type(drawn).__name__}; it must yield lists of "
                    "indices: pass it as sampler="
                )
            return [self._index(one) for one in drawn]
        return self._index(drawn)

    def _index(self, drawn: Any) -> int:
        try:
            return operator.index(drawn)
        except (TypeError, RuntimeError):
            kind, option = type(drawn).__name__, "batch_sampler" if self._sampling.in_batches else "sampler"
            hint = "; pass it as batch_sampler=" if isinstance(drawn, list | tuple) and option == "sampler" else ""
            raise DataError(
                f"{option}={self._sampling.name} yields {kind} as an index; indices must be whole numbers{hint}"
            ) from None


class SampledOrder(EpochOrder):
    """An order that is read from a sampler on demand: an epoch may have 10 ** 10 samples, or no end."""

    def __init__(self, drawing: SamplerPass, global_batch: int) -> None:
        super().__init__(np.empty(0, dtype=np.int64))
        self._drawing, self._kept = drawing, 2 * global_batch
        self._base = 0  # position in the epoch of the first index that is held

    def end(self, start: int, batch: int) -> int:
        self._reach(start + batch)
        return min(start + batch, self._reached)

    def take(self, start: int, stop: int) -> Indices:
        self._reach(stop)
        return super().take(start - self._base, stop - self._base)

    @property
    def _reached(self) -> int:
        return self._base + len(self._indices)

    def _reach(self, stop: int) -> None:
        while self._reached < stop and not self._drawing.has_ended:
            self._hold(self._read(stop), stop)

    def _read(self, stop: int) -> list[int]:
        return self._drawing.read(max(CHUNK, min(stop - self._reached, 2**20)))

    def _hold(self, more: list[int], stop: int) -> None:
        """Append indices, and drop those that are too old for a stand-in batch."""
        held = np.concatenate([self._indices, np.array(more, dtype=np.int64)])
        dropped = max(0, min(stop, self._reached + len(more)) - self._kept - self._base)
        self._indices, self._base = held[dropped:], self._base + dropped


class BatchedOrder(SampledOrder):
    """An order that a batch sampler has divided into global batches."""

    def __init__(self, drawing: SamplerPass, global_batch: int) -> None:
        super().__init__(drawing, global_batch)
        self._at_once = max(1, CHUNK // max(1, global_batch))
        self._ends: list[int] = []

    def end(self, start: int, batch: int) -> int:
        self._reach(start)
        while not (self._ends and self._ends[-1] > start) and not self._drawing.has_ended:
            self._hold(self._read(start), start)
        at = bisect_right(self._ends, start)
        return self._ends[at] if at < len(self._ends) else start

    def _read(self, stop: int) -> list[int]:
        batches = self._drawing.read(self._at_once)
        end = self._reached
        self._ends = [kept for kept in self._ends if kept > stop]
        for batch in batches:
            end += len(batch)
            self._ends.append(end)
        return [index for batch in batches for index in batch]


class SeedDrawingSampler:
    """Draws from the generator once before each epoch, as a DataLoader does to seed its workers."""

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self.sampler, self.generator = sampler, generator

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def nested(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers inside it: a batch sampler has a sampler."""
    result: list[Any] = []
    while sampler is not None and not any(sampler is one for one in result):
        result.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return result


def generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the torch generators that a sampler, or one inside it, draws from."""
    result: list[torch.Generator] = []
    for each in nested(sampler):
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is one for one in result):
            result.append(generator)
    return result


def known_length(data: Any) -> int | None:
    """Return the length of a sampler or data set; None if it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def batches_of(batch_sampler: Any) -> int:
    """Return a batch sampler's ``batch_size``, or else the size of its first batch."""
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    result = EpochSampler(batch_sampler, 0, in_batches=True).first_batch()
    if not result:
        raise DataError(f"{type(batch_sampler).__name__} yields no batches; check its arguments")
    return result


def _seeded(generator: torch.Generator, epoch: int) -> torch.Tensor:
    fresh = torch.Generator(generator.device)
    return fresh.manual_seed(mix(generator.initial_seed(), SeedPurpose.SAMPLER, epoch) >> 1).get_state()
