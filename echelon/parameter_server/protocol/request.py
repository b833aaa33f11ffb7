"""Parsing of a worker's requests from messages. Messages come from the network, so all of their content is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError, nearest
from echelon.base.formatting import brief
from echelon.base.kernel_cache import cached_jit
from echelon.parameter_server.protocol import hashing
from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.protocol.job_spec import BUCKETS, JobSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.dense import DenseShard, check_settings
from echelon.parameter_server.table.bfloat16 import widen
from echelon.strategy.sparse_update_rules import state_width

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

#: Highest index of a worker, and of a step.
MAX_WORKER, MAX_STEP = 2**20, 2**53
#: Arrays that may come as bfloat16, in 16 bits.
NARROW = ("rows", "pulled_rows")
OPTIONAL = ("ids", "rows", "dense", "pulled_rows", "pulled_dense", "blob")


class RequestError(EchelonError):
    """The request is invalid, or invalid in the present state."""


@dataclass
class ShardRequestSchema:
    """The buckets, dense blocks and row widths that a request to one shard of a job must match."""

    job: JobSpec
    buckets: range
    dense: DenseShard
    dims: dict[str, int] = field(init=False)
    pushed: dict[str, int] = field(init=False)  # floats of a row in a push
    widths: dict[str, int] = field(init=False)  # floats of a record: weights and state

    def __post_init__(self) -> None:
        self.dims = {table.name: table.dim for table in self.job.tables}
        self.pushed = {table.name: table.push_width for table in self.job.tables}
        self.widths = {table.name: table.dim + state_width(table.rule, table.dim) for table in self.job.tables}


@dataclass
class PullRequest:
    """A worker's request to read, for a step, rows of some tables by their ids, and the dense blocks.

    narrow: answer with rows as bfloat16
    """

    worker: int
    step: int
    commit: int | None
    peek: bool
    dense: bool
    state: bool
    narrow: bool
    ids: dict[str, Ids]


@dataclass
class PushRequest:
    """A worker's update after a step."""

    worker: int
    seq: int
    weight: float
    version: int
    ids: dict[str, Ids]
    rows: dict[str, Floats]
    rates: dict[str, float]
    limits: dict[str, int]
    loss: float = 0.0
    groups: list[dict[str, Any]] = field(default_factory=list)
    kind: str = "gradient"
    values: bool = False
    commit: bool = True
    dense: Floats | None = None
    pulled_rows: dict[str, Floats] = field(default_factory=dict)
    pulled_dense: Floats | None = None
    blob: NDArray[np.uint8] | None = None


def read_pull(frame: WireMessage, layout: ShardRequestSchema) -> PullRequest:
    head = frame.head
    ids = _array(frame.arrays[0] if frame.arrays else np.empty(0, np.int64), np.int64, "ids")
    commit = head.get("commit")
    return PullRequest(
        worker=worker_of(head),
        step=whole(head, "step", -1),
        commit=None if commit is None else whole(head, "commit", -1),
        peek=flag(head, "peek"),
        dense=flag(head, "dense"),
        state=flag(head, "state"),
        narrow=flag(head, "narrow"),
        ids=_cut_ids(ids, _counts(head, layout), layout),
    )


def read_push(frame: WireMessage, layout: ShardRequestSchema) -> PushRequest:
    """Parse a push and check every count, dtype and length in it; ``check_numbers`` checks the values."""
    head, arrays = frame.head, _named(frame)
    counts = _counts(head, layout)
    kind = head.get("kind", "gradient")
    widths = layout.widths if kind == "delta" else layout.pushed
    groups = head.get("groups", [])
    check_settings(groups, len(layout.job.dense.groups))
    wanted = "delta" if layout.job.mode == "geo" else "gradient"
    if kind != wanted:
        raise RequestError(f"a push of kind {kind!r} arrived in mode '{layout.job.mode}', which takes '{wanted}'")
    if flag(head, "dense") != ("dense" in arrays):
        raise RequestError("the head of a push and its arrays disagree about dense gradients")
    return PushRequest(
        worker=worker_of(head),
        seq=whole(head, "seq", 0),
        weight=number(head, "weight", 1.0),
        loss=_loss(head),
        version=whole(head, "version", 0, default=0),
        rates=_rates(head, layout),
        limits=_limits(head, layout),
        groups=groups,
        kind=kind,
        values=flag(head, "values"),
        commit=flag(head, "commit"),
        ids=_cut_ids(arrays.get("ids", np.empty(0, np.int64)), counts, layout),
        rows=_cut_rows(arrays.get("rows", np.empty(0, np.float32)), counts, widths, "rows"),
        dense=_of_length(arrays.get("dense"), layout.dense.size, "dense"),
        pulled_rows=_pulled(arrays, counts, layout),
        pulled_dense=_of_length(arrays.get("pulled_dense"), layout.dense.size, "pulled_dense"),
        blob=arrays.get("blob"),
    )


