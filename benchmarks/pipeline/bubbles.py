"""Bubbles of a pipeline, measured and compared with theory: stages that sleep, messages that are real.

    python benchmarks/pipeline/bubbles.py [--ranks 2 4 8] [--micro-batches 8] [--rounds 3] [--out results.json]

A stage sleeps for 150 ms forward and 300 ms backward (150 and 150 in two parts), in two halves where two stages share
a rank, and sends 64 KB to the next one over Gloo. The bubble is the time from the first action's begin to the last's
end, less the time the busiest rank was in its stages. Schedules take turns, round by round; figures are medians over
rounds. As root, workers run before everything else on the machine, so that a sleeper is woken when it is due.
Theory, for p ranks: (p - 1)(f + b), interleaved in v stages a rank (p - 1)(f + b) / v, zero-bubble (p - 1)(f + i - w).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

import echelon
from benchmarks.support.job import job
from echelon.distributed.collectives import all_gather
from echelon.parallel.pipeline.schedule_loop import Part, StageTransfer, run_schedule
from echelon.parallel.pipeline.transport import PipelineLinks
from echelon.plan.schedule import Kind, Schedule, make_schedule
from echelon.plan.simulate import simulate
from echelon.strategy.annotations.marks import ScheduleName

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
KINDS: tuple[Kind, ...] = get_args(Kind)
SECONDS: dict[Kind, float] = {"F": 0.150, "B": 0.300, "I": 0.150, "W": 0.150}  # of all of a rank's stages together
CHUNKS = 2  # stages a rank, interleaved
NUMBERS = 16384  # of a message

Durations = dict[tuple[Kind, int], float]  #: seconds of an action of (kind, stage)


class Sleeper:
    """A runner whose stages take time and nothing else."""

    def __init__(self, durations: Durations, numbers: int = NUMBERS) -> None:
        self._durations = durations
        self._made = torch.zeros(numbers, requires_grad=True)
        self.begin, self.busy = 0.0, 0.0

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        self._sleep("F", stage)
        return {str(stage): self._made}

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: Part
    ) -> Mapping[str, Tensor | None]:
        self._sleep(part, stage)
        return {str(stage - 1): self._made.detach()} if stage and part != "W" else {}

    def _sleep(self, kind: Kind, stage: int) -> None:
        begin = time.perf_counter()
        self.begin = self.begin or begin
        time.sleep(self._durations[kind, stage])
        self.busy += time.perf_counter() - begin


def chunks_of(name: ScheduleName) -> int:
    return CHUNKS if name == "interleaved" else 1


def even(name: ScheduleName, ranks: int) -> Durations:
    chunks = chunks_of(name)
    return {(kind, stage): SECONDS[kind] / chunks for kind in KINDS for stage in range(ranks * chunks)}


def measure(
    schedule: Schedule, durations: Durations, links: PipelineLinks, numbers: int = NUMBERS
) -> tuple[float, float]:
    """Makespan and bubble of one step, in seconds; the clock is the same for all processes of a machine."""
    runner = Sleeper(durations, numbers)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    transfers = [StageTransfer(str(stage), stage, stage + 1) for stage in range(stages - 1)]
    echelon.barrier()
    run_schedule(schedule, runner, transfers, links, f"always {numbers} numbers")
    mine = torch.tensor([runner.begin, time.perf_counter(), runner.busy], dtype=torch.float64)
    begins, ends, busy = all_gather(mine).unbind(1)
    makespan = float(ends.max() - begins.min())
    return makespan, makespan - float(busy.max())


def theory(name: ScheduleName, ranks: int) -> float:
    whole, weights = SECONDS["F"] + SECONDS["B"], SECONDS["W"]
    one = {"interleaved": whole / CHUNKS, "zero-bubble": whole - 2 * weights}.get(name, whole)
    return (ranks - 1) * one


def scheduled(name: ScheduleName, ranks: int, micros: int) -> Schedule:
    return make_schedule(name, ranks * chunks_of(name), ranks, micros)


def first_in_line() -> None:
    """This process before all others of the machine, where that may be; before it has threads, which take after it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20")  # sessions are weighed against each other first


def links_of_all() -> PipelineLinks:
    return PipelineLinks(dist.new_group(backend="gloo"), range(echelon.world_size()), torch.device("cpu"), "gloo")


def worker(micros: int, rounds: int) -> None:
    first_in_line()
    echelon.init()
    torch.set_num_threads(1)
    ranks, links = echelon.world_size(), links_of_all()
    found: dict[ScheduleName, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for turn in range(rounds + 1):
        for name in NAMES:
            measured = measure(scheduled(name, ranks, micros), even(name, ranks), links)
            if turn:  # the first round announces shapes
                found[name].append(measured)
    if echelon.is_first_worker():
        for name, values in found.items():
            print("RESULT " + json.dumps(row(name, ranks, micros, values, found["1f1b"])), flush=True)
    echelon.barrier()


def row(
    name: ScheduleName, ranks: int, micros: int, values: list[tuple[float, float]], plain: list[tuple[float, float]]
) -> dict[str, object]:
    makespan, bubble = (statistics.median(column) for column in zip(*values, strict=True))
    ratios = [mine[1] / other[1] for mine, other in zip(values, plain, strict=True)]
    wanted = theory(name, ranks)
    simulated = simulate(scheduled(name, ranks, micros), even(name, ranks)).makespan
    return {
        "schedule": name,
        "ranks": ranks,
        "micro_batches": micros,
        "step_ms": round(makespan * 1e3, 1),
        "simulated_step_ms": round(simulated * 1e3, 1),
        "bubble_ms": round(bubble * 1e3, 1),
        "theory_ms": round(wanted * 1e3, 1),
        "off": round(bubble / wanted - 1, 4),
        "of_1f1b": round(statistics.median(ratios), 3),
        "theory_of_1f1b": round(wanted / theory("1f1b", ranks), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.micro_batches, args.rounds)
        return
    options = ["--micro-batches", str(args.micro_batches), "--rounds", str(args.rounds)]
    results = [result for ranks in args.ranks for result in job(__file__, ranks, options)]
    print(f"{'schedule':12} {'ranks':>5} {'step ms':>8} {'bubble ms':>9} {'theory':>7} {'off':>6}  of 1f1b's (theory)")
    for r in results:
        print(
            f"{r['schedule']:12} {r['ranks']:5} {r['step_ms']:8.1f} {r['bubble_ms']:9.1f} {r['theory_ms']:7.1f} "
            f"{r['off']:+6.1%}  {r['of_1f1b']:.3f} ({r['theory_of_1f1b']:.3f})"
        )
    told = {"cores": os.cpu_count(), "torch": torch.__version__, "seconds": SECONDS, "results": results}
    print(json.dumps(told))
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
