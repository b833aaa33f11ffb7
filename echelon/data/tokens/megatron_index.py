"""Reads the data sets of Megatron-LM: tokens in ``NAME.bin``, described by ``NAME.idx`` (header ``MMIDIDX``)."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import numpy as np

from echelon.base.errors import DataError
from echelon.data.order import Indices
from echelon.data.tokens.token_store import TokenShard

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type of tokens, sequences, entries of the document index
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron_index(path: Path) -> Path | None:
    """Return the index file of a data set that is named by its prefix, its .bin or its .idx; None if there is none."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    index = prefix.with_name(prefix.name + ".idx")
    return index if index.is_file() else None


def megatron_shard(index: Path) -> TokenShard:
    """Return the tokens that a Megatron index describes; raise DataError if the index is damaged."""
    whole = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.zeros(0, np.uint8)
    if len(whole) < _HEAD.size or bytes(whole[:9]) != MAGIC:
        raise DataError(f"{index} is no index of Megatron-LM: it does not begin with MMIDIDX; check the path")
    _, version, kind, sequences, entries = _HEAD.unpack(bytes(whole[: _HEAD.size]))
    if version != 1 or kind not in _TYPES:
        raise DataError(f"{index} has version {version} and token type {kind}; version 1 with whole numbers is read")
    need = _HEAD.size + 12 * sequences + 8 * entries
    if len(whole) < need:
        raise DataError(f"{index} has {len(whole):,} bytes, and its head says {need:,}; copy it again")
    sizes = np.frombuffer(whole, "<i4", sequences, _HEAD.size)

    tokens = int(sizes.sum(dtype=np.int64))
    documents = partial(_document_starts, index, sequences, entries)
    return TokenShard(index.with_suffix(".bin"), tokens, np.dtype(_TYPES[kind]), documents)


def _document_starts(index: Path, sequences: int, entries: int) -> Indices:
    sizes = np.fromfile(index, "<i4", sequences, offset=_HEAD.size)
    first = np.fromfile(index, "<i8", entries, offset=_HEAD.size + 12 * sequences)[:-1]
    begins: Indices = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    result: Indices = begins[first]
    return result