def _pulled(arrays: dict[str, NDArray[Any]], counts: dict[str, int], layout: ShardRequestSchema) -> dict[str, Floats]:
    return _cut_rows(arrays["pulled_rows"], counts, layout.dims, "pulled_rows") if "pulled_rows" in arrays else {}


def check_numbers(push: PushRequest, dense: DenseShard) -> None:
    """Raise ``RequestError`` if a push contains a NaN or an infinity; the error names the table or parameter."""
    for kind, tables in (("gradient", push.rows), ("pulled value", push.pulled_rows)):
        for name, rows in tables.items():
            if not finite(rows):
                raise RequestError(
                    f"worker {push.worker}'s push {push.seq} has a {kind} of table '{name}' that is NaN or infinite; "
                    "nothing of it was applied"
                )
    for kind, values in (("gradient", push.dense), ("pulled value", push.pulled_dense)):
        if values is not None and not finite(values):
            name = dense.name_at(int(np.flatnonzero(~np.isfinite(values))[0]))
            raise RequestError(
                f"worker {push.worker}'s push {push.seq} has a {kind} of parameter '{name}' that is NaN or infinite; "
                "nothing of it was applied"
            )


def finite(values: Floats) -> bool:
    return bool(np.isfinite(values).all())


# ---- single values ----


def worker_of(head: dict[str, Any], lowest: int = -1) -> int:
    return whole(head, "worker", lowest, MAX_WORKER)


def whole(head: dict[str, Any], name: str, lowest: int, highest: int = MAX_STEP, default: int | None = None) -> int:
    value = head.get(name, default)
    if type(value) is not int or not lowest <= value <= highest:
        raise RequestError(
            f"a request '{head.get('op')}' has {name}={brief(value)}; it must be a number from {lowest} on"
        )
    return value


def number(head: dict[str, Any], name: str, default: float) -> float:
    value = head.get(name, default)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= 1e30:
        raise RequestError(f"a request '{head.get('op')}' has {name}={brief(value)}; it must be a number of 0 or more")
    return float(value)


def _loss(head: dict[str, Any]) -> float:
    """Return a worker's loss. It may be non-finite: the workers handle that case."""
    value = head.get("loss", 0.0)
    if type(value) not in (int, float):
        raise RequestError(f"a push has loss={brief(value)}; it must be a number")
    return float(value)


def flag(head: dict[str, Any], name: str) -> bool:
    value = head.get(name, False)
    if type(value) is not bool:
        raise RequestError(f"a request '{head.get('op')}' has {name}={brief(value)}; it must be true or false")
    return value


def text(head: dict[str, Any], name: str) -> str:
    value = head.get(name)
    if not isinstance(value, str) or not value or len(value) > 4096 or "\0" in value:
        raise RequestError(f"a request '{head.get('op')}' has {name}={brief(value)}; it must be text")
    return value


# ---- tables and arrays ----


def _counts(head: dict[str, Any], layout: ShardRequestSchema) -> dict[str, int]:
    counts = head.get("tables", {})
    if not isinstance(counts, dict):
        raise RequestError(f"a request '{head.get('op')}' has tables={brief(counts)}; it must count ids by table")
    for name, count in counts.items():
        known_table(name, layout)
        if type(count) is not int or count < 0:
            raise RequestError(f"a request '{head.get('op')}' has {brief(count)} ids of table '{name}'")
    return counts


