"""``Mixture``: corpora mixed by weight."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from echelon.base.errors import DataError, UsageError, nearest
from echelon.data.batched import is_batched
from echelon.data.data_source import is_stream, kind_name
from echelon.data.joined_datasets import JoinedBatches, JoinedDatasets
from echelon.data.map_source import ColumnDataset, columns_of
from echelon.data.mixed_order import MixedEpoch, MixingOrder, whole_weights
from echelon.data.order import ComputedOrder, EpochOrder, epoch_order
from echelon.data.seeding import SeedPurpose, mix

#: Samples of a corpus from which its order is computed on demand: a mixture may have hundreds of corpora.
COMPUTED_FROM = 2**20
Exhausted = Literal["stop", "repeat"]


class Mixture(Dataset[Any]):
    """Samples of several corpora, mixed by weight, in one order for any number of ranks.

    After any number of samples each corpus has given its weight of them. Each goes on where the epoch before has left
    it, so that none of its samples comes a second time before all of them have come once.

    parts:     corpora by name, or a list of them: token files, or any data sets with an index
    weights:   a number for each, by name or in the same order; they need not sum to one. Default: the corpora's sizes
    samples:   samples of an epoch. Default: those until the first corpus is used up, or with ``exhausted="repeat"``
               until all of them have been
    exhausted: "stop" (default): no corpus is repeated within an epoch; "repeat": one that is used up begins again

    >>> mixture = echelon.data.Mixture({"web": (x, y), "code": (x, y)}, weights=[7, 3])
    >>> loader = engine.loader(mixture, global_batch=32)
    """

    def __init__(
        self,
        parts: Mapping[str, Any] | Sequence[Any],
        weights: Mapping[str, float] | Sequence[float] | None = None,
        *,
        samples: int | None = None,
        exhausted: Exhausted = "stop",
    ) -> None:
        if exhausted not in ("stop", "repeat"):
            raise UsageError(f"exhausted={exhausted!r}: expected 'stop' or 'repeat'")
        named = dict(parts) if isinstance(parts, Mapping) else _named(parts)
        corpora = [_indexed(name, part) for name, part in named.items()]
        self.names, self.sizes = list(named), [len(corpus) for corpus in corpora]
        self._check_sizes()
        self.weights = _weights(self.names, weights, self.sizes)
        self.joined = joined(corpora)
        self._mixing = MixingOrder(whole_weights(self.weights))
        self._exhausted, self._requested = exhausted, samples
        self._size = self._samples(samples)
        self._plain: MixedEpoch | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        """Return a sample of the first epoch, without shuffling."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        self._plain = self._plain or self.epoch_order(seed=0, epoch=0, shuffle=False)
        at = index % len(self)
        return self.joined[int(self._plain.take(at, at + 1)[0])]

    def resized(self, samples: int) -> Mixture:
        """Return the same mixture with another number of samples in an epoch."""
        corpora, weights = dict(zip(self.names, self.joined.parts, strict=True)), self.weights
        return Mixture(corpora, weights, samples=samples, exhausted=self._exhausted)

    @property
    def paths(self) -> list[str]:
        """The files of all corpora, by which a resumed run recognizes the data; none if one does not say its own."""
        found = [getattr(part, "paths", None) or [] for part in self.joined.parts]
        return [*chain.from_iterable(found)] if all(found) else []

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids that may occur; None if a corpus does not say."""
        found = [getattr(part, "vocabulary", None) for part in self.joined.parts]
        known = [number for number in found if number is not None]
        return max(known) if len(known) == len(found) else None

    @property
    def has_positions(self) -> bool:
        """True if ``position_ids`` of a corpus say where documents begin."""
        return any(getattr(part, "has_positions", False) for part in self.joined.parts)

    def facts(self) -> dict[str, list[Any]]:
        """Return the facts on which the order depends, and which a resumed run must share in the middle of an epoch."""
        return {"corpora": self.names, "weights": self.weights, "sizes": self.sizes}

    def epoch_order(self, *, seed: int, epoch: int, shuffle: bool) -> MixedEpoch:
        """Return the order of an epoch: indices into ``joined``."""

        def pass_order(corpus: int, number: int) -> EpochOrder:
            size, key = self.sizes[corpus], mix(seed, SeedPurpose.MIXTURE, corpus)
            if shuffle and size >= COMPUTED_FROM:
                return ComputedOrder(size, key, SeedPurpose.ORDER, number)
            return epoch_order(size, seed=key, epoch=number, shuffle=shuffle)

        order = seed if shuffle else None
        return MixedEpoch(self._mixing, self._size, self.sizes, epoch=epoch, seed=order, pass_order=pass_order)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {weight:.1%}" for name, weight in zip(self.names, self.weights, strict=True))
        return f"{parts}; an epoch has {self._size:,} samples{self._ending()}"

    def _ending(self) -> str:
        counts = self._mixing.counts(self._size)
        passes = [count / size for count, size in zip(counts, self.sizes, strict=True)]
        most = int(np.argmax(passes))
        if self._exhausted == "repeat":
            return f" and reads {self.names[most]} {passes[most]:.1f} times" if passes[most] > 1 else ""
        return f" and ends where {self.names[most]} is used up" if self._requested is None else ""

    def _samples(self, requested: int | None) -> int:
        """Return the samples of an epoch."""
        if requested is not None and requested < 1:
            raise UsageError(f"samples={requested}: an epoch needs at least one sample")
        each = range(len(self.sizes))
        if self._exhausted == "repeat":
            return requested or max(self._mixing.place_of(corpus, self.sizes[corpus] - 1) for corpus in each) + 1
        ends = [self._mixing.place_of(corpus, self.sizes[corpus]) for corpus in each]
        first = int(np.argmin(ends))
        if requested is not None and requested > ends[first]:
            raise DataError(
                f"samples={requested:,}: {self.names[first]} is used up after {ends[first]:,} samples of the mixture; "
                "give fewer samples or a smaller weight, or exhausted='repeat' to repeat it"
            )
        return requested or ends[first]

    def _check_sizes(self) -> None:
        if not self.names:
            raise UsageError("a mixture of no corpora; give one or more")
        empty = [name for name, size in zip(self.names, self.sizes, strict=True) if not size]
        if empty:
            raise DataError(f"mixture: {empty[0]} is empty; leave it out")


def joined(parts: Sequence[Any]) -> JoinedDatasets:
    """Return data sets one after another, which make whole batches if all of them do."""
    return (JoinedBatches if all(map(is_batched, parts)) else JoinedDatasets)(parts)


def _named(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the corpora by the names of their directories, or else by their numbers."""
    names = [os.path.basename(os.fspath(part.path)) if hasattr(part, "path") else "" for part in parts]
    if not all(names) or len(set(names)) < len(names):
        names = [str(number) for number in range(len(parts))]
    return dict(zip(names, parts, strict=True))


