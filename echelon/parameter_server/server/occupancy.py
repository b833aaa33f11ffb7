"""Counting of a table's rows over all servers, so that its capacity applies to the table and not to each server."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.hashing import owned_by
from echelon.parameter_server.protocol.job_spec import BUCKETS, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.store import even_share


class Occupancy:
    """A worker's count of the rows of tables with a capacity, from the servers' latest answers.

    Ids are hashed, so servers never hold exactly equal numbers of rows, and no server knows the rows of the others. A
    worker gets answers from all servers. With on_full="error" it raises an error when the capacity is exceeded; else it
    sends each server the number of rows that the server may hold. A single server counts its rows itself.
    """

    def __init__(self, tables: Sequence[TableSpec], servers: int) -> None:
        self._tables = [table for table in tables if table.capacity is not None] if servers > 1 else []
        self._rows: list[dict[str, int]] = [{} for _ in range(servers)]
        self._refused: dict[str, int] = {}

    @property
    def is_counted(self) -> bool:
        """True if the rows of some table are counted here."""
        return bool(self._tables)

    def note(self, answers: Sequence[WireMessage]) -> None:
        """Record the row counts in the servers' answers.

        Raises ``EchelonError`` if a table with on_full="error" exceeds its capacity.
        """
        if not self._tables:
            return
        for rows, answer in zip(self._rows, answers, strict=True):
            rows.update(answer.head.get("rows", {}))
        for table in self._tables:
            total = sum(rows.get(table.name, 0) for rows in self._rows)
            if table.on_full == "error" and total > max(table.capacity or 0, self._refused.get(table.name, 0)):
                self._refused[table.name] = total  # raised once, so that a script that catches it can still close
                raise EchelonError(
                    f"table '{table.name}' is full: {total:,} different ids arrived, and its {len(self._rows)} servers "
                    f"hold {table.capacity:,} together; raise capacity, or set on_full to 'lru' or 'lfu'"
                )

    def limits(self, server: int) -> dict[str, int]:
        """Return the row limit of each table on ``server``: the rest of the capacity, but at least the even share."""
        return {table.name: self._limit(table, server) for table in self._tables if table.on_full != "error"}

    def _limit(self, table: TableSpec, server: int) -> int:
        assert table.capacity is not None
        servers = len(self._rows)
        others = sum(rows.get(table.name, 0) for index, rows in enumerate(self._rows) if index != server)
        return max(table.capacity - others, even_share(table.capacity, owned_by(server, BUCKETS, servers)))