def known_table(name: Any, layout: ShardRequestSchema) -> str:
    if not isinstance(name, str) or name not in layout.dims:
        raise RequestError(f"this job has no table {brief(name)}{nearest(str(name)[:60], layout.dims)}")
    return str(name)


def _rates(head: dict[str, Any], layout: ShardRequestSchema) -> dict[str, float]:
    rates = head.get("lrs", {})
    if not isinstance(rates, dict):
        raise RequestError(f"a push has lrs={brief(rates)}; it must give rates by table")
    return {known_table(name, layout): number(rates, name, 0.0) for name in rates}


def _limits(head: dict[str, Any], layout: ShardRequestSchema) -> dict[str, int]:
    limits = head.get("limits", {})
    if not isinstance(limits, dict):
        raise RequestError(f"a push has limits={brief(limits)}; it must give rows by table")
    return {known_table(name, layout): whole(limits, name, 1) for name in limits}


def _named(frame: WireMessage) -> dict[str, NDArray[Any]]:
    names = frame.head.get("has", [])
    known = isinstance(names, list) and all(isinstance(name, str) and name in OPTIONAL for name in names)
    if not known or len(names) != len(frame.arrays) or len(set(names)) != len(names):
        raise RequestError(f"a push has {len(frame.arrays)} arrays, but its head names {brief(names)}")
    kinds: dict[str, Any] = {"ids": np.int64, "blob": np.uint8}
    return {
        name: _array(array, kinds.get(name, np.float32), name)
        for name, array in zip(names, frame.arrays, strict=True)
    }  # fmt: skip


def _array(array: NDArray[Any], kind: Any, name: str) -> NDArray[Any]:
    if array.dtype == np.uint16 and name in NARROW:
        array = widen(array)
    if array.dtype != kind:
        raise RequestError(f"{name} are {array.dtype}, expected {np.dtype(kind)}")
    return np.ascontiguousarray(array).reshape(-1)


def _of_length(array: NDArray[Any] | None, length: int, name: str) -> Floats | None:
    if array is not None and len(array) != length:
        raise RequestError(f"{name} has {len(array)} entries; this server's blocks have {length}")
    return array


def _cut_ids(ids: Ids, counts: dict[str, int], layout: ShardRequestSchema) -> dict[str, Ids]:
    if len(ids) != sum(counts.values()):
        raise RequestError(f"{len(ids)} ids arrived for counts of {sum(counts.values())}")
    buckets = layout.buckets
    if len(buckets) < BUCKETS and len(ids):
        foreign = _foreign(ids, buckets.start, buckets.stop, BUCKETS)
        if foreign >= 0:
            raise RequestError(f"id {ids[foreign]} belongs to another server than this; servers and workers disagree")
    return dict(_parts(ids, counts, dict.fromkeys(counts, 1)))


def _cut_rows(rows: Floats, counts: dict[str, int], widths: dict[str, int], name: str) -> dict[str, Floats]:
    total = sum(count * widths[table] for table, count in counts.items())
    if len(rows) != total:
        raise RequestError(f"{name} has {len(rows)} entries; its tables' ids need {total}")
    return {table: part.reshape(-1, widths[table]) for table, part in _parts(rows, counts, widths)}


def _parts(flat: Any, counts: dict[str, int], widths: dict[str, int]) -> Iterator[tuple[str, Any]]:
    at = 0
    for table, count in counts.items():
        size = count * widths[table]
        yield table, flat[at : at + size]
        at += size


def _find_foreign(ids: Any, first: int, stop: int, buckets: int) -> int:
    """Return the position of the first id whose bucket is not in [first, stop), or -1."""
    for i in range(ids.size):
        bucket = ((mix(ids[i]) >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)
        if bucket < np.uint64(first) or bucket >= np.uint64(stop):
            return i
    return -1


_ANY_IDS = numba.types.Array(numba.types.int64, 1, "C", readonly=True, aligned=False)
_foreign: Callable[[Ids, int, int, int], int] = cached_jit(
    (Path(__file__), Path(hashing.__file__)),
    numba.types.int64(_ANY_IDS, numba.types.int64, numba.types.int64, numba.types.int64),
    nogil=True,
)(_find_foreign)
