"""Converts Arrow columns to tensors: ids int64 [rows, slots], numbers float32 [rows, k], label float32 [rows]."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.data.blocks import ColumnBlock
from echelon.data.ctr.columns import CtrLayout
from echelon.data.ctr.hashing import hash_texts, salt_of, text_id


class TensorBlockBuilder:
    """Builds the tensor blocks of one layout."""

    def __init__(self, layout: CtrLayout) -> None:
        self._layout = layout
        self._salts = [salt_of(name, layout.seed) for _, name in layout.categorical]
        self._positive = np.array([text_id(text, 0) for text in layout.positive], np.int64)

    def __call__(self, table: pa.Table, whole: NDArray[np.bool_] | None = None) -> ColumnBlock:
        layout, rows = self._layout, table.num_rows
        ids = np.empty((rows, len(layout.categorical)), np.int64)
        for slot, (column, _) in enumerate(layout.categorical):
            hash_column(table.column(column), self._salts[slot], ids[:, slot])
        numbers = np.empty((rows, len(layout.numeric)), np.float32)
        for at, column in enumerate(layout.numeric):
            numbers[:, at] = _numbers(table.column(column))
        columns = [torch.from_numpy(ids), torch.from_numpy(layout.scaled(numbers))]
        if layout.label is not None:
            columns.append(torch.from_numpy(self._labels(table.column(layout.label))))
        return ColumnBlock(columns, whole)

    def _labels(self, column: pa.ChunkedArray) -> NDArray[np.float32]:
        if not self._layout.positive:
            return np.array(_numbers(column))  # a copy, because Arrow's memory is read-only
        hashed = np.empty(len(column), np.int64)
        hash_column(column, 0, hashed)
        return np.isin(hashed, self._positive).astype(np.float32)


def hash_column(column: pa.ChunkedArray, salt: int, out: NDArray[np.int64]) -> None:
    start = 0
    for chunk in column.chunks:
        _hash_chunk(chunk, salt, out[start : start + len(chunk)])
        start += len(chunk)


def _hash_chunk(chunk: pa.Array, salt: int, out: NDArray[np.int64]) -> None:
    kind = chunk.type
    if pa.types.is_dictionary(kind):  # hash each distinct value once; the last entry is for missing values
        words = np.empty(len(chunk.dictionary) + 1, np.int64)
        _hash_chunk(chunk.dictionary, salt, words[:-1])
        words[-1] = text_id(None, salt)
        out[:] = words[chunk.indices.cast(pa.int64()).fill_null(len(words) - 1).to_numpy(zero_copy_only=False)]
    elif pa.types.is_string(kind) or pa.types.is_binary(kind) or str(kind) in ("large_string", "large_binary"):
        hash_texts(chunk, salt, out)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        hash_texts(chunk.cast(pa.string()), salt, out)  # so that a number has the same id as in a text file
    else:
        raise DataError(f"a categorical column holds {kind}: it can be text, whole numbers or true/false; convert it")


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float32]:
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"a numeric column or label holds {kind}; name it in categorical=, or give positive= for a label"
        )
    numbers: NDArray[np.float32] = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return numbers  # missing values are NaN
