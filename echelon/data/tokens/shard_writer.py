"""``write_shard``: tokenizes one part of a corpus into one shard, which is complete or absent."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.tokens.corpus import TextPiece
from echelon.data.tokens.token_head import ShardHead

#: Characters that are tokenized by one call.
_CALL = 2**20
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class ShardFiles:
    """The files of one shard while they are written."""

    def __init__(self, directory: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._directory, self._name, self._dtype = directory, name, dtype
        self._file = (directory / f"{name}.tokens").open("wb")
        self._starts: list[int] = []
        self._crc = self.tokens = 0

    def begin_document(self) -> None:
        self._starts.append(self.tokens)

    def add(self, tokens: NDArray[Any]) -> None:
        data = tokens.astype(self._dtype).tobytes()
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.tokens += len(tokens)

    def close(self) -> ShardHead:
        """Write the rest, and last of all the shard's head: a shard with a head is complete."""
        offsets = np.array(self._starts, "<i8").tobytes()
        _flush(self._file)
        with open(self._directory / f"{self._name}.documents", "wb") as file:
            file.write(offsets)
            _flush(file)
        head = ShardHead(self._name, self.tokens, len(self._starts), zlib.crc32(offsets, self._crc))
        write_whole(shard_head(self._directory, self._name), json.dumps(asdict(head)))
        return head


def write_shard(
    directory: Path, name: str, pieces: Iterable[TextPiece], encode: Encode, end: int | None, dtype: np.dtype[Any]
) -> ShardHead:
    """Tokenize texts into the files of a shard.

    encode: function that returns the token ids of texts
    end:    id of the token that ends each document
    """
    files = ShardFiles(directory, name, dtype)
    is_begun = False
    for batch in _batches(pieces):
        for piece, ids in zip(batch, encode([piece.text for piece in batch]), strict=True):
            if not is_begun:
                files.begin_document()
            is_begun = not piece.is_last
            closing = [end] if piece.is_last and end is not None else []
            files.add(np.array([*ids, *closing], np.int64))
    return files.close()


def shard_head(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or absent, also after a power failure."""
    draft = path.with_name(f".{path.name}.writing")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        _flush(file)
    draft.replace(path)


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch, size = list[TextPiece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _CALL:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
