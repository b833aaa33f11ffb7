"""LARS and LAMB beside torch's fused SGD and AdamW: one step over the parameters of ResNet-50 and of BERT-large.

    python benchmarks/gpu/optimizers.py [--only resnet50|bert_large] [--rounds 10] [--steps 20] [--out results.json]
    python benchmarks/gpu/optimizers.py --tune      how the GPU kernels' work is best cut on this device

All contenders live in one process and take turns; a figure is the median over rounds of the ratio of times within a
round, so above 1 is slower than torch. Without a GPU only ResNet-50's parameters are taken, unless asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.optim import LAMB, LARS
from echelon.optim.fused import LAMB_SHAPE, LARS_SHAPE, FusedKernels, FusedLaunchConfig

Step = Callable[[], object]
CUDA = torch.cuda.is_available()


def resnet50() -> Iterator[tuple[int, ...]]:
    def conv(inside: int, outside: int, size: int) -> Iterator[tuple[int, ...]]:
        yield from ((outside, inside, size, size), (outside,), (outside,))  # and its batch norm

    yield from conv(3, 64, 7)
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from (*conv(inside, width, 1), *conv(width, width, 3), *conv(width, 4 * width, 1))
            if block == 0:
                yield from conv(inside, 4 * width, 1)
            inside = 4 * width
    yield from ((1000, 2048), (1000,))


def bert_large(width: int = 1024) -> Iterator[tuple[int, ...]]:
    norm = ((width,), (width,))
    square = ((width, width), (width,))
    yield from ((30522, width), (512, width), (2, width), *norm)
    for _ in range(24):
        yield from (*square, *square, *square, *square, *norm)
        yield from ((4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm)
    yield from square


WORKLOADS: dict[str, Callable[[], Iterator[tuple[int, ...]]]] = {"resnet50": resnet50, "bert_large": bert_large}


def parameters(workload: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    device = "cuda" if CUDA else "cpu"
    params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in WORKLOADS[workload]()]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def flat(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Biases and norms, which are usually left out."""
    return [param for param in params if param.dim() == 1]


def contenders(params: list[nn.Parameter]) -> dict[str, dict[str, torch.optim.Optimizer]]:
    """For each comparison, torch's optimizer first."""
    lr, left = 1e-6, flat(params)
    sgd = {"torch SGD, fused": torch.optim.SGD(params, lr, momentum=0.9, weight_decay=5e-4, fused=True)}
    adamw = {"torch AdamW, fused": torch.optim.AdamW(params, lr, weight_decay=0.01, fused=True)}
    if CUDA:
        sgd["LARS, one kernel"] = LARS(params, lr, exclude=left, fused=True)
        adamw["LAMB, one kernel"] = LAMB(params, lr, exclude=left, fused=True)
    sgd["LARS, foreach"] = LARS(params, lr, exclude=left, fused=False)
    adamw["LAMB, foreach"] = LAMB(params, lr, exclude=left, fused=False)
    return {"lars": sgd, "lamb": adamw}


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds(step: Step, steps: int) -> float:
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begin) / steps


def compare(workload: str, rounds: int, steps: int) -> list[dict[str, object]]:
    params = parameters(workload)
    results: list[dict[str, object]] = []
    for optimizers in contenders(params).values():
        times: dict[str, list[float]] = {name: [] for name in optimizers}
        for optimizer in optimizers.values():
            seconds(optimizer.step, 3)
        for turn in range(rounds):
            for name in sorted(optimizers, reverse=bool(turn % 2)):
                times[name].append(seconds(optimizers[name].step, steps))
        results += [row(workload, params, name, times) for name in optimizers]
        for optimizer in optimizers.values():
            optimizer.state.clear()
    return results


def row(workload: str, params: list[nn.Parameter], name: str, times: dict[str, list[float]]) -> dict[str, object]:
    ratios = [mine / theirs for mine, theirs in zip(times[name], next(iter(times.values())), strict=True)]
    return {
        "workload": workload,
        "tensors": len(params),
        "million_parameters": round(sum(param.numel() for param in params) / 1e6, 1),
        "contender": name,
        "ms": round(statistics.median(times[name]) * 1e3, 4),
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
    }


# ---- how the work is cut ----

CHOICES: dict[str, list[Any]] = {
    "block_warps": [(1024, 4), (2048, 4), (2048, 8), (1024, 8), (4096, 8), (4096, 16)],
    "programs": [2, 3, 4, 6, 8],
    "burst": [1.0, 2.0, 4.0, 16.0, 1e9],
    "lag": [64, 128, 256, 512, 1024],
    "chunk": [2048, 4096, 8192, 16384],
}


def variants(shape: FusedLaunchConfig, field: str) -> list[FusedLaunchConfig]:
    if field == "block_warps":
        pairs = [pair for pair in CHOICES[field] if pair[0] <= shape.chunk]
        return [dataclasses.replace(shape, block=block, warps=warps) for block, warps in pairs]
    values = [value for value in CHOICES[field] if field != "chunk" or value >= shape.block]
    return [dataclasses.replace(shape, **{field: value}) for value in values]


def device_seconds(optimizer: LARS | LAMB, shape: FusedLaunchConfig) -> float:
    """One step on the device alone: as a graph, the host has no part in it."""
    (bundle,) = optimizer._bundles(optimizer.param_groups[0])
    adaptive, fast = [param.dim() > 1 for param in bundle.params], FusedKernels()

    def step() -> None:
        if isinstance(optimizer, LARS):
            fast.lars(bundle, adaptive, shape)
        else:
            fast.lamb(bundle, adaptive, (0.5, 0.5), shape)

    step()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return min(seconds(graph.replay, 5) for _ in range(4))


def tune(kind: Any, shape: FusedLaunchConfig, params: dict[str, list[nn.Parameter]], passes: int) -> None:
    with torch.no_grad():
        optimizers = {name: kind(tensors, 1e-6) for name, tensors in params.items()}
        known: dict[FusedLaunchConfig, dict[str, float]] = {}

        def times(candidate: FusedLaunchConfig) -> dict[str, float]:
            if candidate not in known:
                known[candidate] = {name: device_seconds(o, candidate) * 1e3 for name, o in optimizers.items()}
                print(
                    kind.__name__, {name: round(ms, 4) for name, ms in known[candidate].items()}, candidate, flush=True
                )
            return known[candidate]

        first = times(shape)

        def cost(candidate: FusedLaunchConfig) -> float:
            return sum(ms / first[name] for name, ms in times(candidate).items())

        for _ in range(passes):
            for field in CHOICES:
                shape = min([shape, *variants(shape, field)], key=cost)
        print("best", kind.__name__, times(shape), shape, flush=True)


def show(results: list[dict[str, object]]) -> None:
    for result in results:
        low, high = result["spread"]  # type: ignore[misc]
        print(
            f"{result['workload']:<11} {result['contender']:<20} {result['ms']:>9} ms   {result['ratio']:>6}"
            f"  ({low} to {high})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20 if CUDA else 3)
    parser.add_argument("--tune", type=int, nargs="?", const=2, help="passes over the choices")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = [args.only] if args.only else list(WORKLOADS) if CUDA else ["resnet50"]
    if args.tune:
        params = {name: parameters(name) for name in names}
        tune(LARS, LARS_SHAPE, params, args.tune)
        tune(LAMB, LAMB_SHAPE, params, args.tune)
        return
    results: list[dict[str, object]] = []
    for name in names:
        measured = compare(name, args.rounds, args.steps)
        show(measured)
        results += measured
    print(json.dumps(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
