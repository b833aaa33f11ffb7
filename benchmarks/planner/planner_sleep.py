"""The planner's simulation beside the runtime's own pipeline loop: stages that sleep, messages that are real.

    python benchmarks/planner/planner_sleep.py [--ranks 2 4 8] [--micro-batches 8] [--rounds 3] [--message-kb 64]
         [--shapes even uneven drawn] [--out results.json]

A rank's stages sleep for 30 ms forward and 60 ms backward together, even ones equally long, uneven ones by turns 1 and
1.5 times that, drawn ones 0.5 to 1.5 times with a backward of 1.5 to 2.5 forwards. What the simulation is told besides
are figures measured once, with two ranks, and not for each case: what an action costs beyond its sleep, and what its
messages cost and how long they take. Cases take turns, round by round; a figure is the median of its
rounds. As root, workers run before everything else on the machine, so that a sleeper is woken when it is due.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch

import echelon
from benchmarks.pipeline.bubbles import (
    KINDS,
    NAMES,
    Durations,
    chunks_of,
    first_in_line,
    links_of_all,
    measure,
    scheduled,
)
from benchmarks.support.job import job
from echelon.plan.schedule import Kind
from echelon.plan.simulate import simulate
from echelon.strategy.annotations.marks import ScheduleName

FORWARD = 0.030  # seconds, of all of a rank's stages together
SHAPES = ("even", "uneven", "drawn")
BOUND = 0.05  # how far the simulation may be off


class Costs(NamedTuple):
    """Seconds, measured once.

    action:   beyond its sleep
    handling: packing what is sent or unpacking what has come, which an action does for each of its messages
    message:  from there on until the other end has it, while both may do something else
    """

    action: float = 0.0
    handling: float = 0.0
    message: float = 0.0


def durations(shape: str, name: ScheduleName, ranks: int) -> Durations:
    """Seconds of each action; a backward in two parts takes as long as in one."""
    draw = random.Random(ranks)
    found: Durations = {}
    for stage in range(ranks * chunks_of(name)):
        times = {"even": 1.0, "uneven": 1.0 + 0.5 * (stage % 2), "drawn": draw.uniform(0.5, 1.5)}[shape]
        backward = draw.uniform(1.5, 2.5) if shape == "drawn" else 2.0
        forward = FORWARD / chunks_of(name) * times
        parts = {"F": 1.0, "B": backward, "I": backward / 2, "W": backward / 2}
        found |= {(kind, stage): forward * parts[kind] for kind in KINDS}
    return found


def simulated(shape: str, name: ScheduleName, ranks: int, micros: int, costs: Costs) -> float:
    stages = ranks * chunks_of(name)
    seconds = {
        (kind, stage): asleep + costs.action + messages(kind, stage, stages) * costs.handling
        for (kind, stage), asleep in durations(shape, name, ranks).items()
    }
    edges = {(stage, stage + 1): costs.message for stage in range(stages - 1)}
    return simulate(scheduled(name, ranks, micros), seconds, edges).makespan


def messages(kind: Kind, stage: int, stages: int) -> int:
    """Count the messages of an action: a forward and its backward have as many, the weights' part none."""
    return 0 if kind == "W" else (stage > 0) + (stage < stages - 1)


# ---- in the job ----


def worker(args: argparse.Namespace) -> None:
    first_in_line()
    echelon.init()
    torch.set_num_threads(1)
    ranks, links = echelon.world_size(), links_of_all()
    names = NAMES if args.shapes else ("gpipe",)
    cases = [(shape, name) for shape in args.shapes or ("even",) for name in names]
    found: dict[tuple[str, ScheduleName], list[float]] = {case: [] for case in cases}
    for turn in range(args.rounds + 1):
        for shape, name in cases:
            schedule = scheduled(name, ranks, args.micro_batches)
            makespan, _ = measure(schedule, durations(shape, name, ranks), links, args.message_kb * 256)
            if turn:  # the first round announces shapes
                found[shape, name].append(makespan)
    if echelon.is_first_worker():
        for (shape, name), seconds in found.items():
            row = {"ranks": ranks, "schedule": name, "shape": shape, "seconds": seconds}
            print("RESULT " + json.dumps(row), flush=True)
    echelon.barrier()


# ---- outside of it ----


def measured_once(kilobytes: int) -> Costs:
    """From two ranks. With one micro-batch 4 actions and 2 messages follow each other, each more adds 2 actions with a
    message each, whose handling is what they take longer than with messages of 1 KB."""

    def beyond_sleep(micros: int, size: int) -> float:
        options = ["--micro-batches", str(micros), "--rounds", "6", "--message-kb", str(size), "--shapes"]
        (row,) = job(__file__, 2, options)
        return float(statistics.median(row["seconds"])) - simulated("even", "gpipe", 2, micros, Costs())

    def each_action(size: int) -> tuple[float, float]:
        few, many = beyond_sleep(1, size), beyond_sleep(11, size)
        one = max(0.0, (many - few) / 20)
        return one, max(0.0, (few - 4 * one) / 2)

    action, _ = each_action(1)
    with_message, message = each_action(kilobytes)
    return Costs(action, max(0.0, with_message - action), message)


def judged(row: dict[str, Any], micros: int, costs: Costs) -> dict[str, Any]:
    case = (row["shape"], row["schedule"], row["ranks"], micros)
    seconds, plainly = statistics.median(row.pop("seconds")), simulated(*case, Costs())
    foretold = simulated(*case, costs)
    return row | {
        "measured_ms": round(1e3 * seconds, 2),
        "simulated_ms": round(1e3 * foretold, 2),
        "off": round(foretold / seconds - 1, 4),
        "off_without_costs": round(plainly / seconds - 1, 4),
    }


def show(results: list[dict[str, Any]], costs: Costs) -> None:
    words = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in costs._asdict().items())
    print(f"measured once: {words}")
    print(
        f"{'ranks':>5} {'schedule':12} {'stages':8} {'measured ms':>11} {'simulated':>10} {'off':>6}  (without costs)"
    )
    for r in results:
        print(
            f"{r['ranks']:5} {r['schedule']:12} {r['shape']:8} {r['measured_ms']:11.1f} {r['simulated_ms']:10.1f} "
            f"{r['off']:+6.1%}  ({r['off_without_costs']:+.1%})"
        )
    worst = max(results, key=lambda r: abs(r["off"]))
    within = sum(abs(r["off"]) <= BOUND for r in results)
    mean = statistics.mean(abs(r["off"]) for r in results)
    print(f"{within} of {len(results)} within {BOUND:.0%}; mean error {mean:.2%}, largest {worst['off']:+.2%}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--message-kb", type=int, default=64)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.worker:
        worker(args)
        return
    costs = measured_once(args.message_kb)
    options = ["--micro-batches", str(args.micro_batches), "--rounds", str(args.rounds)]
    options += ["--message-kb", str(args.message_kb), "--shapes", *args.shapes]
    rows = [row for ranks in args.ranks for row in job(__file__, ranks, options)]
    results = [judged(row, args.micro_batches, costs) for row in rows]
    show(results, costs)
    told = {"cores": os.cpu_count(), "torch": torch.__version__, "micro_batches": args.micro_batches}
    told |= {"message_kb": args.message_kb, "costs_ms": {k: round(1e3 * v, 3) for k, v in costs._asdict().items()}}
    print(json.dumps(told | {"results": results}))
    if args.out:
        args.out.write_text(json.dumps(told | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
