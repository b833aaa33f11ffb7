"""Cost of a request to a parameter server: p50 and p99 of the round trip, and processor time on both sides.

    python benchmarks/parameter_server/round_trip.py [--ids 7000] [--dim 16] [--dense 142500] [--asks 1000]
           [--bare] [--out results.json]

One server process, one worker, loopback. "pull" asks for the rows of the ids, "push" sends their gradients and those of
a dense network, "empty" carries nothing: what the transport alone takes. ``--bare`` answers without tables: the same
messages, no work. Also: seconds from the start of a server process until it answers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.base.security import OPEN, Security
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.job_spec import DenseBlock, DenseRule, JobSpec, PersistenceSettings, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.server_port import ServerPort
from echelon.strategy.sparse_update_rules import Adagrad

ENDPOINT = "127.0.0.1:18765"


def main() -> None:
    options = arguments()
    if options.answer:
        answer_only(options)
    with tempfile.TemporaryDirectory() as state:
        began = time.perf_counter()
        server = start(options, state)
        security = OPEN if options.bare else Security.from_environment().for_loopback([ENDPOINT])
        link = ServerChannel(ENDPOINT, security=security, timeout=60)
        link.call(WireMessage({"op": "stats", "worker": -1}))
        results: dict[str, Any] = {"start_s": time.perf_counter() - began, "load": os.getloadavg()[0]}
        if not options.bare:
            open_job(link, options)
        for name, ask in questions(link, options).items():
            results[name] = measure(ask, options.asks, server.pid)
            print(f"{name:8} " + "  ".join(f"{key} {value:7.0f}" for key, value in results[name].items()), flush=True)
        print(f"start {results['start_s']:.2f} s, load {results['load']:.1f}")
        link.close()
        server.kill()
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


def start(options: argparse.Namespace, state: str) -> subprocess.Popen[bytes]:
    if options.bare:
        return subprocess.Popen([sys.executable, *sys.argv, "--answer"])
    address = ["--pservers", ENDPOINT, "--endpoint", ENDPOINT, "--trainers", "1", "--state", state]
    return subprocess.Popen(
        [sys.executable, "-m", "echelon.parameter_server.server.process", *address], stdout=subprocess.DEVNULL
    )


def answer_only(options: argparse.Namespace) -> None:
    rows = np.ones(options.ids * options.dim, np.float32)

    def handle(frame: WireMessage, gone: Callable[[], bool]) -> WireMessage:
        return WireMessage({"ok": True, "version": 0}, [rows] if frame.head["op"] == "pull" else [])

    server = ServerPort(ENDPOINT, handle)
    while server:
        time.sleep(60)


def open_job(link: ServerChannel, options: argparse.Namespace) -> None:
    block = DenseBlock(parameter="w", offset=0, length=options.dense, shape=(options.dense,), server=0)
    job = JobSpec(
        session="bench",
        mode="async",
        trainers=1,
        servers=1,
        tables=(TableSpec(name="t", dim=options.dim, rule=Adagrad(lr=0.01, row_wise=True)),),
        blocks=(block,),
        dense=DenseRule(kind="SGD", groups=({"lr": 0.01},)),
        keeping=PersistenceSettings(journal=options.journal),
    )
    link.call(WireMessage({"op": "open", "worker": 0, "job": job.to_json()}))
    link.call(WireMessage({"op": "begin", "worker": 0}, [np.zeros(options.dense, np.float32)]))


def questions(link: ServerChannel, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    ids = rng.choice(2**40, options.ids, replace=False)
    rows = rng.standard_normal(options.ids * options.dim).astype(np.float32)
    dense = rng.standard_normal(options.dense).astype(np.float32)
    tables, seq = {"t": options.ids}, iter(range(10**9))
    pull = {"op": "pull", "worker": 0, "step": 0, "tables": tables, "dense": False, "commit": None, "peek": True}
    push = {"op": "push", "worker": 0, "weight": 1.0, "version": 0, "tables": tables, "lrs": {}, "groups": []}
    push |= {"dense": True, "values": False, "commit": True, "kind": "gradient", "has": ["ids", "rows", "dense"]}
    return {
        "empty": lambda: link.call(WireMessage({"op": "beat", "worker": 0})),
        "pull": lambda: link.call(WireMessage({**pull, "state": False}, [ids])),
        "push": lambda: link.call(WireMessage({**push, "seq": next(seq)}, [ids, rows, dense])),
    }


def measure(ask: Callable[[], object], count: int, server: int) -> dict[str, float]:
    """Microseconds."""
    for _ in range(20):
        ask()
    took = []
    ours, theirs = time.process_time(), cpu_of(server)
    for _ in range(count):
        began = time.perf_counter()
        ask()
        took.append(time.perf_counter() - began)
    ours, theirs = time.process_time() - ours, cpu_of(server) - theirs
    cuts = statistics.quantiles(took, n=100)
    figures = {"p50": cuts[49], "p99": cuts[98], "best": min(took), "worker": ours / count, "server": theirs / count}
    return {name: value * 1e6 for name, value in figures.items()}


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ids", 7000), ("dim", 16), ("dense", 142_500), ("asks", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("bare", "journal", "answer"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
