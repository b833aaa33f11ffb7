"""Checksums of batches and samples, by which ranks compare their data."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_leaves

#: Numbers of rows, of values per row, and of leaves per sample that a checksum covers.
ROWS, NUMBERS, ENTRIES = 64, 1024, 256


def columns_checksum(columns: Sequence[Tensor | np.ndarray[Any, Any]]) -> int | None:
    """Return a checksum of some rows of tensors and arrays; None if an array holds objects."""
    result = 0
    for column in columns:
        if isinstance(column, np.ndarray) and column.dtype.hasobject:
            return None
        rows = np.unique(np.linspace(0, max(len(column) - 1, 0), min(ROWS, len(column))).astype(np.int64))
        looks = f"{tuple(column.shape[1:])} {column.dtype}".encode()
        result = zlib.crc32(_bytes(column[rows]), zlib.crc32(looks, result))
    return result


def batch_checksum(batch: Any) -> int | None:
    """Return a checksum of a batch's tensors; None if it has none, or if they cannot be read."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel()]
    try:
        return columns_checksum([leaf if leaf.dim() else leaf.view(1) for leaf in tensors]) if tensors else None
    except Exception:
        return None


def samples_checksum(samples: Sequence[Any]) -> int | None:
    """Return a checksum of the tensors, arrays, numbers and text in samples; None if these cannot be read."""
    result = 0
    try:
        for leaf in (leaf for sample in samples[:ROWS] for leaf in islice(tree_iter(sample), ENTRIES)):
            if isinstance(leaf, Tensor | np.ndarray):
                result = zlib.crc32(str(columns_checksum([leaf.reshape(-1)[:NUMBERS]])).encode(), result)
            elif isinstance(leaf, int | float | str | bytes | None):
                result = zlib.crc32(repr(leaf[:NUMBERS] if isinstance(leaf, str | bytes) else leaf).encode(), result)
    except Exception:
        return None
    return result


def _bytes(rows: Any) -> bytes:
    few = rows.reshape(len(rows), math.prod(rows.shape[1:]))[:, :NUMBERS]
    if isinstance(few, Tensor):
        return few.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if few.numel() else b""
    return np.ascontiguousarray(few).tobytes()
