"""Caches samples in memory after the first read.

A cached sample is fixed, including random augmentation; so its randomness depends on the sample alone and not on the
epoch in which it was read first.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from echelon.data.seeding import SeedPurpose, chain, mix, seed_all


class CachedItems:
    """A map-style data set that reads every sample once."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, mix(seed, SeedPurpose.KEPT)
        self._kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._kept:
            seed_all(chain(self._seed, index))
            self._kept[index] = self._dataset[index]
        return self._kept[index]


class CachedStream:
    """A stream that is read to its end once, and served from memory afterwards."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self._begin = begin
        self._kept: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from self._kept
            return
        read: list[Any] = []
        for sample in self._begin():
            read.append(sample)
            yield sample
        self._kept = read


class CachedFiles:
    """A ``read`` function for ``FileList`` that reads every file once."""

    def __init__(self, read: Callable[[str], Iterable[Any]], seed: int) -> None:
        self._read, self._seed = read, mix(seed, SeedPurpose.KEPT)
        self._kept: dict[str, list[Any]] = {}

    def __call__(self, path: str) -> list[Any]:
        if path not in self._kept:
            self._kept[path] = list(self._seeded(path))
        return self._kept[path]

    def _seeded(self, path: str) -> Iterator[Any]:
        file_seed = chain(self._seed, zlib.crc32(path.encode()))
        seed_all(file_seed)
        for position, sample in enumerate(self._read(path)):
            yield sample
            seed_all(chain(file_seed, position))
