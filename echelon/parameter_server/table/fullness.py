"""The number of rows that a full table evicts for a push, or the error if it must not."""

from __future__ import annotations

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.job_spec import TableSpec


def rows_to_evict(spec: TableSpec, capacity: int, present: int, made: int) -> int:
    """Return how many rows a table of ``present`` rows evicts before ``made`` new ones; it may evict more ahead.

    Raises ``EchelonError`` if the table must not evict rows, or has room for fewer than ``made``.
    """
    over = present + made - capacity
    if over <= 0:
        return 0
    if spec.on_full == "error":
        raise EchelonError(
            f"table '{spec.name}' is full: {present:,} of {capacity:,} rows here, and {made:,} new ids "
            "arrived; raise capacity, or set on_full to 'lru' or 'lfu'"
        )
    if made > capacity:
        raise EchelonError(
            f"table '{spec.name}': one push brings {made:,} new ids, but {capacity:,} rows are all it "
            "may hold here; raise capacity"
        )
    return over


def check_evicted(spec: TableSpec, capacity: int, evicted: int, over: int) -> None:
    """Raise ``EchelonError`` if fewer rows than ``over`` could be evicted, because the push needs the others."""
    if evicted < over:
        raise EchelonError(
            f"table '{spec.name}': one push touches more rows than the {capacity:,} it may hold here; raise capacity"
        )
