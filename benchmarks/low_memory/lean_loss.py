"""Does lean training learn what AdamW in fp32 learns? One GPT on one text, from the same weights, batch by batch.

    python benchmarks/low_memory/lean_loss.py tinyshakespeare.txt --steps 400 --out lean_loss.json

fp32 is a hand-written loop; fp32 with other batches says how far apart two runs are anyway; bf16 is Echelon's amp.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.strategy import Fast, Strategy
from echelon.zoo.models.gpt import Gpt

BATCH, AVERAGED = 16, 20
Step = Callable[[Tensor, Tensor], Tensor]


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def rate_at(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, following: Tensor) -> Tensor:
        loss = loss_of(model(tokens), following)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def by_engine(strategy: Strategy) -> Callable[[nn.Module, torch.optim.Optimizer], Step]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        quiet = echelon.Log(console=False)
        return echelon.distribute(model, loss=loss_of, optimizer=optimizer, strategy=strategy, log=quiet).step

    return make


def train(make: Any, model: nn.Module, text: Tensor, steps: int, length: int, seed: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.99), weight_decay=0.1)
    step, draw = make(model, optimizer), torch.Generator().manual_seed(seed)
    losses, begun = [], time.perf_counter()
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-4 * rate_at(i, steps)
        starts = torch.randint(len(text) - length - 1, (BATCH,), generator=draw).tolist()
        rows = torch.stack([text[at : at + length + 1] for at in starts])
        losses.append(step(rows[:, :-1], rows[:, 1:]))
    values = [float(loss) for loss in losses]
    last = [sum(values[at : at + AVERAGED]) / AVERAGED for at in range(0, steps, AVERAGED)]
    return {"losses": last, "seconds": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    echelon.init(seed=0)
    torch.manual_seed(0)
    device = echelon.device()
    first = Gpt(256, given.length, given.width, given.layers, given.width // 64, 0.0).to(device)
    text = torch.tensor(list(given.text.read_bytes()), device=device)
    plain = Fast(compile=False, graphs=False)
    ways: dict[str, tuple[Any, int]] = {
        "fp32": (by_hand, 1),
        "fp32, other batches": (by_hand, 2),
        "bf16": (by_engine(Strategy(amp="bf16", fast=plain)), 1),
        "lean": (by_engine(Strategy(low_memory=True, fast=plain)), 1),
    }
    found = {}
    for name, (make, seed) in ways.items():
        found[name] = train(make, copy.deepcopy(first), text, given.steps, given.length, seed)
        shown = "  ".join(f"{loss:.4f}" for loss in found[name]["losses"][:: max(1, given.steps // AVERAGED // 10)])
        print(f"{name:20} {shown}  last {found[name]['losses'][-1]:.4f}  {found[name]['seconds']:.0f} s", flush=True)
    if given.out:
        parameters = sum(p.numel() for p in first.parameters())
        given.out.write_text(json.dumps({"parameters": parameters, "steps": given.steps, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
