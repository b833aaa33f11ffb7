"""Echelon beside torch DDP on two Gloo ranks, and beside a hand-written loop in one process.

    python benchmarks/data_parallel/data_parallel.py [--rounds 12] [--steps 4] [--out results.json]

Both contenders live in the same processes and take turns, a few steps each, so that whatever else the machine does
hits both. The figure is the median over rounds of the ratio within a round; above 1 Echelon is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import echelon
from benchmarks.support.workloads import WORKLOADS, Workload

Step = Callable[[torch.Tensor, torch.Tensor], object]


def hand_written(work: Workload, ddp: bool) -> Step:
    """A loop without a framework; with ``ddp``, torch's own data parallelism around the model."""
    torch.manual_seed(0)
    model = work.model()
    trained = DistributedDataParallel(model) if ddp else model
    optimizer = work.optimizer(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> object:
        loss = work.loss(trained(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def ours(work: Workload, sync_batch_norm: bool) -> Step:
    torch.manual_seed(0)
    model = work.model()
    engine = echelon.distribute(
        model,
        loss=work.loss,
        optimizer=work.optimizer(model),
        strategy=echelon.Strategy(sync_batch_norm=sync_batch_norm),
        log=echelon.Log(console=False),
    )
    return engine.step


def measure(contenders: dict[str, Step], work: Workload, rounds: int, steps: int) -> dict[str, list[float]]:
    """Examples a second of every contender in every round, this process's share."""
    data = work.batches(echelon.rank())
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            echelon.barrier()
            begin = time.perf_counter()
            for i in range(steps):
                contenders[name](*data[i % len(data)])
            echelon.barrier()
            if turn:  # the first round warms up
                speeds[name].append(work.batch * steps / (time.perf_counter() - begin))
    return speeds


def worker(name: str, rounds: int, steps: int) -> None:
    work = WORKLOADS[name]
    echelon.init()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    many = echelon.world_size() > 1
    contenders = {"reference": hand_written(work, ddp=many), "echelon": ours(work, sync_batch_norm=False)}
    if many and name == "resnet18":
        contenders["echelon, exact batch norm"] = ours(work, sync_batch_norm=True)
    speeds = measure(contenders, work, rounds, steps)
    if echelon.is_first_worker():
        ranks = echelon.world_size()
        for contender, values in speeds.items():
            ratios = [a / b for a, b in zip(values, speeds["reference"], strict=True)]
            result = {
                "workload": name,
                "ranks": ranks,
                "contender": contender if contender != "reference" else ("torch DDP" if many else "hand-written loop"),
                "examples_per_s": round(ranks * statistics.median(values), 1),
                "ratio": round(statistics.median(ratios), 4),
                "spread": [round(value, 3) for value in sorted(ratios)[:: max(1, len(ratios) - 1)]],
            }
            print("RESULT " + json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=list(WORKLOADS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.rounds, args.steps)
        return
    results = []
    for name in [args.only] if args.only else list(WORKLOADS):
        for ranks in (1, 2):
            results += _job(name, ranks, args.rounds, args.steps)
    print(f"{'workload':12} {'ranks':>5}  {'contender':26} {'examples/s':>10}  {'ratio':>6}")
    for r in results:
        print(f"{r['workload']:12} {r['ranks']:5}  {r['contender']:26} {r['examples_per_s']:10,.1f}  {r['ratio']:6.3f}")
    print(json.dumps(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


def _job(name: str, ranks: int, rounds: int, steps: int) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "echelon", "run", "--procs", str(ranks), "--log-dir", "log/bench", __file__]
    command += ["--worker", name, "--rounds", str(rounds), "--steps", str(steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT ")]
    if output.returncode or not lines:
        sys.exit(f"{name} on {ranks} ranks failed:\n{output.stdout}\n{output.stderr}")
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


if __name__ == "__main__":
    main()
