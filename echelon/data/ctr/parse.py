"""Parses lines to Arrow columns, and finds the lines that cannot be parsed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import csv

from echelon.base.errors import DataError
from echelon.data.blocks import ColumnBlock
from echelon.data.ctr.columns import CtrLayout
from echelon.data.ctr.tensors import TensorBlockBuilder
from echelon.data.ctr.text import FetchedText


class MalformedRowsError(Exception):
    """A text that does not match the layout, with the reason."""


class SkippedRows:
    """Counts rows that were skipped because they could not be read; all reading threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows = 0
        self.first = ""

    def add(self, rows: int, why: str) -> None:
        with self._lock:
            self.rows += rows
            self.first = self.first or why


class TextBlockParser:
    """Converts blocks of lines to blocks of tensors."""

    def __init__(
        self,
        layout: CtrLayout,
        names: dict[str, list[str]],
        delimiter: str,
        *,
        quotes: bool,
        skipped: SkippedRows | None,
    ) -> None:
        self._layout = layout
        self._names = names
        self._tensors = TensorBlockBuilder(layout)
        self._skipped = skipped
        self._parsing = csv.ParseOptions(delimiter=delimiter, quote_char='"' if quotes else False)
        kinds = {name: pa.float32() for name in layout.columns} | {name: pa.binary() for name in layout.texts}
        self._converting = csv.ConvertOptions(
            column_types=kinds,
            include_columns=layout.columns,
            null_values=list(layout.missing),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )

    def __call__(self, fetched: FetchedText) -> ColumnBlock:
        block, text = fetched
        try:
            return self._tensors(self._table(text, block.rows, self._names[block.path]))
        except MalformedRowsError:
            return self._mended(fetched)

    def _table(self, text: bytes, rows: int, names: list[str]) -> pa.Table:
        reading = csv.ReadOptions(use_threads=False, column_names=names, block_size=len(text) + 1)
        try:
            table = csv.read_csv(pa.BufferReader(text), reading, self._parsing, self._converting)
        except pa.ArrowInvalid as error:
            raise MalformedRowsError(_reason(error)) from None
        if table.num_rows != rows:
            raise MalformedRowsError("the line is empty" if table.num_rows < rows else "the line holds several rows")
        if self._layout.label is not None and table.column(self._layout.label).null_count:
            raise MalformedRowsError(f"no value in the label column '{self._layout.label}'")
        return table

    def _mended(self, fetched: FetchedText) -> ColumnBlock:
        """Return the block without its broken lines; raise ``DataError`` if they are not to be skipped."""
        block, text = fetched
        lines = text.removesuffix(b"\n").split(b"\n")
        whole = np.ones(len(lines), np.bool_)
        for at, why in self._faults(lines, 0, self._names[block.path]):
            line = f"{block.path}, row {block.line + at}: {why}"
            if self._skipped is None:
                raise DataError(f"{line}; repair the line, or pass broken='skip' to leave such lines out")
            self._skipped.add(1, line)
            whole[at] = False
        good = [line for line, is_whole in zip(lines, whole, strict=True) if is_whole]
        return _spread(self._of_lines(good, block.path), whole)

    def _of_lines(self, lines: list[bytes], path: str) -> ColumnBlock:
        names = self._names[path]
        table = self._table(b"\n".join(lines), len(lines), names) if lines else self._empty()
        return self._tensors(table)

    def _empty(self) -> pa.Table:
        kinds = self._converting.column_types
        return pa.table({name: pa.array([], kinds[name]) for name in self._layout.columns})

    def _faults(self, lines: list[bytes], first: int, names: list[str]) -> Iterator[tuple[int, str]]:
        """Yield the broken lines in order, found by bisection, so that Arrow alone decides which lines are broken."""
        if not lines:
            return
        try:
            self._table(b"\n".join(lines) + b"\n", len(lines), names)
        except MalformedRowsError as why:
            if len(lines) == 1:
                yield first, str(why)
                return
            half = len(lines) // 2
            yield from self._faults(lines[:half], first, names)
            yield from self._faults(lines[half:], first + half, names)


def _spread(good: ColumnBlock, whole: NDArray[np.bool_]) -> ColumnBlock:
    """Return columns with a row for every line, so that a row's position does not depend on skipped rows."""
    at = torch.from_numpy(np.flatnonzero(whole))
    columns = [column.new_zeros((len(whole), *column.shape[1:])).index_copy_(0, at, column) for column in good.columns]
    return ColumnBlock(columns, whole)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r"Row #\d+: ", "", re.sub(r"^CSV parse error: (Row #\d+: )?", "", text))
    return text if len(text) <= 160 else text[:157] + "..."
