"""Speed of the sparse table on one core: rows pulled and pushed a second, bytes an id, and the cost of a start.

    python benchmarks/parameter_server/table.py [speed] [memory] [batch] [start] [scale] [--ids 10000000]
           [--dim 16] [--rounds 5] [--directory DIR] [--out results.json]

Parts take turns within a round; figures are medians over rounds, of processor time (neighbours on the machine still
take memory bandwidth: the load is written down beside them). "scale" makes 100M ids on disk and is run only if named.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.parameter_server.protocol.hashing import mix_all
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import Table, add_rows, dedupe, expand, merge, partition
from echelon.strategy.sparse_update_rules import Adagrad

BATCH = 100_000  # ids of a large push
CLICKS = 13_312  # ids of a batch of 512 examples with 26 fields


def named(places: np.ndarray) -> np.ndarray:
    """Ids from the whole int64 range, by number."""
    return mix_all(places.astype(np.int64)).view(np.int64)


def zipf(rng: np.random.Generator, n: int, below: int) -> np.ndarray:
    """Numbers below ``below`` with probability falling as rank^-1.1."""
    kept = np.empty(0, np.int64)
    while len(kept) < n:
        drawn = rng.zipf(1.1, 2 * n)
        kept = np.concatenate([kept, drawn[drawn <= below]])
    return kept[:n] - 1


def processor_seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def table_of(dim: int, **given: Any) -> TableSpec:
    return TableSpec(name="clicks", dim=dim, rule=Adagrad(row_wise=True), **given)


def fill(table: Table, begin: int, end: int) -> None:
    grads = np.ones((BATCH, table.dim), np.float32)
    for first in range(begin, end, BATCH):
        ids = named(np.arange(first, min(first + BATCH, end)))
        table.push(ids, grads[: len(ids)])


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Millions of rows a second; a batch's ids are made unique first, as a worker does.

    The yardstick is numpy reading rows of a plain array whose places are known.
    """
    table, rng = Table(table_of(options.dim)), np.random.default_rng(0)
    making = processor_seconds(lambda: fill(table, 0, options.ids))
    work = {
        "uniform": rng.integers(0, options.ids, 20 * BATCH),
        "zipf 1.1": zipf(rng, 20 * BATCH, options.ids),
    }
    batches = {name: [dedupe(part)[0] for part in np.split(named(numbers), 20)] for name, numbers in work.items()}
    places = {name: np.split(numbers, 20) for name, numbers in work.items()}
    grads = rng.standard_normal((BATCH, options.dim)).astype(np.float32)
    array = np.ones((options.ids, options.dim), np.float32)
    figures: dict[str, list[float]] = {}
    for turn in range(options.rounds + 1):
        for name, parts in batches.items():
            rows = sum(map(len, parts))
            pulled = processor_seconds(lambda parts=parts: [table.pull(ids) for ids in parts])  # type: ignore[misc]
            pushed = processor_seconds(
                lambda parts=parts: [table.push(ids, grads[: len(ids)]) for ids in parts]  # type: ignore[misc]
            )
            taken = processor_seconds(lambda name=name: [array[part] for part in places[name]])  # type: ignore[misc]
            if turn:  # the first round warms up
                figures.setdefault(f"numpy's array[places] {name}", []).append(20 * BATCH / taken / 1e6)
                figures.setdefault(f"pull {name}", []).append(rows / pulled / 1e6)
                figures.setdefault(f"push {name}", []).append(rows / pushed / 1e6)
    medians = {
        f"{name}, M rows/s (median, best)": [round(statistics.median(values), 1), round(max(values), 1)]
        for name, values in figures.items()
    }
    made = {"create, M rows/s": round(options.ids / making / 1e6, 1), "bytes per id": bytes_per_id(table)}
    return {"rows": len(table), **medians, **made}


