"""What workers tell servers when a job opens: its tables, its dense blocks, how updates come together.

Plain data with a JSON form; two workers that were built differently are found out by comparing it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from echelon.base.config import build, require, strict
from echelon.strategy.table_rules import NAMED, Rule

Mode = Literal["sync", "async", "bounded", "geo"]

#: Virtual buckets of every table: what moves between servers when their number changes.
BUCKETS = 1024


@strict
class Initializer:
    """The first value of a row, from (seed, table, id) alone.

    kind:  "uniform" in [low, high), "normal" with mean ``low`` and deviation ``high``, or "constant" ``low``
    """

    kind: Literal["uniform", "normal", "constant"] = "uniform"
    low: float = -0.05
    high: float = 0.05


@strict
class TableSpec:
    """One sparse table.

    seed:                of this table: made from the job's seed and the table's name
    capacity:            most rows it may hold, over all servers; None: as many as memory takes
    on_full:             refuse new rows ("error"), or let go of the longest unseen ("lru") or rarest seen ("lfu")
    admit_after:         a row is made when its id is pushed for the so-manieth time
    admit_probability:   or, each time, with this probability
    expire_passes:       forget rows that were not pushed in so many passes over the data
    expire_seconds:      or for so long
    disk:                keep rows in a memory-mapped file, so that cold ones leave memory
    """

    name: str
    dim: int
    seed: int = 0
    rule: Rule = NAMED["adagrad"]
    initializer: Initializer = Initializer()
    capacity: int | None = None
    on_full: Literal["error", "lru", "lfu"] = "error"
    admit_after: int = 1
    admit_probability: float = 1.0
    expire_passes: int | None = None
    expire_seconds: float | None = None
    disk: bool = False

    def __post_init__(self) -> None:
        require(1 <= self.dim <= 65536, self, "dim", "between 1 and 65536")
        require(self.capacity is None or self.capacity >= 1, self, "capacity", "1 or more")
        require(self.admit_after >= 1, self, "admit_after", "1 or more")
        require(0 < self.admit_probability <= 1, self, "admit_probability", "a probability above 0")
        require(self.expire_passes is None or self.expire_passes >= 1, self, "expire_passes", "1 or more")
        require(self.expire_seconds is None or self.expire_seconds > 0, self, "expire_seconds", "above 0")


@strict
class DenseBlock:
    """A piece of a dense parameter: ``length`` entries from ``offset`` on, on server ``server``.

    rows:   the shape of the piece, so that optimizers that look at shapes see whole rows
    group:  the parameter group of the optimizer that it belongs to
    """

    parameter: str
    offset: int
    length: int
    shape: tuple[int, ...]
    server: int
    group: int = 0


@strict
class DenseRule:
    """A torch optimizer, by its name and the settings of its parameter groups (JSON values only)."""

    kind: Literal["SGD", "Adagrad", "Adam", "AdamW", "FTRL", "LARS", "LAMB"] = "SGD"
    groups: tuple[dict[str, Any], ...] = ()


@strict
class PersistenceSettings:
    """How a server keeps its state.

    journal:         write every push to a journal before it is answered, so that kill -9 loses none
    replica:         and to the next server, so that losing the host loses none
    snapshot_every:  seconds between snapshots (base, then deltas); the journal before it can go
    journal_mb:      a longer journal calls for a snapshot before its time; some 2 s of replay a thousand
    """

    journal: bool = True
    replica: bool = False
    snapshot_every: float = 60.0
    journal_mb: int = 2048


@strict
class JobSpec:
    """All that a server must know of a job.

    session:    names this run of it; another session starts from nothing (or from a checkpoint)
    trainers:   workers that are expected from the start
    staleness:  "bounded": steps that a worker may be ahead of the slowest
    compensate: lambda of delay compensation; 0: off
    patience:   seconds to wait for a worker that fell silent, before going on without it
    device:     where dense blocks live on servers
    """

    session: str
    mode: Mode
    trainers: int
    servers: int
    seed: int = 0
    tables: tuple[TableSpec, ...] = ()
    blocks: tuple[DenseBlock, ...] = ()
    dense: DenseRule = DenseRule()
    staleness: int = 0
    compensate: float = 0.0
    patience: float = 60.0
    keeping: PersistenceSettings = PersistenceSettings()
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """JSON values only: equal specs have equal forms."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        for table, made in zip(self.tables, plain["tables"], strict=True):
            made["rule"] = {"kind": type(table.rule).__name__, **made["rule"]}
        return plain


def job_from_json(plain: dict[str, Any]) -> JobSpec:
    """The spec that a worker sent, checked like one that was written by hand."""
    kinds = {type(rule).__name__: type(rule) for rule in NAMED.values()}
    tables = []
    for made in plain.get("tables", []):
        settings = dict(made.get("rule", {}))
        kind = kinds.get(str(settings.pop("kind", "")))
        rule = build(kind, settings) if kind else settings
        tables.append(build(TableSpec, {**made, "rule": rule}))
    return build(JobSpec, {**plain, "tables": tuple(tables)})
