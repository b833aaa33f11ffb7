"""``CtrFiles``: click logs in files, as a data set for a loader."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from echelon.base.errors import DataError, UsageError
from echelon.data.blocks import BlockReader, ColumnBlock
from echelon.data.ctr.columns import CtrLayout, Transform, criteo_columns, pairs, texts

Format = Literal["criteo", "csv", "parquet"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class CtrFiles:
    """Rows of click logs. A loader yields them as ``ids, dense, label``.

    paths:       list of paths, or a pattern; text may be gzip
    format:      "criteo", "csv" or "parquet"
    label:       column of the label; None for files without one
    positive:    texts of the label that mean 1; default: the label is a number
    numeric:     columns of ``dense``
    categorical: columns of ``ids``; as a mapping, columns with the same value share their ids
    names:       columns of CSV files without a header
    delimiter:   delimiter of CSV files
    transform:   transformation of numbers: "log1p" (default), "none", or a function of an array
    fill:        value of a missing number
    missing:     texts that mean a missing value
    broken:      "skip" skips rows that cannot be read, and counts them in ``skipped``; "error" (default) raises
    seed:        seed of the hash of ids
    block_bytes: bytes that are read at once

    ``ids`` is int64 [rows, slots], each value hashed together with its column's name; ``dense`` is float32 [rows, k];
    ``label`` is float32 [rows], and absent with ``label=None``.

    >>> rows = echelon.data.CtrFiles("clicks.csv", format="csv", numeric=["age"], categorical=["user", "item"])
    """

    def __init__(
        self,
        paths: Paths,
        *,
        format: Format,
        label: str | None = "label",
        positive: str | Sequence[str] | None = None,
        numeric: Sequence[str] = (),
        categorical: Sequence[str] | Mapping[str, str] = (),
        names: Sequence[str] | None = None,
        delimiter: str = ",",
        transform: Transform = "log1p",
        fill: float = 0.0,
        missing: Sequence[str] = ("",),
        broken: Literal["error", "skip"] = "error",
        seed: int = 0,
        block_bytes: int = 4 * 2**20,
    ) -> None:
        _check(format, broken, delimiter, block_bytes)
        if format == "criteo":
            _refuse_columns(numeric, categorical, names, label)
            names, delimiter = criteo_columns(label is not None), "\t"
            numeric, categorical = [n for n in names if n[0] == "i"], [n for n in names if n[0] == "c"]
        self.paths = _found(paths)
        self._layout = CtrLayout(
            label, texts(positive), tuple(numeric), pairs(categorical), transform, fill, tuple(missing), seed
        )
        self._layout.check()
        self._format = format
        self._names = names
        self._delimiter = delimiter
        self._block_bytes = block_bytes
        from echelon.data.ctr.parse import SkippedRows

        self._skipped, self._broken = SkippedRows(), broken
        self._index()

    def __len__(self) -> int:
        """Return the number of rows, including broken ones."""
        return sum(self.block_rows)

    def __repr__(self) -> str:
        return f"CtrFiles({len(self.paths)} {self._format} files, {len(self)} rows)"

    @property
    def slots(self) -> list[str]:
        """The columns of ``ids``."""
        return [column for column, _ in self._layout.categorical]

    @property
    def skipped(self) -> int:
        """The number of broken rows skipped by all readers so far; a row counts each time it is read."""
        return self._skipped.rows

    @property
    def first_skipped(self) -> str:
        """The first broken row, and what is wrong with it."""
        return self._skipped.first

    def reader(self) -> BlockReader:
        return CtrReader(self)

    def _index(self) -> None:
        """Find the blocks of all files, several files in parallel."""
        with ThreadPoolExecutor(min(8, len(self.paths)), "echelon-index") as threads:
            files = list(threads.map(self._index_file, self.paths))
        self._blocks: list[Any] = [block for blocks in files for block in blocks]
        self.block_rows: Sequence[int] = [block.rows for block in self._blocks]
        self.runs: Sequence[range] = self._runs(files)

    def _index_file(self, path: str) -> list[Any]:
        if self._format == "parquet":
            from echelon.data.ctr.parquet import index_parquet

            return list(index_parquet(path, self._layout))
        from echelon.data.ctr.text import index_text

        return list(index_text(path, header=self._names is None, block_bytes=self._block_bytes))

    def _runs(self, files: list[list[Any]]) -> list[range]:
        from echelon.data.ctr.text import is_gzip

        runs, behind = [], 0
        for path, blocks in zip(self.paths, files, strict=True):
            numbers = range(behind, behind + len(blocks))
            behind += len(blocks)
            in_order = self._format != "parquet" and is_gzip(path)
            runs.extend([numbers] if in_order else [range(n, n + 1) for n in numbers])
        return [run for run in runs if run]


class CtrReader:
    """Reads the blocks in one pass over the files."""

    def __init__(self, files: CtrFiles) -> None:
        skipped = files._skipped if files._broken == "skip" else None
        if files._format == "parquet":
            from echelon.data.ctr.parquet import ParquetColumns

            self._fetch: Any = files._blocks.__getitem__
            self._columns: Any = ParquetColumns(files._layout, skipped)
            return
        from echelon.data.ctr.parse import TextBlockParser
        from echelon.data.ctr.text import TextBlockReader, read_header

        header = partial(read_header, delimiter=files._delimiter, layout=files._layout)
        names = {path: list(files._names) if files._names else header(path) for path in files.paths}
        self._fetch = TextBlockReader(files._blocks)
        self._columns = TextBlockParser(
            files._layout, names, files._delimiter, quotes=files._format == "csv", skipped=skipped
        )

    def fetch(self, number: int) -> Any:
        return self._fetch(number)

    def columns(self, fetched: Any) -> ColumnBlock:
        return self._columns(fetched)  # type: ignore[no-any-return]


def _check(format: str, broken: str, delimiter: str, block_bytes: int) -> None:
    if format not in ("criteo", "csv", "parquet"):
        raise UsageError(f"format={format!r}: expected 'criteo', 'csv' or 'parquet'")
    if broken not in ("error", "skip"):
        raise UsageError(f"broken={broken!r}: expected 'error' or 'skip'")
    if len(delimiter) != 1:
        raise UsageError(f"delimiter={delimiter!r}: expected one character")
    if not 1 <= block_bytes <= 2**30:
        raise UsageError(f"block_bytes={block_bytes}: expected 1 to {2**30}")


def _refuse_columns(numeric: Any, categorical: Any, names: Any, label: str | None) -> None:
    for name, given in (("numeric", numeric), ("categorical", categorical), ("names", names)):
        if given:
            raise UsageError(f"{name}= is for CSV and Parquet; the columns of format='criteo' are fixed, leave it out")
    if label not in ("label", None):
        raise UsageError(f"label={label!r}: with format='criteo' it is the first column, or None where there is none")


def _found(paths: Paths) -> list[str]:
    if not isinstance(paths, str | os.PathLike):
        result = [os.fspath(path) for path in paths]
        if not result:
            raise DataError("CtrFiles was given an empty list of files; name at least one")
    else:
        result = sorted(glob.glob(os.fspath(paths), recursive=True))
        if not result:
            raise DataError(f"no file matches '{os.fspath(paths)}' from {os.getcwd()}; check the pattern")
    for path in result:
        if not os.path.isfile(path):
            raise DataError(f"{path} is no file; check the path")
    return result
