"""Latency of a read-only server under load: p50 and p99 of lookups, and lookups per second.

    python benchmarks/parameter_server/serving.py [--ids 1000] [--dim 16] [--rows 1000000] [--clients 2]
           [--rate 200] [--seconds 20] [--out results.json]

One process of ``echelon serve --read-only`` holds a table of ``--rows`` rows. Each client is a process that asks for
``--ids`` ids, of which a tenth is unknown to the server. ``--rate``: requests per second of all clients together, at
Poisson times; the latency of a request counts from the time at which it was due, so that a late one is not hidden
(0: a closed loop, in which each client asks again when it has its answer). ``of_the_generator`` is the time from due to
sent: the client was still busy with its last request, or the machine with something else.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.parameter_server.persistence.checkpoint import save_part
from echelon.parameter_server.protocol.job_spec import Initializer, JobSpec, TableSpec
from echelon.parameter_server.servable.servable_head import ServedTable
from echelon.parameter_server.servable.served_rows import RemoteRows, put_weights
from echelon.parameter_server.server.shard import ServerShard
from echelon.strategy.sparse_update_rules import Sgd

ENDPOINT = "127.0.0.1:18766"
WARM_UP = 50


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as place:
        save_table(options, Path(place))
        server = subprocess.Popen(
            [sys.executable, "-m", "echelon", "serve", "--read-only", place, "--endpoint", ENDPOINT],
            stdout=subprocess.DEVNULL,
        )
        try:
            results = measured(options, server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    line = "  ".join(f"{name} {value:,.2f}" for name, value in results.items())
    print(line)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


def save_table(options: argparse.Namespace, place: Path) -> None:
    """Write a checkpoint whose table has the ids from 0 to ``--rows``."""
    table = TableSpec(name="ids", dim=options.dim, rule=Sgd())
    job = JobSpec(session="", mode="async", trainers=1, servers=1, tables=(table,))
    shard = ServerShard(0, 1)
    shard.install(job)
    draw = np.random.default_rng(0)
    for begin in range(0, options.rows, 1 << 18):
        ids = np.arange(begin, min(begin + (1 << 18), options.rows))
        put_weights(shard.tables["ids"], ids, draw.random((len(ids), options.dim), np.float32))
    with shard.lock:
        facts, lsn = list(shard.facts()), shard.lsn
    save_part(lambda: contextlib.nullcontext(shard), place, 0, job, 1, facts, lsn)


def measured(options: argparse.Namespace, server: int) -> dict[str, Any]:
    answers: Any = multiprocessing.get_context("spawn").Queue()
    ready = multiprocessing.get_context("spawn").Barrier(options.clients + 1)
    clients = [
        multiprocessing.get_context("spawn").Process(target=ask, args=(options, number, ready, answers))
        for number in range(options.clients)
    ]
    for client in clients:
        client.start()
    ready.wait()
    used, began = processor_seconds(server), time.perf_counter()
    latencies, delays = np.concatenate([answers.get() for _ in clients], 1)
    seconds = time.perf_counter() - began
    for client in clients:
        client.join()
    p50, p99, p999 = np.percentile(latencies, [50, 99, 99.9]) * 1e3
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "p99.9_ms": p999,
        "most_ms": latencies.max() * 1e3,
        "p99_ms_of_the_generator": np.percentile(delays, 99) * 1e3,
        "p99_ms_from_sending": np.percentile(latencies - delays, 99) * 1e3,
        "requests_per_s": len(latencies) / seconds,
        "server_us_a_request": (processor_seconds(server) - used) / len(latencies) * 1e6,
        "load": os.getloadavg()[0],
    }


def ask(options: argparse.Namespace, number: int, ready: Any, answers: Any) -> None:
    """One client: send ids, wait for rows, note the latency."""
    spec = ServedTable(name="ids", dim=options.dim, seed=0, initializer=Initializer())
    rows = RemoteRows([ENDPOINT], [spec], timeout=60)
    draw = np.random.default_rng(number)
    batches = [np.unique(draw.integers(0, int(options.rows * 1.1), options.ids)) for _ in range(200)]
    for batch in batches[:WARM_UP]:
        rows.pull({"ids": batch})
    gc.collect()
    gc.freeze()  # a collection of this process would count as latency
    ready.wait()
    found: list[tuple[float, float]] = []
    due = time.perf_counter()
    end = due + options.seconds
    while due < end:
        if options.rate:
            due += draw.exponential(options.clients / options.rate)
            time.sleep(max(0.0, due - time.perf_counter()))
        sent = time.perf_counter()
        rows.pull({"ids": batches[len(found) % len(batches)]})
        now = time.perf_counter()
        found.append((now - due, sent - due))
        due = due if options.rate else now
    answers.put(np.array(found).T)
    rows.close()


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
