"""One host's process of benchmarks/pipeline/hybrid.py: trains with one contender, some steps whenever it is told to.

    python hybrid_worker.py CONTENDER CASE        in the environment that torchrun would make

It speaks as slow_links_worker.py does.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from benchmarks.data_parallel.slow_links_worker import Contender, hand_written, turn
from benchmarks.pipeline.hybrid_models import CASES, Batch, Case, Piece, batches, share, stages

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VIRTUAL = 2  # stages on each rank, where they are interleaved


def ddp(case: Case) -> Contender:
    dist.init_process_group("gloo")
    model, optimizer = _start(case)
    return Contender(hand_written(nn.parallel.DistributedDataParallel(model), optimizer, case.loss), dist.barrier)


def ours(case: Case, marks: dict[str, Any]) -> Contender:
    echelon.init()
    model, optimizer = _start(case)
    engine = echelon.distribute(
        echelon.annotate(model, marks), loss=case.loss, optimizer=optimizer, log=echelon.Log(console=False)
    )
    return Contender(engine.step, echelon.barrier)


def data_parallel(case: Case) -> Contender:
    return ours(case, {})


def split_head(case: Case) -> Contender:
    return ours(case, {"features": echelon.replicate(), "head": echelon.split()})


def pipeline(case: Case, schedule: Any) -> Contender:
    cut = stages(case, WORLD * VIRTUAL if schedule == "interleaved" else WORLD)
    marks: dict[str, Any] = {name: echelon.stage(at) for at, names in enumerate(cut) for name in names}
    return ours(case, {**marks, "": echelon.pipeline(case.micro_batches, schedule)})


def torch_pipeline(case: Case, schedule: str) -> Contender:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    dist.init_process_group("gloo")
    model, _ = _start(case)
    interleaved = schedule == "interleaved"
    cut = stages(case, WORLD * VIRTUAL if interleaved else WORLD)
    pieces = {at: Piece(model, cut[at]) for at in range(RANK, len(cut), WORLD)}
    optimizer = case.optimizer(nn.ModuleList(pieces.values()))
    mine: list[Any] = [PipelineStage(piece, at, len(cut), torch.device("cpu")) for at, piece in pieces.items()]
    del model
    if interleaved:
        run: Any = ScheduleInterleaved1F1B(mine, case.micro_batches, loss_fn=case.loss)
    else:
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        run = kind(mine[0], case.micro_batches, loss_fn=case.loss)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        run.step(
            *([x] if RANK == 0 else []), target=y if RANK == WORLD - 1 else None, losses=losses, return_outputs=False
        )
        optimizer.step()
        # Only the last rank knows the loss; what is compared is the mean over ranks.
        return WORLD * torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return Contender(step, dist.barrier)


def _start(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.model()
    return model, case.optimizer(model)


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "ddp": ddp,
    "dp": data_parallel,
    "split": split_head,
    "gpipe": lambda case: pipeline(case, "gpipe"),
    "1f1b": lambda case: pipeline(case, "1f1b"),
    "interleaved": lambda case: pipeline(case, "interleaved"),
    "zero-bubble": lambda case: pipeline(case, "zero-bubble"),
    "torch-gpipe": lambda case: torch_pipeline(case, "gpipe"),
    "torch-1f1b": lambda case: torch_pipeline(case, "1f1b"),
    "torch-interleaved": lambda case: torch_pipeline(case, "interleaved"),
}
IN_SHARES = ("ddp", "dp", "split")  # each rank has rows of its own; all ranks of a pipeline have the same


def _data(case: Case, name: str) -> Iterator[Batch]:
    whole = batches(case, WORLD)
    return (share(batch, RANK, WORLD) for batch in whole) if name in IN_SHARES else whole


def _limit_memory(case: Case) -> None:
    """Private memory that can be written to: unlike the address space, what a process could really come to fill."""
    if case.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (case.memory, case.memory))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; only answers go to the real output
    os.dup2(2, 1)
    torch.set_num_threads(1)
    name, case = sys.argv[1], CASES[sys.argv[2]]
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in case.model().parameters())
    _limit_memory(case)
    try:
        contender, data = CONTENDERS[name](case), _data(case, name)
        print(json.dumps({"parameters": parameters}), file=answers)
        for line in sys.stdin:
            found = turn(contender, data, **json.loads(line))
            found["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(json.dumps(found), file=answers)
    except (RuntimeError, MemoryError, echelon.EchelonError) as error:
        print(f"rank {RANK}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # the others may be gone already: nothing to say goodbye to


if __name__ == "__main__":
    main()
