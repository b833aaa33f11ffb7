"""``TokenStore``: tokens of several shards as one sequence, read from mapped files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.data.order import Indices


class TokenShard(NamedTuple):
    """A file of tokens, and a function that returns the first token of each of its documents, counted in the file."""

    path: Path
    tokens: int
    dtype: np.dtype[Any]
    documents: Callable[[], Indices]


class TokenStore:
    """The tokens of all shards, one after another. Files are mapped when they are first read, in every process anew."""

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        self._shards = [shard for shard in shards if shard.tokens]
        for shard in self._shards:
            require_size(shard.path, shard.tokens * shard.dtype.itemsize)
        self._begins = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._maps: list[NDArray[Any] | None] = [None] * len(self._shards)
        self._starts: Indices | None = None

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the maps: pickled, they would carry the tokens."""
        return {**self.__dict__, "_maps": [None] * len(self._shards)}

    def read(self, begin: int, count: int) -> NDArray[np.int64]:
        """Return ``count`` tokens from ``begin`` on."""
        result = np.empty(count, np.int64)
        shard, done = int(np.searchsorted(self._begins, begin, side="right")) - 1, 0
        while done < count:
            at = begin + done - self._begins[shard]
            piece = self._tokens(shard)[at : at + count - done]
            result[done : done + len(piece)] = piece
            done, shard = done + len(piece), shard + 1
        return result

    def __getitem__(self, at: Indices) -> NDArray[np.int64]:
        """Return the tokens at these places."""
        result = np.empty(len(at), np.int64)
        shards = np.searchsorted(self._begins, at, side="right") - 1
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            result[inside] = self._tokens(shard)[at[inside] - self._begins[shard]]
        return result

    @property
    def documents(self) -> Indices:
        """The first token of each document, and the number of all tokens; the array is made on first use."""
        if self._starts is None:
            starts = [shard.documents() + begin for shard, begin in zip(self._shards, self._begins[:-1], strict=True)]
            self._starts = np.concatenate([*starts, self._begins[-1:]]).astype(np.int64, copy=False)
        return self._starts

    def _tokens(self, shard: int) -> NDArray[Any]:
        found = self._maps[shard]
        if found is None:
            path, _, dtype, _ = self._shards[shard]
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found = self._maps[shard] = np.frombuffer(mapped, dtype)
        return found


def require_size(path: Path, size: int) -> None:
    """Raise DataError unless the file holds ``size`` bytes."""
    try:
        found = path.stat().st_size
    except OSError:
        raise DataError(f"{path} is missing; copy the whole directory again") from None
    if found != size:
        raise DataError(f"{path} has {found:,} bytes, and its head says {size:,}; copy it again, or tokenize anew")
