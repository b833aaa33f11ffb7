"""The job description that workers send to servers when a job opens: its tables, its dense blocks, its update mode.

The description is plain data with a JSON form. Servers compare it to detect workers that were built differently.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from echelon.base.config import build, require, strict
from echelon.strategy.show_click_score import ShowClickScore
from echelon.strategy.sparse_update_rules import NAMED, Rule

Mode = Literal["sync", "async", "bounded", "geo"]
#: Formats in which the weights of rows are kept.
RowDtype = Literal["float32", "bf16", "int8"]

#: Virtual buckets of every table: the units that move between servers when the number of servers changes.
BUCKETS = 1024
#: Counts of a row of a table with a score: its shows and its clicks.
EVENTS = 2
#: Number of a worker's own states (blobs) that are kept. In async mode a worker sends a push before its last one is
#: answered, so the servers may be two pushes apart when it is killed, and it resumes from the earliest.
BLOBS = 3


@strict
class Initializer:
    """The distribution of a row's initial weights, which depend on (seed, table, id) alone.

    kind:  "uniform" in [low, high), "normal" with mean ``low`` and standard deviation ``high``, or "constant" ``low``
    """

    kind: Literal["uniform", "normal", "constant"] = "uniform"
    low: float = -0.05
    high: float = 0.05


@strict
class TableSpec:
    """One sparse table.

    seed:                seed of this table, derived from the job's seed and the table's name
    rule:                update rule of the rows; default adagrad
    capacity:            most rows of the table over all servers; None (default): limited by memory only
    on_full:             raise an error for new rows ("error", default), or evict the least recently ("lru") or least
                         frequently ("lfu") pushed rows
    admit_after:         number of pushes of an id from which on its row can be created; default 1
    admit_probability:   probability, at each such push, that the row is created; default 1
    expire_passes:       passes over the data without a push after which a row is removed; None (default): never
    expire_seconds:      seconds without a push after which a row is removed; None (default): never
    score:               count shows and clicks of each row, and remove rows whose score is low; None (default): do not
    disk:                keep rows in a memory-mapped file, so that cold rows can leave memory; default False
    dtype:               format in which weights are kept: "float32" (default), "bf16" or "int8"
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
    score: ShowClickScore | None = None
    disk: bool = False
    dtype: RowDtype = "float32"

    @property
    def push_width(self) -> int:
        """Number of floats of a row in a push: its gradient, then its shows and clicks if they are counted."""
        return self.dim + (EVENTS if self.score is not None else 0)

    def __post_init__(self) -> None:
        require(1 <= self.dim <= 65536, self, "dim", "between 1 and 65536")
        require(self.capacity is None or self.capacity >= 1, self, "capacity", "1 or more")
        require(self.admit_after >= 1, self, "admit_after", "1 or more")
        require(0 < self.admit_probability <= 1, self, "admit_probability", "a probability above 0")
        require(self.expire_passes is None or self.expire_passes >= 1, self, "expire_passes", "1 or more")
        require(self.expire_seconds is None or self.expire_seconds > 0, self, "expire_seconds", "above 0")
        by_pass = self.score is None or self.expire_seconds is None
        require(by_pass, self, "expire_seconds", "None beside score, which counts passes; set expire_passes")


@strict
class DenseBlock:
    """A part of a dense parameter: ``length`` entries from ``offset`` on, held by server ``server``.

    shape:  shape of the block, so that optimizers that depend on shapes see whole rows
    group:  index of the optimizer's parameter group; default 0
    """

    parameter: str
    offset: int
    length: int
    shape: tuple[int, ...]
    server: int
    group: int = 0


@strict
class DenseRule:
    """A torch optimizer, given by its name and the settings of its parameter groups (JSON values only)."""

    kind: Literal["SGD", "Adagrad", "Adam", "AdamW", "FTRL", "LARS", "LAMB"] = "SGD"
    groups: tuple[dict[str, Any], ...] = ()


@strict
class PersistenceSettings:
    """Persistence settings of a server.

    journal:         write every push to a journal before it is answered, so that kill -9 loses none; default True
    replica:         also send the journal to the next server, so that losing the host loses none; default False
    snapshot_every:  seconds between snapshots (base, then deltas), after which older journal is removed; default 60
    journal_mb:      MiB of journal that trigger an early snapshot; default 2048. Replay takes about 2 s per 1000 MiB
    """

    journal: bool = True
    replica: bool = False
    snapshot_every: float = 60.0
    journal_mb: int = 2048


@strict
class JobSpec:
    """The complete description of a job for a server.

    session:    name of this run of the job; another session starts with empty state (or from a checkpoint)
    trainers:   number of workers that take part from the start
    staleness:  in mode "bounded", steps that a worker may be ahead of the slowest; default 0
    compensate: lambda of delay compensation; 0 (default) turns it off
    patience:   seconds without a heartbeat before a worker is dropped; default 60
    keeping:    persistence settings
    device:     device of the dense blocks on servers; default "cpu"
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
        """Return the description as JSON values; equal descriptions have equal forms."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        for table, made in zip(self.tables, plain["tables"], strict=True):
            made["rule"] = {"kind": type(table.rule).__name__, **made["rule"]}
        return plain


def job_from_json(plain: dict[str, Any]) -> JobSpec:
    """Return the description that a worker sent as JSON values, with the usual validation of its fields."""
    tables = plain.get("tables", [])
    return build(
        JobSpec, {**plain, "tables": [_with_rule(table) for table in tables] if isinstance(tables, list) else tables}
    )


def _with_rule(table: Any) -> Any:
    """Return the JSON values of a table with its update rule, which names its kind."""
    rule = table.get("rule") if isinstance(table, dict) else None
    if not isinstance(rule, dict):
        return table
    kinds = {type(known).__name__: type(known) for known in NAMED.values()}
    kind = kinds.get(str(rule.get("kind")))
    if kind is None:
        return table
    return {**table, "rule": build(kind, {name: value for name, value in rule.items() if name != "kind"})}
