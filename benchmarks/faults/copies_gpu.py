"""Cost of an in-memory snapshot after every step on a GPU: ResNet-50 (timm's), bf16, batches of 256.

    echelon run --procs 1 --copies 1 benchmarks/faults/copies_gpu.py

Blocks of steps with and without copies take turns; the ratio is the median over neighbouring blocks.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import timm
import torch
import torch.nn.functional as F

import echelon

BATCH, BLOCKS, STEPS = 256, 6, 12


def seconds(engine: Any, batch: tuple[torch.Tensor, ...], steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step(*batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    echelon.init(seed=3)
    net = timm.create_model("resnet50")
    engine: Any = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True),
        strategy=echelon.Strategy(amp="bf16"),
        log=echelon.Log(console=False),
    )
    batch = torch.randn(BATCH, 3, 224, 224, device="cuda"), torch.randint(1000, (BATCH,), device="cuda")
    seconds(engine, batch, 5)
    memories, found = engine._memories, []
    for _ in range(BLOCKS):
        pair = []
        for kept in (memories, None):
            engine._memories = kept
            seconds(engine, batch, 2)
            pair.append(seconds(engine, batch, STEPS))
        found.append(pair)
    ratio = statistics.median(kept / plain for kept, plain in found)
    ms = [round(1e3 * statistics.median(column), 2) for column in zip(*found, strict=True)]
    print(json.dumps({"with_ms": ms[0], "without_ms": ms[1], "ratio": round(ratio, 4)}))


if __name__ == "__main__":
    main()
