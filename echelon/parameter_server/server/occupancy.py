"""Count the rows of a table over all servers, so that its capacity holds for the table and not for each server."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.hashing import owned_by
from echelon.parameter_server.protocol.job_spec import BUCKETS, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.store import even_share


class Occupancy:
    """The rows of tables with a capacity, as the servers' latest answers tell a worker.

    Ids are hashed, so servers never hold equally many of them, and no server sees the others' rows. A worker hears from
    all of them. It refuses an id too many where rows must stay; else it tells each server how many rows it may hold.
    One server counts by itself.
    """

    def __init__(self, tables: Sequence[TableSpec], servers: int) -> None:
        self._tables = [table for table in tables if table.capacity is not None] if servers > 1 else []
        self._rows: list[dict[str, int]] = [{} for _ in range(servers)]
        self._refused: dict[str, int] = {}

    @property
    def is_counted(self) -> bool:
        """Return True if some table's rows are counted here."""
        return bool(self._tables)

    def note(self, answers: Sequence[WireMessage]) -> None:
        """Take what each server's answer says of its rows; raise if a table that must keep its rows is over-full."""
        if not self._tables:
            return
        for rows, answer in zip(self._rows, answers, strict=True):
            rows.update(answer.head.get("rows", {}))
        for table in self._tables:
            total = sum(rows.get(table.name, 0) for rows in self._rows)
            if table.on_full == "error" and total > max(table.capacity or 0, self._refused.get(table.name, 0)):
                self._refused[table.name] = total  # said once, so that a script that catches it can still close
                raise EchelonError(
                    f"table '{table.name}' is full: {total:,} different ids came, and its {len(self._rows)} servers "
                    f"hold {table.capacity:,} together; raise capacity, or set on_full to 'lru' or 'lfu'"
                )

    def limits(self, server: int) -> dict[str, int]:
        """Return the most rows of each table that ``server`` may hold: what others leave, its even share at least."""
        return {table.name: self._limit(table, server) for table in self._tables if table.on_full != "error"}

    def _limit(self, table: TableSpec, server: int) -> int:
        assert table.capacity is not None
        servers = len(self._rows)
        others = sum(rows.get(table.name, 0) for index, rows in enumerate(self._rows) if index != server)
        return max(table.capacity - others, even_share(table.capacity, owned_by(server, BUCKETS, servers)))
