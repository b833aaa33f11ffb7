"""Cost of durability for a server: journal, snapshots, restore, checkpoints, and the memory beside the table.

    python benchmarks/parameter_server/keeping.py [--ids 2000000] [--dim 16] [--directory DIR] [--out results.json]

Figures are of the machine as it is (its load is written down beside them); appends are medians over 200 pushes of 1 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.parameter_server.persistence.file_record import encode, sums
from echelon.parameter_server.persistence.journal import JournalSegment
from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.persistence.table_export import export_checkpoint
from echelon.parameter_server.protocol.hashing import mix_all
from echelon.parameter_server.protocol.job_spec import JobSpec, PersistenceSettings, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.strategy.sparse_update_rules import Adagrad

PUSHES = 200


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory that was resident while something ran, beyond what was before."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.extra_mb = (self.most - self.before) / 1e6


def median_us(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(PUSHES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def appends(directory: Path) -> dict[str, float]:
    """Microseconds for a push of 1 MB: 13,300 ids and their rows of 16 floats."""
    chance = np.random.default_rng(0)
    arrays = [chance.integers(0, 2**62, 13_300), chance.random(13_300 * 16, np.float32)]
    frame = WireMessage({"op": "push", "worker": 0, "seq": 0, "tables": {"t": 13_300}, "has": ["ids", "rows"]}, arrays)
    plain, synced = JournalSegment(directory, 1), JournalSegment(directory, 2, fsync=True)
    return {
        "bytes": sum(array.nbytes for array in arrays),
        "checksums_us": median_us(lambda: [sums(array.view(np.uint8)) for array in arrays]),
        "crc32_us": median_us(lambda: [zlib.crc32(array.view(np.uint8)) for array in arrays]),
        "encode_us": median_us(lambda: encode(1, frame)),
        "append_us": median_us(lambda: plain.append(encode(1, frame))),
        "append_fsync_us": median_us(lambda: synced.append(encode(1, frame))),
    }


def filled(ids: int, dim: int, directory: Path, keeping: PersistenceSettings) -> ServerShard:
    """A shard whose one table has so many rows."""
    table = TableSpec(name="t", dim=dim, rule=Adagrad(row_wise=True))
    job = JobSpec(session="bench", mode="async", trainers=1, servers=1, tables=(table,), keeping=keeping)
    shard = ServerShard(0, 1, keep=lambda shard: ShardPersistence(shard, directory, keeping, None))
    shard.handle(WireMessage({"op": "open", "worker": 0, "job": job.to_json()}))
    for start in range(len(shard.tables["t"]), ids, 100_000):
        _push(shard, named(np.arange(start, min(ids, start + 100_000))))
    return shard


def named(places: np.ndarray) -> np.ndarray:
    """Ids from the whole int64 range, by number."""
    return mix_all(places.astype(np.int64)).view(np.int64)


def _push(shard: ServerShard, ids: np.ndarray) -> None:
    table = shard.tables["t"]
    table.push(ids, np.full((len(ids), table.dim), 0.01, np.float32))
    shard.lsn += 1  # a change that no journal knows: snapshots follow it


class Longest:
    """The longest time that a keeper holds the shard's lock: what a push may have to wait."""

    def __init__(self, shard: ServerShard) -> None:
        self.seconds, self._held = 0.0, shard.persistence._held  # type: ignore[union-attr]
        shard.persistence._held = self.held  # type: ignore[union-attr]

    def held(self) -> Any:
        inner, outer = self._held(), self

        class Timed:
            def __enter__(self) -> Any:
                found = inner.__enter__()
                self.began = time.perf_counter()
                return found

            def __exit__(self, *error: Any) -> Any:
                outer.seconds = max(outer.seconds, time.perf_counter() - self.began)
                return inner.__exit__(*error)

        return Timed()


def measured(name: str, act: Callable[[], Any], found: dict[str, Any]) -> Any:
    with Peak() as peak:
        start = time.perf_counter()
        result = act()
        seconds = time.perf_counter() - start
    found[name] = {"seconds": round(seconds, 3), "extra_mb": round(peak.extra_mb, 1)}
    return result


def snapshots(ids: int, dim: int, directory: Path) -> dict[str, Any]:
    keeping = PersistenceSettings(snapshot_every=36000.0)
    shard = filled(ids, dim, directory / "state", keeping)
    table, found = shard.tables["t"], {}
    found["rows"], found["table_mb"] = len(table), round(table.memory() / 1e6, 1)
    longest = Longest(shard)
    assert shard.persistence is not None
    persistence: Any = shard.persistence
    measured("base", lambda: persistence.snapshot(base=True), found)
    _push(shard, named(np.arange(ids // 100)))
    measured("delta_of_1_percent", lambda: persistence.snapshot(base=False), found)
    measured("save", lambda: persistence.save(directory / "checkpoint", 1), found)
    found["longest_lock_ms"] = round(longest.seconds * 1e3, 2)
    found["checkpoint_mb"] = round(sum(p.stat().st_size for p in (directory / "checkpoint").iterdir()) / 1e6, 1)
    measured("load", lambda: persistence.load(directory / "checkpoint"), found)
    for ending in ("parquet", "safetensors"):
        out = directory / f"t.{ending}"
        measured(f"export_{ending}", lambda out=out: export_checkpoint(directory / "checkpoint", out), found)
    shard.close()
    start = time.perf_counter()
    again = filled(0, dim, directory / "state", keeping)
    found["restore"] = {"seconds": round(time.perf_counter() - start, 3), "rows": len(again.tables["t"])}
    again.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        found: dict[str, Any] = {"load": os.getloadavg()[0], "append_1_mb": appends(Path(directory))}
        found["snapshots"] = snapshots(given.ids, given.dim, Path(directory))
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
