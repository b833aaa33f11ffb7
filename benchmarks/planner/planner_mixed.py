"""Devices of different speed: shares of the batch as the planner chooses them beside even ones, with equal weights.

    python benchmarks/planner/planner_mixed.py [--crews 1+1 1+3 2+2 3+1] [--slower 2] [--rounds 5] [--steps 3]
           [--out FILE]

3+1 are three quick ranks and one that is ``--slower`` times as slow. A rank of such a speed is a process that sleeps
after every unit of the model, forward and backward, until the device that it stands for would be done: arithmetic of
that unit for so many samples over FLOP/s. That is what the planner is told too; what it chooses is run. Messages are
real (Gloo on this machine). Both ways take turns within a round; a ratio is that of one round, figures are medians over
rounds. After the last round all weights are compared with those of one process on the same global batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from benchmarks.planner.planner_models import OPTIMIZER, Batch, Task, part_of, row_counts
from benchmarks.support.job import job
from echelon.plan.draft import Draft
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.plan_search.search import search
from echelon.planner.profiling.profile import Profile, profile

QUICK = 4e8  # FLOP/s of a quick rank: few enough for a core to have time to spare, with four ranks on two of them
WIDTH, LAYERS, ROWS = 256, 8, 96
WANTED = 1.2
TOLERANCE = 1e-4  # of weights, in parts of their way: sums over samples have another order


def perceptron() -> nn.Module:
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def _numbers(rows: int, draw: torch.Generator) -> Batch:
    return torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, WIDTH, generator=draw)


TASK = Task(perceptron, F.mse_loss, _numbers, ROWS, lr=0.3)


# ---- a device of some speed ----


class Pace:
    """Makes this process as slow as a device of ``flops`` a second."""

    def __init__(self, flops: float) -> None:
        self._flops = flops
        self._begin = 0.0

    def keep(self, module: nn.Module, forward: float, backward: float) -> None:
        """``forward`` and ``backward``: multiplications and additions for one sample."""

        def enter(*_: Any) -> None:
            self._begin = time.perf_counter()

        def leave_forward(module: nn.Module, args: Any, output: Tensor) -> None:
            self._wait(forward * len(output))

        def leave_backward(module: nn.Module, inner: Any, outer: tuple[Tensor, ...]) -> None:
            self._wait(backward * len(outer[0]))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave_forward)
        module.register_full_backward_pre_hook(enter)
        module.register_full_backward_hook(leave_backward)

    def _wait(self, work: float) -> None:
        time.sleep(max(0.0, self._begin + work / self._flops - time.perf_counter()))


def paced(model: nn.Module, found: Profile, flops: float) -> nn.Module:
    pace = Pace(flops)
    sheet = found.sheet(2)
    for name, unit in zip(found.names, sheet.units, strict=True):
        module = model.get_submodule(name)
        pace.keep(module, unit.forward.flops / sheet.samples, unit.backward.flops / sheet.samples)
    return model


def machines(quick: int, slow: int, slower: float) -> Cluster:
    """Both kinds of devices, in hosts of their own; nothing but arithmetic takes them time."""
    link = Link("this machine", 1e9, 1e-4, origin="given")
    kinds = [("quick", QUICK, quick), ("slow", QUICK / slower, slow)]
    return Cluster(tuple((1, Host((_device(name, peak),) * count, link)) for name, peak, count in kinds if count), link)


def _device(name: str, peak: float) -> Device:
    whole = ((1.0, 1.0), (1e12, 1.0))
    return Device(name, {"float32": peak}, 1e10, 1e11, 0.0, 0.0, products=whole, streams=whole, origin="given")


# ---- the two ways ----


def even(cluster: Cluster) -> Draft:
    return Draft(batch=ROWS, replicate=cluster.size)


def aware(found: Profile, cluster: Cluster) -> Draft:
    """Return the planner's choice with a whole replica on every rank: only shares differ."""
    fixed = {"replicate": cluster.size, "stage": 1, "split": 1, "shard": 0}
    return search(found, cluster, batch=ROWS, optimizer=OPTIMIZER, fixed=fixed).best[0].draft


def engine_for(draft: Draft, found: Profile, flops: float) -> tuple[Any, Any]:
    """And this rank's rows of one global batch after another."""
    model, optimizer = TASK.start()
    saved = make_saved_plan(draft, found, model=model)
    log = echelon.Log(console=False)
    paced(model, found, flops)
    engine = echelon.distribute(model, loss=TASK.loss, optimizer=optimizer, plan=saved, log=log)
    counts, rank = row_counts(ROWS, draft.shares, draft.replicate), echelon.rank()
    place = draft.order.index(rank) if draft.order else rank
    return engine, (part_of(batch, counts, place) for batch in TASK.batches())


