"""Cost of Echelon's own Python in a step, in a batch and in a pipeline's action, on a CPU.

    python benchmarks/data_parallel/overhead.py [--rounds 40] [--steps 25] [--out results.json]

Contenders live in the same process and take turns. Figures are microseconds of CPU time, all threads of the process
together, the least of all rounds: what else the machine does can only add to them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import echelon
from benchmarks.support.job import job
from echelon.parallel.pipeline.schedule_loop import StageTransfer, run_schedule
from echelon.parallel.pipeline.transport import PipelineLinks
from echelon.plan.schedule import make_schedule

Step = Callable[[], object]
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # how to make it, its inputs, samples of a batch
    "tiny": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), 8, 8),
    "200 layers": (lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(200)]), 16, 8),
    "normal": (lambda: nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)), 256, 64),
}


def least(contenders: Mapping[str, Step], rounds: int, steps: int) -> dict[str, float]:
    """Microseconds of CPU a step, by contender, each the least of its rounds."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, step in contenders.items():
            begin = time.process_time()
            for _ in range(steps):
                step()
            best[name] = min(best[name], (time.process_time() - begin) / steps * 1e6)
    return {name: round(value, 1) for name, value in best.items()}


def by_hand(name: str, ddp: bool) -> Step:
    make, width, samples = MODELS[name]
    torch.manual_seed(0)
    model = make()
    trained = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(samples, width)

    def step() -> object:
        loss = trained(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())  # the engine looks at every loss, too

    return step


def ours(name: str) -> Step:
    make, width, samples = MODELS[name]
    torch.manual_seed(0)
    model = make()
    engine = echelon.distribute(
        model,
        loss=lambda output: output.square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        log=echelon.Log(console=False),
    )
    inputs = torch.randn(samples, width)
    return lambda: engine.step(inputs)


def steps_of(rounds: int, steps: int, ddp: bool) -> dict[str, dict[str, float]]:
    found = {}
    for name in MODELS:
        times = least({"echelon": ours(name), "torch": by_hand(name, ddp)}, rounds, steps if name == "tiny" else 5)
        found[name] = {**times, "overhead": round(times["echelon"] - times["torch"], 1)}
    return found


def batches(rounds: int) -> dict[str, float]:
    """Microseconds a batch of 32 rows: a slice by hand, torch's DataLoader, ours."""
    rows, size = 3200, 32
    data = TensorDataset(torch.randn(rows, 16), torch.arange(rows))
    model = nn.Linear(16, 1)
    engine = echelon.distribute(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        log=echelon.Log(console=False),
    )
    loader, torchs = engine.loader(data, batch_size=size), DataLoader(data, batch_size=size, shuffle=True)

    def sliced() -> None:
        order = torch.randperm(rows)
        for at in range(0, rows, size):
            _ = [tensor[order[at : at + size]] for tensor in data.tensors]

    def every(loader: object) -> Step:
        return lambda: [None for _ in loader]  # type: ignore[attr-defined]

    found = least({"slice": sliced, "DataLoader": every(torchs), "echelon": every(loader)}, rounds, 1)
    return {name: round(value / (rows / size), 1) for name, value in found.items()}


class Nothing:
    """A stage that does nothing."""

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        return {"x": VALUE}

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: str
    ) -> Mapping[str, Tensor | None]:
        return {"x": VALUE}


VALUE = torch.zeros(4, 4, requires_grad=True)


def actions(rounds: int) -> dict[str, float]:
    """Microseconds an action of 1f1b, a message of 64 bytes included; on one rank both stages are at home."""
    ranks = echelon.world_size()
    group = dist.new_group(backend="gloo") if ranks > 1 else None
    links = PipelineLinks(group, range(ranks), torch.device("cpu"), "gloo")
    schedule = make_schedule("1f1b" if ranks > 1 else "interleaved", 2, ranks, 8)
    transfers = (StageTransfer("x", 0, 1),)

    def step() -> None:
        run_schedule(schedule, Nothing(), transfers, links, "one shape")

    return {"action": round(least({"pipeline": step}, rounds, 4)["pipeline"] / len(schedule[links.place]), 1)}


def worker(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    echelon.init()
    many = echelon.world_size() > 1
    found = {
        "ranks": echelon.world_size(),
        "step": steps_of(rounds, steps, ddp=many),
        "loader": batches(rounds),
        "pipeline": actions(rounds),
    }
    if echelon.is_first_worker():
        print("RESULT " + json.dumps(found), flush=True)
    echelon.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.rounds, args.steps)
        return
    options = ["--rounds", str(args.rounds), "--steps", str(args.steps)]
    results = [row for ranks in (1, 2) for row in job(__file__, ranks, options)]
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
