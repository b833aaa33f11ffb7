"""A table of 100 million ids on one machine: made, trained, snapshot while it lives, restored by another process.

    python benchmarks/parameter_server/ps_scale.py [--ids 100000000] [--directory DIR] [--out results.json]

16 floats a row, row-wise Adagrad, records in a memory-mapped file (disk tier). Needs some 25 GB of disk for 100 million
ids: the records twice (one process after the other), and the snapshot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parameter_server.keeping import named
from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.protocol.job_spec import JobSpec, PersistenceSettings, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.strategy.sparse_update_rules import Adagrad

DIM, BATCH, KEEPING = 16, 200_000, PersistenceSettings(snapshot_every=36000.0)


def opened(directory: Path) -> ServerShard:
    """A shard that keeps itself in ``directory``, and is what was kept there."""
    table = TableSpec(name="t", dim=DIM, rule=Adagrad(row_wise=True), disk=True)
    job = JobSpec(session="scale", mode="async", trainers=1, servers=1, tables=(table,), keeping=KEEPING)
    state = directory / "state"
    state.mkdir(exist_ok=True)
    shard = ServerShard(0, 1, directory=directory, keep=lambda shard: ShardPersistence(shard, state, KEEPING, None))
    answer = shard.handle(WireMessage({"op": "open", "worker": 0, "job": job.to_json()}))
    assert "error" not in answer.head, answer.head
    return shard


def push(shard: ServerShard, first: int, last: int) -> float:
    """Train the ids with these numbers once more; seconds."""
    began = time.perf_counter()
    table = shard.tables["t"]
    for start in range(first, last, BATCH):
        ids = named(np.arange(start, min(last, start + BATCH)))
        table.push(ids, np.full((len(ids), DIM), 0.01, np.float32))
        shard.lsn += 1
    return round(time.perf_counter() - began, 1)


def resident() -> dict[str, float]:
    """Gigabytes in memory: this process's own, pages of files, which the system may take back, and the most of both."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    kinds = {"own": ("RssAnon", "RssShmem"), "of files": ("RssFile",), "most of both": ("VmHWM",)}
    return {
        name: round(sum(int(fields[field].split()[0]) for field in each) / 2**20, 2) for name, each in kinds.items()
    }


def rate(rows: int, seconds: float) -> float:
    """Millions of rows a second."""
    return round(rows / max(seconds, 0.01) / 1e6, 2)


def some(ids: int) -> np.ndarray:
    return named(np.random.default_rng(1).integers(0, ids, 100_000))


def make(ids: int, directory: Path) -> dict[str, Any]:
    shard = opened(directory)
    persistence: Any = shard.persistence
    found: dict[str, Any] = {"create, s": push(shard, 0, ids)}
    began = time.perf_counter()
    persistence.snapshot(base=True)
    found["base snapshot, s"] = round(time.perf_counter() - began, 1)
    found["create, M rows/s"] = rate(ids, found["create, s"])
    found["base snapshot, M rows/s"] = rate(ids, found["base snapshot, s"])
    found["resident after the base, GB"] = resident()
    found["train the first 10 % again, s"] = push(shard, 0, ids // 10)
    began = time.perf_counter()
    persistence.snapshot(base=False)
    found["delta of 10 %, s"] = round(time.perf_counter() - began, 1)
    table = shard.tables["t"]
    found |= {"rows": len(table), "bytes an id": round(table.memory() / len(table), 1), "resident, GB": resident()}
    found["snapshots, GB"] = round(sum(p.stat().st_size for p in (directory / "state").iterdir()) / 2**30, 2)
    np.save(directory / "expected.npy", table.pull_state(some(ids)))
    shard.close()
    return found


def restore(ids: int, directory: Path) -> dict[str, Any]:
    began = time.perf_counter()
    shard = opened(directory)
    seconds = round(time.perf_counter() - began, 1)
    table = shard.tables["t"]
    same = bool(np.array_equal(table.pull_state(some(ids)), np.load(directory / "expected.npy")))
    return {
        "restore, s": seconds,
        "restore, M rows/s": rate(ids, seconds),
        "rows": len(table),
        "100,000 of them are the same bits": same,
        "resident, GB": resident(),
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--ids", type=int, default=100_000_000)
    ask.add_argument("--directory", type=Path)
    ask.add_argument("--out", type=Path)
    ask.add_argument("--part", choices=["make", "restore"], help="one of the two processes alone, in --directory")
    given = ask.parse_args()
    if given.part is not None:
        print(json.dumps((make if given.part == "make" else restore)(given.ids, given.directory)))
        return
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        found: dict[str, Any] = {"ids": given.ids, "load before": os.getloadavg()[0]}
        for part in ("make", "restore"):
            command = [sys.executable, __file__, "--part", part, "--ids", str(given.ids), "--directory", place]
            found[part] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
