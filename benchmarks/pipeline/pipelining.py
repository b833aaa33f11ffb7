"""Echelon's pipelines beside torch.distributed.pipelining, on the same cut and schedule: by the clock and in CPU time.

    python benchmarks/pipeline/pipelining.py [--case narrow wide] [--schedule 1f1b] [--ranks 2 4] [--rounds 15]
           [--steps 6] [--out results.json]

Contenders live in the same processes, one thread each, over Gloo on loopback, and take turns within a round: half of
the rounds one begins, half the other. CPU time is that of all threads of all ranks together; it depends little on what
else the machine does. A ratio above 1 is in favour of Echelon: torch's time over Echelon's within a round, the median
over rounds, with its quartiles; and the least of all rounds beside the least. Echelon's step does more: it runs the
user's own forward, where torch is given a module for each stage, and tells every rank the loss. Both train on the same
batches from the same weights, and their losses are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from benchmarks.pipeline.hybrid_models import CASES, Batch, Case, Piece, batches, stages
from benchmarks.support.job import job
from echelon.distributed.collectives import all_gather

SCHEDULES = ("gpipe", "1f1b", "interleaved")
VIRTUAL = 2  # stages on each rank, where they are interleaved
TOLERANCE = 1e-4  # of losses, in parts of themselves

Step = Callable[[Tensor, Tensor], Tensor]


class Turn(NamedTuple):
    """Times of a step on all ranks: seconds by the clock of the slowest, and of CPU together."""

    clock: float
    cpu: float


def cut(case: Case, schedule: str) -> list[list[str]]:
    return stages(case, echelon.world_size() * (VIRTUAL if schedule == "interleaved" else 1))


def ours(case: Case, schedule: Any) -> Step:
    model, optimizer = start(case)
    marks: dict[str, Any] = {name: echelon.stage(at) for at, names in enumerate(cut(case, schedule)) for name in names}
    engine = echelon.distribute(
        echelon.annotate(model, {**marks, "": echelon.pipeline(case.micro_batches, schedule)}),
        loss=case.loss,
        optimizer=optimizer,
        log=echelon.Log(console=False),
    )
    return engine.step


def torchs(case: Case, schedule: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    rank, world = echelon.rank(), echelon.world_size()
    model, _ = start(case)
    names = cut(case, schedule)
    pieces = {at: Piece(model, names[at]) for at in range(rank, len(names), world)}
    optimizer = case.optimizer(nn.ModuleList(pieces.values()))
    mine: list[Any] = [PipelineStage(piece, at, len(names), torch.device("cpu")) for at, piece in pieces.items()]
    if schedule == "interleaved":
        run: Any = ScheduleInterleaved1F1B(mine, case.micro_batches, loss_fn=case.loss)
    else:
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        run = kind(mine[0], case.micro_batches, loss_fn=case.loss)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given, target = [x] if rank == 0 else [], y if rank == world - 1 else None
        run.step(*given, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def start(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.model()
    return model, case.optimizer(model)


class Contender:
    def __init__(self, step: Step, data: Iterator[Batch]) -> None:
        self._step, self._data = step, data
        self.turns: list[Turn] = []
        self.losses: list[float] = []

    def turn(self, steps: int) -> None:
        echelon.barrier()
        cpu, clock = time.process_time(), time.perf_counter()
        losses = [self._step(*next(self._data)) for _ in range(steps)]
        mine = torch.tensor([time.perf_counter() - clock, time.process_time() - cpu], dtype=torch.float64)
        everyones = all_gather(mine) / steps
        self.turns.append(Turn(float(everyones[:, 0].max()), float(everyones[:, 1].sum())))
        self.losses += map(float, losses)


def race(name: str, schedule: str, rounds: int, steps: int) -> dict[str, Any]:
    case = CASES[name]
    makers = {"echelon": ours, "torch": torchs}
    found = {who: Contender(make(case, schedule), batches(case, echelon.world_size())) for who, make in makers.items()}
    for turn, count in enumerate(itertools.chain([3], itertools.repeat(steps, rounds))):
        for who in list(found) if turn % 2 else reversed(found):
            found[who].turn(count)
    mine, other = found["echelon"], found["torch"]
    pairs = zip(mine.losses, other.losses, strict=True)
    apart = max((abs(a - b) / abs(b) for a, b in pairs if b), default=0.0)  # torch tells the last rank alone
    row = {
        "case": name,
        "ranks": echelon.world_size(),
        "schedule": schedule,
        "clock": compared([turn.clock for turn in mine.turns[1:]], [turn.clock for turn in other.turns[1:]]),
        "cpu": compared([turn.cpu for turn in mine.turns[1:]], [turn.cpu for turn in other.turns[1:]]),
    }
    return {**row, "losses_differ_by": apart}


def compared(mine: list[float], other: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "echelon_ms": round(1e3 * statistics.median(mine), 2),
        "torch_ms": round(1e3 * statistics.median(other), 2),
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "least_ms": [round(1e3 * min(mine), 2), round(1e3 * min(other), 2)],
        "ratio_of_least": round(min(other) / min(mine), 3),
    }


def worker(cases: list[str], schedules: list[str], rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    echelon.init()
    dist.barrier()
    for name in cases:
        for schedule in schedules:
            row = race(name, schedule, rounds, steps)
            everyones = all_gather(torch.tensor([row["losses_differ_by"]]))
            row["losses_differ_by"] = float(everyones[-1])
            if echelon.is_first_worker():
                print("RESULT " + json.dumps(row), flush=True)
    echelon.barrier()


def show(row: dict[str, Any]) -> None:
    words = [
        f"{kind} {row[kind]['echelon_ms']:7.2f} and {row[kind]['torch_ms']:7.2f} ms: {row[kind]['ratio']:.2f} "
        "({:.2f}-{:.2f})".format(*row[kind]["quartiles"])
        for kind in ("clock", "cpu")
    ]
    same = "" if row["losses_differ_by"] <= TOLERANCE else "  DIFFERENT LOSSES"
    least = f"least cpu {row['cpu']['ratio_of_least']:.2f}"
    print(f"{row['case']:8} {row['ranks']} ranks {row['schedule']:12} {'   '.join(words)}   {least}{same}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", default=["narrow"], choices=CASES)
    parser.add_argument("--schedule", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.case, args.schedule, args.rounds, args.steps)
        return
    options = ["--case", *args.case, "--schedule", *args.schedule]
    options += ["--rounds", str(args.rounds), "--steps", str(args.steps)]
    results = []
    for ranks in args.ranks:
        for row in job(__file__, ranks, options):
            results.append(row)
            show(row)
    told = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__, "results": results}
    print(json.dumps(told))
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
