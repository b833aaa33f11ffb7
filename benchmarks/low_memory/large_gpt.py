"""The largest GPT that one device trains: plain PyTorch AdamW in fp32, and Echelon's lean strategy.

    python benchmarks/low_memory/large_gpt.py --plain 8.0:9.4 --recomputed 8.6:9.4 --lean 34:44 --out large_gpt.json

Each range is gone through by bisection, layer by layer; every attempt is a process of its own, makes three steps on
made-up tokens, and ends when memory does. ``--lean 36`` tries one size; ``--batch`` is in sequences of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, STEPS, LIMIT = 50257, 1024, 3, 240
WIDTH = {"plain": 4096, "recomputed": 4096, "lean": 8192}  # GPT-3's shapes: 128 features a head


def layers_for(billions: float, width: int) -> int:
    """Return the number of layers that make up about so many parameters."""
    rest = (VOCABULARY + LENGTH + 2) * width
    return max(1, round((billions * 1e9 - rest) / (12 * width**2 + 13 * width)))


def build(how: str, layers: int) -> nn.Module:
    from echelon.zoo.models.gpt import Gpt

    width = WIDTH[how]
    return Gpt(VOCABULARY, LENGTH, width, layers, width // 128, 0.0)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def plain(how: str, layers: int) -> tuple[nn.Module, Any]:
    """A hand-written loop at its best: fused AdamW, TF32 products, memory that is not torn into pieces."""
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = build(how, layers)
    if how == "recomputed":
        from torch.utils.checkpoint import checkpoint

        for layer in model.layers:  # type: ignore[union-attr]
            inner = layer.forward  # type: ignore[union-attr]
            layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor, following: Tensor) -> Tensor:
        loss = loss_of(model(tokens), following)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step


def lean(how: str, layers: int, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    import echelon
    from echelon.parallel.low_memory import building

    echelon.init(seed=0)
    with building():
        model = build(how, layers)
    engine = echelon.distribute(
        model,
        loss=loss_of,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        strategy=echelon.Strategy(low_memory=echelon.LowMemory(**settings), recompute=True),
        log=echelon.Log(every=1000),
    )
    return model, engine.step


def attempt(how: str, layers: int, batch: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps; the last of them is timed."""
    begun = time.perf_counter()
    model, step = lean(how, layers, settings) if how == "lean" else plain(how, layers)
    torch.cuda.synchronize()
    built = time.perf_counter()
    torch.manual_seed(1)
    losses, seconds = [], []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1), device="cuda")
        start = time.perf_counter()
        losses.append(float(step(tokens[:, :-1], tokens[:, 1:])))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "build_s": built - begun,
        "step_s": seconds,
        "tokens_per_s": batch * LENGTH / seconds[-1],
        "device_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "device_used_gb": (total - free) / 1e9,
        "host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "losses": losses,
    }


def tried(how: str, layers: int, batch: int, settings: dict[str, Any]) -> dict[str, Any]:
    """An attempt in a process of its own, and what became of it."""
    words = ["--attempt", json.dumps([how, layers, batch, settings])]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            timeout=LIMIT,
        )
        lines = done.stdout.strip().splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if done.returncode == 0 else {"failed": _reason(done.stderr)}
    except subprocess.TimeoutExpired:
        found = {"failed": f"not done after {LIMIT} s"}
    result = {"how": how, "layers": layers, "width": WIDTH[how], "batch": batch, **found}
    print(json.dumps(result), flush=True)
    return result


def _reason(text: str) -> str:
    lines = text.strip().splitlines() or ["died without a word (killed?)"]
    return next((line for line in reversed(lines) if "memory" in line.lower()), lines[-1])[:300]


def largest(how: str, billions: str, batch: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Bisection between a size that is expected to fit and one that is not."""
    bounds = [layers_for(float(each), WIDTH[how]) for each in billions.split(":")]
    low, high = bounds[0], bounds[-1] + 1
    attempts = [tried(how, low, batch, settings)]
    while high - low > 1 and "failed" not in attempts[0]:
        middle = (low + high) // 2
        attempts.append(tried(how, middle, batch, settings))
        low, high = (low, middle) if "failed" in attempts[-1] else (middle, high)
    return attempts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for how in WIDTH:
        parser.add_argument(f"--{how}", help="billions of parameters: one size, or LOW:HIGH")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--settings", type=json.loads, default={}, help="of LowMemory, as JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--attempt", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attempt:
        print(json.dumps(attempt(*given.attempt)))
        return
    asked = {how: getattr(given, how) for how in WIDTH if getattr(given, how)}
    found = [one for how, range_ in asked.items() for one in largest(how, range_, given.batch, given.settings)]
    if given.out:
        before = json.loads(given.out.read_text())["attempts"] if given.out.exists() else []
        device = torch.cuda.get_device_name()
        given.out.write_text(json.dumps({"device": device, "attempts": before + found}, indent=1))


if __name__ == "__main__":
    main()
