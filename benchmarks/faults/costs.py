"""Costs of surviving faults and strangers: two versions of Echelon in turn on this machine.

    python benchmarks/faults/costs.py --tree before=build/old --tree now=. [--rounds 5] [--out costs.json]

- pull, push: of a worker at one parameter server on loopback, with a journal or without (the tree's round_trip.py)
- store: an operation of the launchers' store through tunnel and gate, with a secret
- step: of two data-parallel ranks under ``echelon run`` with a checkpoint every 10 steps, in-memory snapshots after
  each, the stall watch and a log; and of two workers with two servers, sync, with journals

Each round runs both versions, and every second one in the other order. Figures are microseconds: of each process a time
that one call in twenty stays below (the least for pull and push), and of these the least of all rounds, since what else
the machine does can only add to them.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

STORE_PORT = 18771
TOKEN = b"a secret of the benchmark, 32 long"


def measure_store(asks: int) -> None:
    """Print the time of an operation; a process beside this one serves the store."""
    from torch.distributed import TCPStore

    from echelon.base.auth_proxy import local_store_endpoint, serve_store

    reader, writer = os.pipe()
    if not os.fork():
        store, _ = serve_store("127.0.0.1", STORE_PORT, TOKEN, timedelta(seconds=30))
        os.write(writer, b"1")
        time.sleep(600)
    os.read(reader, 1)
    host, port = local_store_endpoint("127.0.0.1", STORE_PORT, TOKEN)
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    took = []
    for ask in range(asks):
        began = time.perf_counter()
        store.set("key", str(ask))
        store.get("key")
        took.append((time.perf_counter() - began) / 2)
    print("ANSWER", quick(took), flush=True)
    os.killpg(0, 15)


def measure_step(kind: str, steps: int) -> None:
    """Print the time of a step of this rank or worker, a rank of ``echelon run``."""
    import torch
    from torch import nn

    import echelon

    torch.set_num_threads(1)
    echelon.init(seed=1)
    served = kind == "served"
    if served:
        ids = torch.randint(0, 10**6, (64 * steps, 8))
        model: nn.Module = nn.Sequential(echelon.nn.SparseEmbedding(16), nn.Flatten(), nn.Linear(128, 2))
        inputs = ids
    else:
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2))
        inputs = torch.randn(64 * steps, 256)
    engine = echelon.distribute(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        strategy=echelon.Strategy(ps="sync") if served else None,
        checkpoint=None if served else echelon.Checkpoint(dir="ckpt", every=10, keep=2),
        log=echelon.Log(console=False),
    )
    took = []
    for x, y in engine.loader((inputs, torch.randint(2, (64 * steps,))), global_batch=64):
        began = time.perf_counter()
        float(engine.step(x, y))
        took.append(time.perf_counter() - began)
    if echelon.rank() == 0:
        Path("answer").write_text(str(quick(took[20:])))
    engine.close()


def quick(took: list[float]) -> float:
    """Return the microseconds that one time in twenty stays below."""
    return statistics.quantiles(took, n=20)[0] * 1e6


def run(tree: Path, what: str, asked: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one measurement with one version."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:
        if what.startswith("servers"):
            script = tree / "benchmarks/parameter_server/round_trip.py"
            words = [
                script,
                "--asks",
                asked.asks,
                "--out",
                f"{place}/out",
                *(["--journal"] if "journal" in what else []),
            ]
            _call([sys.executable, *words], place, environment)
            found = json.loads(Path(place, "out").read_text())
            return {f"{what}, {ask}": found[ask]["best"] for ask in ("pull", "push")}
        if what == "store":
            said = _call([sys.executable, __file__, "--part", "store", "--asks", asked.asks], place, environment)
            return {what: float(said.split("ANSWER")[1].split()[0])}
        options = ["--servers", 2, "--workers", 2] if what == "served" else ["--procs", 2, "--copies", 1]
        words = ["-m", "echelon", "run", *options, "--log-dir", "log", __file__, "--part", what, "--asks", asked.asks]
        _call([sys.executable, *words], place, environment)
        return {f"step, {what}": float(Path(place, "answer").read_text())}


def _call(words: list[Any], place: str, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        [str(word) for word in words], cwd=place, env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True, timeout=120, check=False,
    )  # fmt: skip
    return ended.stdout


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--tree", action="append", default=[], metavar="NAME=DIR")
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--asks", type=int, default=400)
    ask.add_argument("--whats", nargs="*", default=["servers", "servers, journal", "store", "ranks", "served"])
    ask.add_argument("--out", type=Path)
    ask.add_argument("--part", help=argparse.SUPPRESS)
    asked = ask.parse_args()
    if asked.part:
        measure_store(asked.asks) if asked.part == "store" else measure_step(asked.part, asked.asks)
        return
    trees = {name: Path(where).resolve() for name, _, where in (tree.partition("=") for tree in asked.tree)}
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(asked.rounds):
        for what in asked.whats:
            for name in list(trees)[:: 1 if turn % 2 else -1]:
                for figure, value in run(trees[name], what, asked).items():
                    found.setdefault(figure, {}).setdefault(name, []).append(round(value, 1))
    table: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
    for figure, values in found.items():
        least = {name: min(each) for name, each in values.items()}
        first, last = (least[name] for name in (next(iter(trees)), next(reversed(trees))))
        table[figure] = {**values, "ratio": round(last / first, 3)}
        print(f"{figure:26} {first:9.0f} -> {last:9.0f}  {last / first:.3f}  {values}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
