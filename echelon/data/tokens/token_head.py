"""``TokenHead``: the description of a directory of token files, which is stored there as ``tokens.json``.

A directory holds, for each shard, ``NAME.tokens`` (little-endian uint16, or uint32 if the vocabulary is larger than
65,536) and ``NAME.documents`` (little-endian int64: the first token of each document, counted in the shard).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.base.errors import DataError

HEAD = "tokens.json"
FORMAT, VERSION = "echelon tokens", 1


@dataclass(frozen=True)
class ShardHead:
    """One shard: its name, its counts, and the CRC-32 of its tokens followed by its document offsets."""

    name: str
    tokens: int
    documents: int
    crc32: int


@dataclass(frozen=True)
class TokenHead:
    """The head of a directory of token files.

    vocabulary: largest token id that the tokenizer knows, plus 1; None if it is not known
    end:        id of the token that ends each document; None if documents end without one
    tokenizer:  SHA-256 of the tokenizer's file
    """

    vocabulary: int | None
    end: int | None
    tokenizer: str
    shards: tuple[ShardHead, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocabulary or 2**32)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def to_json(self) -> str:
        facts = {"dtype": self.dtype.name, "tokens": self.tokens, "documents": self.documents}
        return json.dumps({"format": FORMAT, "version": VERSION, **facts, **asdict(self)}, indent=1) + "\n"


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest type of stored tokens that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def read_head(directory: Path) -> TokenHead:
    """Return the head of a directory; raise DataError if there is none, or if it cannot be read."""
    path = directory / HEAD
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{directory} holds no token files: there is no {HEAD}; write them with "
            f"'echelon tokenize CORPUS --tokenizer FILE --out {directory}'"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; copy it again") from None
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise DataError(f"{path} is no head of token files; give a directory written by 'echelon tokenize'")
    if given.get("version") != VERSION:
        raise DataError(
            f"{path} has version {given.get('version')}, and this Echelon reads {VERSION}; tokenize the corpus again"
        )
    try:
        shards = tuple(ShardHead(**shard) for shard in given["shards"])
        return TokenHead(given["vocabulary"], given["end"], given["tokenizer"], shards)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again") from None
