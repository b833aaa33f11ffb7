"""Export of a table to Parquet or safetensors, completely or only the changes since a snapshot.

    Parquet      columns ``id`` (int64) and ``weights`` (a list of ``dim`` float32; null in a delta: removed row)
    safetensors  tensors ``ids`` [n], ``weights`` [n, dim], and in a delta ``removed`` [m]

Rows are written bucket by bucket, so memory does not grow with the table. Ids that wait for admission have no row.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import CheckpointError, UsageError, nearest
from echelon.checkpoint.os_errors import cannot_write
from echelon.checkpoint.tensorfile import TensorSlot, header_of
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint, locate
from echelon.parameter_server.persistence.snapshot import SnapshotFile, merge_delta_rows
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import BucketRows, weights_of
from echelon.parameter_server.table.records import META, WAITING

#: A Parquet row group is written at this many rows, or at this many bytes of weights.
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 64 << 20
#: Bytes reserved for the header of a safetensors file, whose content is known only after the rows are written.
_HEADER = 1024


@dataclass(frozen=True)
class TableExport:
    """Rows for a file, one bucket at a time; with ``delta`` the file includes the removed ids."""

    spec: TableSpec
    buckets: Iterable[BucketRows]
    delta: bool = False
    version: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dim(self) -> int:
        return self.spec.dim


def write_table(table: TableExport, out: Path, format: str | None = None) -> int:
    """Write ``table`` to ``out`` atomically, and return the number of rows."""
    format = format or out.suffix.removeprefix(".")
    writers = {"parquet": _write_parquet, "safetensors": _write_safetensors}
    if format not in writers:
        raise UsageError(f"cannot export to '{out}' as '{format}'{nearest(format, writers)}")
    aside = out.with_name(f".{out.name}.writing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        count = writers[format](table, aside)
        aside.replace(out)
        return count
    except OSError as error:
        raise CheckpointError(cannot_write(out, error)) from None
    finally:
        aside.unlink(missing_ok=True)


def export_checkpoint(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], table: str | None = None, format: str | None = None
) -> int:
    """Write a table of a checkpoint to a file, without servers; ``table`` may be omitted if there is only one."""
    with ServerCheckpoint(locate(checkpoint)) as saved:
        name = _chosen(table, saved.tables(), saved.path)
        spec = next(spec for spec in saved.jobs[0].tables if spec.name == name)
        return write_table(TableExport(spec, saved.buckets(name), version=saved.step), Path(out), format)


def merge_delta_chain(files: list[SnapshotFile], table: str) -> Iterator[BucketRows]:
    """Yield a table's buckets after every delta of a chain is applied to them."""
    for bucket in files[-1].places.get(table, {}):
        rows: BucketRows | None = None
        for file in files:
            rows = merge_delta_rows(rows, file.rows(table, bucket))
        if rows is not None:
            yield rows


def _chosen(table: str | None, known: list[str], path: Path) -> str:
    if table is None and len(known) == 1:
        return known[0]
    if table in known:
        assert table is not None
        return table
    if not known:
        raise UsageError(f"{path} has no tables to export")
    if table is None:
        raise UsageError(f"{path} has the tables {', '.join(sorted(known))}; choose one with --table")
    raise UsageError(f"{path} has no table '{table}'{nearest(table, known)}")


def _values(rows: BucketRows, spec: TableSpec) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the ids and weights of the rows that exist."""
    there = (rows.records[:, -META] & np.uint32(WAITING)) == 0
    return rows.ids[there], np.ascontiguousarray(weights_of(rows.records[there], spec))


# ---- Parquet ----


def _write_parquet(table: TableExport, path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = {"table": table.name, "version": str(table.version), "kind": "delta" if table.delta else "whole"}
    schema = pa.schema([("id", pa.int64()), ("weights", pa.list_(pa.float32(), table.dim))], metadata=facts)
    count, group, weight = 0, [], 0
    with _new(path) as file, pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
        for rows in table.buckets:
            group.append(_batch(rows, table, schema))
            weight += group[-1].num_rows
            if weight >= _GROUP_ROWS or weight * table.dim * 4 >= _GROUP_BYTES:
                count += _write_group(writer, group)
                group, weight = [], 0
        return count + _write_group(writer, group)


def _batch(rows: BucketRows, table: TableExport, schema: Any) -> Any:
    import pyarrow as pa

    ids, weights = _values(rows, table.spec)
    removed = rows.removed if table.delta else rows.removed[:0]
    mask = np.arange(len(ids) + len(removed)) >= len(ids)
    flat = np.concatenate([weights.reshape(-1), np.zeros(len(removed) * table.dim, np.float32)])
    lists = pa.FixedSizeListArray.from_arrays(pa.array(flat), table.dim, mask=pa.array(mask) if mask.any() else None)
    return pa.record_batch([pa.array(np.concatenate([ids, removed])), lists], schema=schema)


def _write_group(writer: Any, group: list[Any]) -> int:
    import pyarrow as pa

    if not group:
        return 0
    together = pa.Table.from_batches(group)
    writer.write_table(together, row_group_size=max(1, together.num_rows))
    return int(together.num_rows)


# ---- safetensors ----


def _write_safetensors(table: TableExport, path: Path) -> int:
    """Write the weights directly, and ids and removed ids to temporary files, which are appended at the end."""
    with ExitStack() as stack:
        out = stack.enter_context(_new(path))
        beside = {name: _beside(stack, path.with_name(f"{path.name}-{name}")) for name in ("ids", "removed")}
        out.write(b" " * _HEADER)
        counts = dict.fromkeys(beside, 0)
        for rows in table.buckets:
            ids, weights = _values(rows, table.spec)
            out.write(weights.data)
            for name, values in (("ids", ids), ("removed", rows.removed)):
                beside[name].write(np.ascontiguousarray(values).data)
                counts[name] += len(values)
        for name in ("ids", "removed") if table.delta else ("ids",):
            beside[name].seek(0)
            shutil.copyfileobj(beside[name], out, 8 << 20)
        out.seek(0)
        out.write(_header(table, counts["ids"], counts["removed"]))
        return counts["ids"]


def _new(path: Path) -> BinaryIO:
    """Open a new file, or a leftover in its place; a link that someone else has put there is an error."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "w+b")


def _beside(stack: ExitStack, path: Path) -> BinaryIO:
    """Open a temporary file without a name, which vanishes when it is closed."""
    file = stack.enter_context(_new(path))
    path.unlink()
    return file


def _header(table: TableExport, rows: int, removed: int) -> bytes:
    slots = [
        TensorSlot("weights", "F32", [rows, table.dim], 4 * rows * table.dim),
        TensorSlot("ids", "I64", [rows], 8 * rows),
    ]
    if table.delta:
        slots.append(TensorSlot("removed", "I64", [removed], 8 * removed))
    header = header_of(slots, {"table": table.name, "version": str(table.version)}, _HEADER)
    if len(header) != _HEADER:
        raise UsageError(f"the name of table '{table.name[:40]}...' is too long for a safetensors header; use Parquet")
    return header
