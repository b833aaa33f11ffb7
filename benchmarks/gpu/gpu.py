"""Echelon's defaults beside hand-written loops, Lightning Fabric and Accelerate on one GPU, bf16.

    python benchmarks/gpu/gpu.py resnet50|resnet50_64|bert_large|bert_large_64|gpt2_medium
        [--contenders eager compiled graphs fabric accelerate echelon] [--rounds 3] [--steps 15] [--out results.json]
        [--no-roofline]

All contenders live in one process and take turns; ratios are medians over rounds of the ratio within a round. The
hand-written loops are an expert's: channels last, fused optimizer, model and loss compiled as one. Fabric and
Accelerate get a compiled model. Echelon gets the plain model and a plain optimizer: ``echelon.distribute(model, ...)``.
The least time that a step can take is computed by roofline.py. Needs a GPU, torchvision, transformers, lightning and
accelerate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import echelon
from benchmarks.gpu.gpu_workloads import WORKLOADS, Workload
from benchmarks.gpu.roofline import PEAK, floor

Step = Callable[[], object]
FIRST = 3  #: steps that count as starting


def expert(work: Workload) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    model, (inputs, targets) = work.build().to("cuda"), work.batch()
    if work.images:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    return model, (inputs, targets), work.optimizer(model.parameters(), fused=True)


def hand_written(work: Workload, compiled: bool, mode: str | None = None) -> Step:
    model, batch, optimizer = expert(work)

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        return work.loss(model(inputs), targets)

    run = torch.compile(forward, mode=mode) if compiled else forward

    def step() -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()  # torch's graphs write over it in the next step

    return step


def fabric(work: Workload) -> Step:
    from lightning.fabric import Fabric

    model, (inputs, targets), optimizer = expert(work)
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.launch()
    run, stepper = fabric.setup(torch.compile(model), optimizer)

    def step() -> object:
        loss = work.loss(run(inputs), targets)
        fabric.backward(loss)
        stepper.step()
        stepper.zero_grad()
        return loss.detach()

    return step


def accelerate(work: Workload) -> Step:
    from accelerate import Accelerator

    model, (inputs, targets), optimizer = expert(work)
    accelerator = Accelerator(mixed_precision="bf16")
    run, stepper = accelerator.prepare(torch.compile(model), optimizer)

    def step() -> object:
        loss = work.loss(run(inputs), targets)
        accelerator.backward(loss)
        stepper.step()
        stepper.zero_grad()
        return loss.detach()

    return step


def ours(work: Workload, fast: Any = None) -> Step:
    model, batch = work.build().to("cuda"), work.batch()
    engine = echelon.distribute(
        model,
        loss=work.loss,
        optimizer=work.optimizer(model.parameters()),
        strategy=None if fast is None else echelon.Strategy(fast=fast),
        log=echelon.Log(lines=False, every=50),
    )
    return lambda: engine.step(*batch)


CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    "eager": lambda work: hand_written(work, compiled=False),
    "compiled": lambda work: hand_written(work, compiled=True),
    "graphs": lambda work: hand_written(work, compiled=True, mode="reduce-overhead"),
    "fabric": fabric,
    "accelerate": accelerate,
    "echelon": ours,
    "echelon_whole": lambda work: ours(work, echelon.Fast(compile="whole")),
    "echelon_no_graphs": lambda work: ours(work, echelon.Fast(graphs=False)),
    "echelon_eager": lambda work: ours(work, echelon.Fast(compile=False)),
}


class Contender:
    """One way to train; its figures."""

    def __init__(self, name: str, work: Workload, warm_up: int) -> None:
        self.name, self.speeds = name, list[float]()
        torch.manual_seed(0)
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        self._step, self._samples = CONTENDERS[name](work), work.samples
        self.losses = [self._step() for _ in range(FIRST)]
        torch.cuda.synchronize()
        self.start = time.perf_counter() - begin
        torch.cuda.reset_peak_memory_stats()  # compiling has had its own
        self._step()
        torch.cuda.synchronize()
        self.memory = torch.cuda.max_memory_allocated() - before  # what a CUDA graph holds later counts as nothing
        for _ in range(warm_up):
            self._step()
        torch.cuda.synchronize()
        self.losses = [float(loss) for loss in self.losses]  # type: ignore[arg-type]
        torch.cuda.empty_cache()  # for other processes on the GPU

    def turn(self, steps: int) -> None:
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        torch.cuda.synchronize()
        self.speeds.append(self._samples * steps / (time.perf_counter() - begin))

    def figures(self, least: dict[str, float] | None) -> dict[str, object]:
        speed = statistics.median(self.speeds)
        seconds = self._samples / speed
        return {
            "per_s": round(speed, 1),
            "ms": round(1e3 * seconds, 2),
            "peak_gb": round(self.memory / 1e9, 2),
            "start_s": round(self.start, 1),
            "mfu": least and round(least["operations"] / seconds / PEAK, 3),
            "of_roofline": least and round(least["seconds"] / seconds, 3),
            "first_losses": [round(loss, 4) for loss in self.losses],
        }


def compare(
    name: str, contenders: list[str], rounds: int, steps: int, warm_up: int, least: dict[str, float] | None
) -> dict[str, object]:
    work = WORKLOADS[name]
    built: dict[str, Contender] = {}
    for key in contenders:
        try:
            built[key] = Contender(key, work, warm_up)
        except Exception as error:  # one that is not installed, or fails, must not cost the others their turn
            print(json.dumps({key: f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)
            continue
        print(json.dumps({key: {"start_s": round(built[key].start, 1), "losses": built[key].losses}}), flush=True)
    for turn in range(rounds):
        for key in sorted(built, reverse=bool(turn % 2)):
            built[key].turn(steps)
    figures = {key: one.figures(least) for key, one in built.items()}
    for key, row in figures.items():
        print(json.dumps({key: row}), flush=True)
    return {
        "workload": name,
        "unit": work.unit,
        "least": least,
        "contenders": figures,
        "echelon_against": _ratios(built),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def _ratios(built: dict[str, Contender]) -> dict[str, float]:
    if "echelon" not in built:
        return {}
    mine = built["echelon"].speeds
    return {
        key: round(statistics.median(a / b for a, b in zip(mine, other.speeds, strict=True)), 4)
        for key, other in built.items()
        if key != "echelon"
    }


def least_of(name: str) -> dict[str, float]:
    torch.manual_seed(0)
    work = WORKLOADS[name]
    model, batch, _ = expert(work)
    least = floor(model, batch, work.loss, 1 if work.images else 2)
    times = {key: round(1e3 * value, 2) for key, value in least.items() if key != "operations"}
    print(json.dumps({"workload": name, "least_ms": times}), flush=True)
    torch.cuda.empty_cache()
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=24)
    parser.add_argument("--no-roofline", action="store_true", help="leave out what a step takes at least")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu/gpu.py needs a GPU; torch sees none here")
    echelon.init()
    contenders = args.contenders or ["eager", "compiled", "fabric", "accelerate", "echelon"]
    least = None if args.no_roofline else least_of(args.workload)
    result = compare(args.workload, contenders, args.rounds, args.steps, args.warm_up, least)
    print(json.dumps({"workload": args.workload, "echelon_against": result["echelon_against"]}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
