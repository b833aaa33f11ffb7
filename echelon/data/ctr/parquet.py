"""Reads Parquet files: a block is a row group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from echelon.base.errors import DataError, nearest
from echelon.data.blocks import ColumnBlock
from echelon.data.ctr.columns import CtrLayout
from echelon.data.ctr.parse import SkippedRows
from echelon.data.ctr.tensors import TensorBlockBuilder


class RowGroup(NamedTuple):
    path: str
    group: int
    rows: int
    #: the index of its first row in the file, from 1
    line: int


def index_parquet(path: str, layout: CtrLayout) -> list[RowGroup]:
    """Return the row groups of a file, from its footer."""
    with _open(path, layout) as file:
        names = file.schema_arrow.names
        for name in layout.columns:
            if name not in names:
                raise DataError(f"{path} has no column '{name}'{nearest(name, names)}")
        groups, line = [], 1
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            groups.append(RowGroup(path, group, rows, line))
            line += rows
    return [group for group in groups if group.rows]


def _open(path: str, layout: CtrLayout) -> parquet.ParquetFile:
    try:
        # dictionary columns: repeated values are hashed once per row group
        return parquet.ParquetFile(path, read_dictionary=layout.texts, memory_map=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}; check the file") from None


class ParquetColumns:
    """Converts row groups to blocks of tensors."""

    def __init__(self, layout: CtrLayout, skipped: SkippedRows | None) -> None:
        self._layout, self._tensors, self._skipped = layout, TensorBlockBuilder(layout), skipped

    def __call__(self, group: RowGroup) -> ColumnBlock:
        try:
            with _open(group.path, self._layout) as file:
                table = file.read_row_group(group.group, columns=self._layout.columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{group.path} cannot be read: {' '.join(str(error).split())}; check the file") from None
        try:
            return self._tensors(table, self._whole(table, group))
        except DataError as error:
            raise DataError(f"{group.path}: {error}") from None

    def _whole(self, table: pa.Table, group: RowGroup) -> Any:
        """Return the mask of rows that have a label; None if all have one."""
        label = self._layout.label
        if label is None or not table.column(label).null_count:
            return None
        there = table.column(label).is_valid().to_numpy()
        lost = np.flatnonzero(~there)
        why = f"row {group.line + lost[0]}: no value in the label column '{label}'"
        if self._skipped is None:
            raise DataError(f"{why}; repair it, or pass broken='skip' to leave such rows out")
        self._skipped.add(len(lost), f"{group.path}, {why}")
        return there