def _indexed(name: str, part: Any) -> Any:
    """Return a corpus as a data set with an index; raise for one without."""
    if columns := columns_of(part):
        return ColumnDataset(columns)
    if isinstance(part, Mapping | str | os.PathLike) or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        remedy = (
            "a stream of the library datasets is mixed by its interleave_datasets(streams, probabilities=...)"
            if is_stream(part)
            else "give a data set with __len__ and __getitem__, such as TokenFiles(path, length)"
        )
        raise DataError(f"mixture: {name} is a {kind_name(part)}, which has no index; {remedy}")
    return part


def _weights(names: list[str], given: Mapping[str, float] | Sequence[float] | None, sizes: list[int]) -> list[float]:
    """Return the weights in the order of the names, with the sum 1."""
    if isinstance(given, Mapping):
        for name in given.keys() - set(names):
            raise UsageError(f"weights= has '{name}', which is no corpus of this mixture{nearest(name, names)}")
        for name in [name for name in names if name not in given]:
            raise UsageError(f"weights= has none for '{name}'; give each corpus one")
        given = [given[name] for name in names]
    weights = [float(weight) for weight in (sizes if given is None else given)]
    if len(weights) != len(names):
        raise UsageError(f"weights= has {len(weights)} numbers for {len(names)} corpora; give each corpus one")
    for name, weight in zip(names, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise UsageError(f"the weight of {name} is {weight:g}; give a number above 0, or leave the corpus out")
    return [weight / sum(weights) for weight in weights]
