"""Detects torch DataLoaders that a script left unchanged, so that every rank reads all of their samples."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from echelon.data.batch_fetcher import is_ours
from echelon.data.fingerprint import dataset_fingerprint
from echelon.data.sampling import known_length
from echelon.data.torch_loader import is_sharded_by_rank
from echelon.distributed.activity import activity


class LoaderWatch:
    """Notices which DataLoaders the script iterates over, while it is open. All engines of a process share it."""

    def __init__(self) -> None:
        self._plain: Callable[[DataLoader[Any]], Any] | None = None  # torch's own __iter__, while this is open
        self._iterated: list[tuple[weakref.ref[Any], DataLoader[Any]]] = []  # weak references to iterators

    def open(self) -> None:
        if self._plain is not None:
            return
        self._plain = plain = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            result = plain(loader)
            if not activity.call and not is_ours(loader):
                self._iterated = [one for one in self._iterated if one[0]() is not None]
                self._iterated.append((weakref.ref(result), loader))
            return result

        self._replaced = iterate
        DataLoader.__iter__ = iterate  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        # if other code has replaced __iter__ since, ours stays below that, and records nothing of interest
        if self._plain is not None and DataLoader.__iter__ is self._replaced:
            DataLoader.__iter__ = self._plain  # type: ignore[method-assign]
            self._plain = None
        self._iterated = []

    def undealt(self) -> list[Any] | None:
        """Return a description of the data of the DataLoader being iterated; None if there is none or it is sharded.

        The description has the data set's class, its length, and a checksum if its contents can be read.
        """
        for iterator, loader in reversed(self._iterated):
            found = iterator()
            if found is None or not getattr(found, "_num_yielded", 1):
                continue
            if is_sharded_by_rank(loader):
                return None
            size = known_length(loader.dataset)
            return (
                None
                if size is None
                else [type(loader.dataset).__name__, *dataset_fingerprint(loader.dataset, size)[:2]]
            )
        return None


loader_watch = LoaderWatch()