def worker(args: argparse.Namespace) -> None:
    echelon.init()
    torch.set_num_threads(1)
    (quick, slow), rank = args.crews[0], echelon.rank()
    model, _ = TASK.start()
    found = profile(model, TASK.sample(), loss=TASK.loss, name="perceptron")
    cluster = machines(quick, slow, args.slower)
    flops = [device.peak["float32"] for device in cluster.devices()][rank]
    drafts = {"even": even(cluster), "aware": aware(found, cluster)}
    ways = {name: engine_for(draft, found, flops) for name, draft in drafts.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name in sorted(ways, reverse=bool(turn % 2)):
            step = _turn(*ways[name], args.steps)
            if turn:  # the first round allocates and connects
                seconds[name].append(step)
    states = {name: engine.whole_state() for name, (engine, _) in ways.items()}
    if echelon.is_first_worker():
        alone = _alone((args.rounds + 1) * args.steps)
        row = {
            "seconds": seconds,
            "shares": row_counts(ROWS, drafts["aware"].shares, cluster.size),
            "plan": str(drafts["aware"]),
            "weights_differ_by": {name: _difference(state, alone) for name, state in states.items()},
        }
        print("RESULT " + json.dumps(row), flush=True)
    echelon.barrier()


def _turn(engine: Any, batches: Any, steps: int) -> float:
    echelon.barrier()
    begin = time.perf_counter()
    for batch in itertools.islice(batches, steps):
        engine.step(*batch)
    echelon.barrier()
    return (time.perf_counter() - begin) / steps


def _alone(steps: int) -> dict[str, Tensor]:
    """One process on whole batches, at full speed."""
    model, optimizer = TASK.start()
    for x, y in itertools.islice(TASK.batches(), steps):
        optimizer.zero_grad()
        TASK.loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def _difference(state: dict[str, Tensor], alone: dict[str, Tensor]) -> float:
    """Return the largest difference of any weight, relative to the largest change of a weight."""
    start = TASK.start()[0].state_dict()
    moved = max(float((alone[name] - value).abs().max()) for name, value in start.items())
    return max(float((state[name] - value).abs().max()) for name, value in alone.items()) / moved


# ---- outside of the job ----


def judged(crew: tuple[int, int], slower: float, row: dict[str, Any]) -> dict[str, Any]:
    seconds = row["seconds"]
    ratios = [a / b for a, b in zip(seconds["even"], seconds["aware"], strict=True)]
    quick, slow = crew
    ideal = (quick + slow / slower) / (quick + slow) * slower  # by arithmetic alone
    return {
        "crew": f"{quick}+{slow}",
        "slower": slower,
        "plan": row["plan"],
        "shares": row["shares"],
        "even_per_s": round(ROWS / statistics.median(seconds["even"]), 1),
        "aware_per_s": round(ROWS / statistics.median(seconds["aware"]), 1),
        "times": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "ideal": round(ideal, 3),
        "weights_differ_by": row["weights_differ_by"],
    }


def _crew(text: str) -> tuple[int, int]:
    quick, slow = map(int, text.split("+"))
    return quick, slow


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crews", nargs="+", type=_crew, default=[(1, 1), (1, 3), (2, 2), (3, 1)])
    parser.add_argument("--slower", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.worker:
        worker(args)
        return
    results = []
    for quick, slow in args.crews:
        options = ["--crews", f"{quick}+{slow}", "--slower", str(args.slower)]
        options += ["--rounds", str(args.rounds), "--steps", str(args.steps)]
        (row,) = job(__file__, quick + slow, options)
        results.append(judged((quick, slow), args.slower, row))
    print(f"{'ranks':6} {'shares':20} {'even/s':>8} {'aware/s':>8} {'times':>6} {'spread':>13} {'ideal':>6}  weights")
    for r in results:
        spread, apart = "{:.2f}-{:.2f}".format(*r["spread"]), max(r["weights_differ_by"].values())
        shares = ",".join(map(str, r["shares"]))
        print(
            f"{r['crew']:6} {shares:20} {r['even_per_s']:8.1f} {r['aware_per_s']:8.1f} {r['times']:6.2f} {spread:>13} "
            f"{r['ideal']:6.2f}  {apart:.1e}"
        )
    reached = sum(r["times"] >= WANTED for r in results)
    print(f"{reached} of {len(results)} at least {WANTED} times as quick as even shares")
    told = {"cores": os.cpu_count(), "torch": torch.__version__, "rows": ROWS, "results": results}
    print(json.dumps(told))
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n")
    if any(max(r["weights_differ_by"].values()) > TOLERANCE for r in results):
        sys.exit("weights are not those of one process")


if __name__ == "__main__":
    main()
