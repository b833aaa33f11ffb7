"""Cost of compressing a gradient: selecting the largest entries, and a compressor's whole step.

    python benchmarks/data_parallel/topk.py [--entries 25000000] [--device cpu|cuda] [--threads 1]
           [--rounds 7] [--out results.json]

Contenders take turns, round by round; times are medians over rounds, ratios medians of the ratios within a round. On
one CPU thread it is processor time that counts, so that neighbours on the machine do not.
"read" is one pass over the entries (``values.max()``); "abs().max()" is the obvious way to ask for the largest
magnitude, which writes a second vector first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from echelon.parallel.data.compressor import Compressor, apply_sparse
from echelon.parallel.data.topk import largest

SPARSITIES = [0.999, 0.996, 0.984375, 0.9375, 0.75]
RANKS = 4  # whose selections land


def seconds(action: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    now = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begin = now()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - begin


def take_turns(contenders: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, action in contenders.items():
            taken = seconds(action, device)
            if turn:  # the first round warms up
                times[name].append(taken)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
    return round(statistics.median(a / b for a, b in zip(times[name], times[to], strict=True)), 2)


def milliseconds(times: list[float]) -> float:
    return round(statistics.median(times) * 1e3, 2)


def selection(values: Tensor, sparsity: float, rounds: int) -> dict[str, object]:
    """``largest`` beside ``torch.topk`` and beside reading."""
    k = round(values.numel() * (1 - sparsity))
    contenders: dict[str, Callable[[], object]] = {
        "read": values.max,
        "abs().max()": lambda: values.abs().max(),
        "torch.topk": lambda: torch.topk(values.abs(), k, sorted=False),
        "largest": lambda: largest(values, k),
    }
    times = take_turns(contenders, values.device.type, rounds)
    return {
        "what": "largest",
        "sparsity": sparsity,
        "ms": {name: milliseconds(taken) for name, taken in times.items()},
        "times_a_read": ratio(times, "largest", "read"),
        "times_abs_max": ratio(times, "largest", "abs().max()"),
        "topk_takes_times_longer": ratio(times, "torch.topk", "largest"),
    }


def compression(sizes: list[int], sparsity: float, device: str, rounds: int) -> dict[str, object]:
    """One rank's step: accumulate, select, and the landing of several ranks' selections."""
    compressor = Compressor([str(i) for i in range(len(sizes))], sizes, device)
    grads = [torch.randn(size, device=device) for size in sizes]
    parameters = [torch.randn(size, device=device) for size in sizes]
    counts, alphas = compressor.counts(sparsity), [-0.1] * len(sizes)
    rows: list[Tensor] = []

    def accumulate() -> None:
        for index, grad in enumerate(grads):
            compressor.accumulate(index, grad, 0.9)

    def select() -> None:
        rows[:] = [part.expand(RANKS, -1) for part in compressor.select(sparsity)]

    def land() -> None:
        apply_sparse(parameters, compressor.offsets, counts, rows[0], rows[1], alphas)

    contenders = {"accumulate": accumulate, "select": select, "land": land}
    times = take_turns(contenders, device, rounds)
    whole = [a + b for a, b in zip(times["accumulate"], times["select"], strict=True)]
    return {
        "what": f"compressor, {len(sizes)} parameters",
        "sparsity": sparsity,
        "ms": {name: milliseconds(times[name]) for name in ("accumulate", "select", "land")},
        "accumulate_and_select_ms": milliseconds(whole),
        "ranks_landing": RANKS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=25_000_000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    where = {"entries": args.entries, "device": name, "threads": args.threads, "torch": torch.__version__}
    results: list[dict[str, object]] = []
    values = torch.randn(args.entries, device=args.device)
    for sparsity in SPARSITIES:
        results.append(where | selection(values, sparsity, args.rounds))
        print(json.dumps(results[-1]), flush=True)
    for parts in (1, 50):
        for sparsity in SPARSITIES:
            results.append(where | compression([args.entries // parts] * parts, sparsity, args.device, args.rounds))
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