def bytes_per_id(table: Table) -> float:
    return round(table.memory() / len(table), 1)


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes per id while a table grows, by its own account; and resident memory at the end."""
    fill(Table(table_of(options.dim)), 0, 1000)  # so that the kernels are loaded
    before = resident()
    table = Table(table_of(options.dim))
    worst, at, size = 0.0, 0, 0
    while size < options.ids:
        more = min(max(size // 40, 20_000), options.ids - size)
        fill(table, size, size + more)
        size += more
        if size >= 100_000 and bytes_per_id(table) > worst:
            worst, at = bytes_per_id(table), size
    taken = (resident() - before) / size
    return {"most bytes per id": worst, "at ids": at, "at the end": bytes_per_id(table), "resident": round(taken, 1)}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def batch(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds for a worker's batch of zipf ids."""
    rng = np.random.default_rng(1)
    ids = named(zipf(rng, CLICKS, options.ids))
    unique, inverse = dedupe(ids)
    rows = rng.standard_normal((len(unique), options.dim)).astype(np.float32)
    grads = rng.standard_normal((len(ids), options.dim)).astype(np.float32)
    contenders: dict[str, Callable[[], object]] = {
        "dedupe": lambda: dedupe(ids),
        "np.unique": lambda: np.unique(ids, return_inverse=True),
        "partition to 4": lambda: partition(unique, 4),
        "expand": lambda: expand(rows, inverse),
        "add_rows": lambda: add_rows(grads, inverse, len(unique)),
        "merge of 4": lambda: merge([unique] * 4, [rows] * 4, [1.0] * 4),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(40 * options.rounds):
        for name, action in contenders.items():
            begin = time.perf_counter()
            action()
            if turn:
                times[name].append((time.perf_counter() - begin) * 1e6)
    medians = {f"{name}, us": round(statistics.median(taken), 1) for name, taken in times.items()}
    return {"ids": len(ids), "different": len(unique), **medians}


START = """
import time
begin = time.perf_counter()
import numpy as np
from echelon.strategy.sparse_update_rules import Adagrad
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import Table, add_rows, dedupe, expand, merge, partition
imported = time.perf_counter() - begin
begin = time.perf_counter()
table = Table(TableSpec(name="t", dim=16, rule=Adagrad(row_wise=True)))
ids, inverse = dedupe(np.arange(100))
table.push(ids, expand(add_rows(np.ones((100, 16), np.float32), inverse, 100), inverse))
merge([ids], [table.pull(ids)], [1.0])
partition(ids, 2)
table.put_rows(0, table.rows_of(0))
table.mark_clean(0)
print(imported, time.perf_counter() - begin)
"""


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a process has used every kernel it needs: compiled for the first time, and kept on disk."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as kept:
        for name in ("first", "again", "again"):
            environment = {**os.environ, "NUMBA_CACHE_DIR": kept, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True
            )
            imported, used = map(float, done.stdout.split())
            figures |= {f"{name}: import, s": round(imported, 2), f"{name}: kernels, s": round(used, 2)}
    return figures


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """100M ids on disk: made, all pushed once more in another order, and pulled."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        table = Table(table_of(options.dim, disk=True), directory=Path(directory))
        begin = time.perf_counter()
        fill(table, 0, options.scale_ids)
        made = time.perf_counter() - begin
        trained = scattered(table, options.scale_ids)
        begin = time.perf_counter()
        chosen = np.random.default_rng(0).integers(0, options.scale_ids, (20, BATCH))
        for numbers in chosen:
            table.pull(named(numbers))
        pulled = time.perf_counter() - begin
        return {
            "rows": len(table),
            "create, s": round(made, 1),
            "second push in another order, s": round(trained, 1),
            "pull at random, M rows/s": round(chosen.size / pulled / 1e6, 1),
            "bytes per id": bytes_per_id(table),
            "index, GB": round(table.index_bytes() / 1e9, 2),
            "records on disk, GB": round((table.memory() - table.index_bytes()) / 1e9, 2),
            "most resident, GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        }


def scattered(table: Table, ids: int) -> float:
    """Push every id once, in strides so that neighbours in a batch lie far apart."""
    grads = np.ones((BATCH, table.dim), np.float32)
    stride = -(-ids // BATCH)
    begin = time.perf_counter()
    for first in range(stride):
        numbers = np.arange(first, ids, stride)
        table.push(named(numbers), grads[: len(numbers)])
    return time.perf_counter() - begin


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "speed": speed, "memory": memory, "batch": batch, "start": start, "scale": scale,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="part")
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--scale-ids", type=int, default=100_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"ids": options.ids, "dim": options.dim, "rule": "row-wise Adagrad"}
    for name in options.parts or [part for part in PARTS if part != "scale"]:
        load = round(os.getloadavg()[0], 1)
        results[name] = {**PARTS[name](options), "load before and after": [load, round(os.getloadavg()[0], 1)]}
        print(name)
        for what, value in results[name].items():
            print(f"    {what:52} {value}")
    print(json.dumps(results))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
