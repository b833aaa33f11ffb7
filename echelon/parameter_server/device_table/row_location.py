"""``RowLocation``: where a table's rows lie, and the table that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from echelon.base.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from echelon.parameter_server.protocol.job_spec import TableSpec
    from echelon.parameter_server.table.row_table import RowTable, TableMaker

Location = Literal["host", "device", "cached"]
_LOCATIONS = ("host", "device", "cached")


@dataclass(frozen=True)
class RowLocation:
    """The place of a table's rows: the host's memory (or disk), the memory of the worker's device, or both.

    cache_rows: with "cached", rows that the device has room for
    """

    location: Location = "host"
    cache_rows: int | None = None

    def __post_init__(self) -> None:
        if self.location not in _LOCATIONS:
            raise UsageError(f"SparseEmbedding(location={self.location!r}): expected 'host', 'device' or 'cached'")
        if (self.location == "cached") != (self.cache_rows is not None):
            raise UsageError(
                f"SparseEmbedding(location={self.location!r}, cache_rows={self.cache_rows}): location='cached' and "
                "cache_rows, the rows that the device has room for, go together; give both or neither"
            )
        if self.cache_rows is not None and self.cache_rows < 1:
            raise UsageError(f"SparseEmbedding(cache_rows={self.cache_rows}): expected 1 or more")

    @property
    def on_device(self) -> bool:
        return self.location != "host"

    def describe(self, device: torch.device) -> str:
        """Return words for the startup log; none for a table in host memory."""
        if self.cache_rows is not None:
            return f", {self.cache_rows:,} rows cached in the memory of {device}"
        return f", rows in the memory of {device}" if self.on_device else ""


def table_maker(locations: Mapping[str, RowLocation], device: torch.device) -> TableMaker:
    """Return a function that makes the tables of a job where they are to lie."""
    from echelon.parameter_server.table.row_table import host_table

    def made(spec: TableSpec, buckets: range, directory: Path | None, capacity: int | None) -> RowTable:
        location = locations[spec.name]
        if location.location == "host":
            return host_table(spec, buckets, directory, capacity)
        from echelon.parameter_server.device_table.cached_table import CachedTable
        from echelon.parameter_server.device_table.device_table import DeviceTable
        from echelon.parameter_server.table import Table

        if location.cache_rows is not None:
            host = Table(spec, buckets=buckets, directory=directory, capacity=capacity)
            return CachedTable(host, device, location.cache_rows)
        return DeviceTable(spec, device, buckets=buckets, capacity=capacity)

    return made


def refuse_servers(locations: Mapping[str, RowLocation]) -> None:
    """Raise ``UsageError`` for tables on a device in a job whose tables lie on servers."""
    for name, location in locations.items():
        if location.on_device:
            raise UsageError(
                f"table '{name}': location='{location.location}' keeps rows in the workers, and this job's tables "
                "lie on servers; start it with 'echelon run --procs N ...' (ps='collective'), or leave location out"
            )
