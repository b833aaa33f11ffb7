"""Cost of an in-memory snapshot of the training state after every step.

    python benchmarks/faults/copies.py [--cases data,shard,pipeline] [--blocks 6] [--steps 4] [--out results.json]

Two ranks of one thread each train a narrow ResNet-18 (2.8 million parameters, SGD with momentum: 22 MB of state) on
batches of 32 made-up images of 32 x 32. data: both on one host, so each copies half of the state; shard, pipeline: one
rank on each of two "hosts" (two memories on this machine), so everything a rank has is copied and sent to the other
host too. Blocks of steps with and without copies take turns in one run, and a block ends when what it began in the
background has ended. A ratio is that of two neighbouring blocks; the figure is the median over such pairs. "wall" is of
the time that steps take; "cpu" of the processor time of both ranks and of the memories together, which other work on
the machine disturbs less. "alone_ms" is the processor time of rank 0 for a copy beyond moving bytes: looking for
tensors, writing down facts, the seal.

Hosts share this machine's memory and cores here: what another host would do (receive) is paid for by the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import echelon
from benchmarks.support.workloads import ResNet18
from echelon import Log, Strategy, annotate, pipeline, stage
from echelon.distributed.collectives import gather_json
from echelon.engine.in_memory.checkpointer import MemoryCheckpointer
from echelon.engine.in_memory.device_copy import DeviceCopy
from echelon.launcher.memory_plugin import MemoryCheckpointPlugin, describe

BATCH = 32
STRATEGIES = {"data": Strategy(), "shard": Strategy(shard=2), "pipeline": Strategy()}


def model_of(case: str) -> nn.Module:
    net = ResNet18()
    if case == "pipeline":
        half = {f"body.{i}": stage(i // 4) for i in range(8)}
        annotate(net, {"": pipeline(micro_batches=4), "stem": stage(0), **half, "head": stage(1)})
    return net


def work(case: str, blocks: int, steps: int) -> None:
    """A rank: rank 0 prints the step times of every block, those with copies first in each pair."""
    torch.set_num_threads(1)
    world = echelon.init(seed=1)
    net = model_of(case)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    engine = echelon.distribute(
        net, loss=F.cross_entropy, optimizer=optimizer, strategy=STRATEGIES[case], log=Log(console=False)
    )
    g = torch.Generator().manual_seed(world.rank if case != "pipeline" else 0)
    batch = torch.randn(BATCH, 3, 32, 32, generator=g), torch.randint(10, (BATCH,), generator=g)
    for _ in range(4):  # optimizer state, banks, both slots
        engine.step(*batch)
    memories, pairs = engine._memories, []
    for _ in range(blocks):
        pair = []
        for kept in (memories, None):
            engine._memories = kept
            pair.append(block(engine, memories, batch, steps))
        pairs.append(pair)
    alone = [looked(engine, memories, batch) for _ in range(5)]
    engine._memories = memories
    if world.rank == 0:
        print(json.dumps({"pairs": pairs, "alone": alone}), flush=True)
    engine.close()


def block(engine: Any, memories: MemoryCheckpointer, batch: Any, steps: int) -> tuple[float, float]:
    """Seconds a step, and processor seconds a step of all processes together."""
    dist.barrier()
    memory = memories.where.pid
    began, busy, served = time.perf_counter(), time.process_time(), busy_of(memory)
    for _ in range(steps):
        engine.step(*batch)
    memories.copies._replicator.wait()
    took, busy = time.perf_counter() - began, time.process_time() - busy
    every = gather_json(busy, engine.world.control)
    return took / steps, (sum(every) + busy_of(memory) - served) / steps


def busy_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def looked(engine: Any, memories: MemoryCheckpointer, batch: Any) -> float:
    """Seconds of a copy in the foreground without moving bytes and without waiting for others."""
    engine.step(*batch)
    copies = memories.copies
    copies._replicator.wait()
    moved: list[float] = []
    plain = DeviceCopy.copy

    def watched(self: DeviceCopy, *args: Any) -> None:
        began = time.thread_time()
        plain(self, *args)
        moved.append(time.thread_time() - began)

    DeviceCopy.copy = watched  # type: ignore[method-assign]
    began = time.thread_time()
    copies.after(engine.steps)
    took = time.thread_time() - began
    DeviceCopy.copy = plain  # type: ignore[method-assign]
    return took - sum(moved)


def measure(case: str, blocks: int, steps: int, port: int) -> dict[str, Any]:
    counts = [2] if case == "data" else [1, 1]
    memories = [MemoryCheckpointPlugin("127.0.0.1", None, 1) for _ in counts]
    hosts = [(memory.server.address, memory.announcement["memory_key"]) for memory in memories]
    ranks = []
    for rank in range(2):
        here = 0 if case == "data" else rank
        place = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank if case == "data" else 0, "GROUP_RANK": here,
            "LOCAL_WORLD_SIZE": counts[here], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        env = os.environ | {name: str(value) for name, value in place.items()}
        env |= describe(0, here, hosts, counts, copies=1)
        words = [sys.executable, __file__, "--worker", case, "--blocks", str(blocks), "--steps", str(steps)]
        ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate()[0] for rank in ranks]
    held = [memory.server.nbytes / 1e6 for memory in memories]
    for memory in memories:
        memory.close()
    return summary(json.loads(said[0].splitlines()[-1]), held)


def summary(found: dict[str, Any], held: list[float]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for at, name in enumerate(("wall", "cpu")):
        ratios = [kept[at] / plain[at] for kept, plain in found["pairs"]]
        result[name] = {
            "ratio": round(statistics.median(ratios), 4),
            "all": [round(ratio, 3) for ratio in ratios],
            "with_s": round(statistics.median(kept[at] for kept, _ in found["pairs"]), 4),
            "without_s": round(statistics.median(plain[at] for _, plain in found["pairs"]), 4),
        }
    alone = round(statistics.median(found["alone"]) * 1e3, 3)
    return {**result, "alone_ms": alone, "host_mb": [round(each, 1) for each in held]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="data,shard,pipeline")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.blocks, asked.steps)
        return
    results = {}
    for number, case in enumerate(asked.cases.split(",")):
        load = os.getloadavg()[0]
        results[case] = {**measure(case, asked.blocks, asked.steps, 29600 + number), "load_before": round(load, 1)}
        print(case, json.dumps(results[case]), flush=True)
    if asked.out:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__}
        asked.out.write_text(json.dumps({"machine": machine, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
