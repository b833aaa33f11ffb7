"""Directories of made-up runs: every file that a run can leave, with figures that a test knows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from echelon.plan.schedule import make_schedule
from echelon.plan.simulate import simulate

BEGAN = 1_794_747_000.0
PHASES = {"data": 1.0, "forward": 20.0, "backward": 41.0, "communicate": 6.0, "update": 4.0}
SLOW = 3  #: the rank that the others wait for
Record = dict[str, Any]


def append(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def loss_at(step: int) -> float:
    return 0.3 + 2.2 * math.exp(-step / 900) + 0.05 * math.sin(step * 12.9898)


def metrics(first: int, last: int, total: int | None = 4000, every: int = 10, began: float = BEGAN) -> list[Record]:
    return [
        {
            "step": step,
            "total": total,
            "learning_rate": 1e-3 * min(1.0, step / 400) * (1 + math.cos(math.pi * step / 4000)) / 2,
            "time": began + 0.072 * step,
            "loss": loss_at(step),
            "examples_per_s": 7000 + 300 * math.sin(step / 37),
            **PHASES,
        }
        for step in range(first, last + 1, every)
    ]


def rank_records(rank: int, first: int, last: int, every: int = 10) -> list[Record]:
    """Rank ``SLOW`` computes 19 ms longer and does not wait; the others wait for it."""
    slow = rank == SLOW
    phases = PHASES | ({"backward": 60.0, "communicate": 1.0} if slow else {"communicate": 20.0})
    return [
        {
            "step": step,
            "time": BEGAN + 0.072 * step,
            **phases,
            "memory": 31e9,
            "peak": 40e9 + rank * 1e9,
        }
        for step in range(first, last + 1, every)
    ]


def facts(ranks: int = 4, hosts: int = 2, **changed: Any) -> Record:
    events = simulate(
        make_schedule("1f1b", 2, 2, 8),
        {(kind, stage): {"F": 0.003}.get(kind, 0.005) for kind in "FBIW" for stage in (0, 1)},  # type: ignore[misc]
    ).events
    return {
        "format": 1,
        "echelon": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.2",
        "command": ["python", "-m", "echelon", "run", "--procs", str(ranks), "train gpt.py"],
        "script": "/home/someone/train gpt.py",
        "started": BEGAN,
        "attempt": 0,
        "world": {"size": ranks, "hosts": hosts, "device": "cuda", "backend": "nccl", "launcher": "echelon"},
        "mesh": {"replicate": ranks // 2, "stage": 2, "split": 1},
        "ranks": [
            {
                "rank": rank,
                "host": f"gpu{1 + rank * hosts // ranks:02d}",
                "device": f"cuda:{rank % 2} NVIDIA H100",
                "memory": 80e9,
                "at": {"replicate": rank // 2, "stage": rank % 2, "split": 0},
                "pid": 4000 + rank,
            }
            for rank in range(ranks)
        ],
        "plan": {"mesh": {"replicate": ranks // 2, "stage": 2}, "buckets": [{"parameters": 44}], "clip": 1.0},
        "parameters": {"count": 354_823_168, "bytes": 1_419_292_672},
        "stages": [
            {
                "stage": stage,
                "ranks": [rank for rank in range(ranks) if rank % 2 == stage],
                "units": [f"layers.{12 * stage + layer}" for layer in range(12)],
                "parameters": 177_411_584,
            }
            for stage in range(2)
        ],
        "schedule": {"name": "1f1b", "micro_batches": 8},
        "settings": [
            {"name": "amp", "value": {"dtype": "bfloat16"}, "origin": "script"},
            {"name": "pipeline.micro_batches", "value": 8, "origin": "auto"},
            {"name": "gradient_merge", "value": 1, "origin": "default"},
            {"name": "sync_batch_norm", "value": True, "origin": "default"},
        ],
        "said": ["plan: replicate 2 x stage 2, 8 micro-batches (1f1b)", "amp: bfloat16 where it is safe"],
        "predicted": {
            "seconds": 0.068,
            "parts": {"compute": 0.052, "bubble": 0.007, "gradients": 0.004, "update": 0.0045, "host": 0.0005},
            "memory": [
                {
                    "parameters": 3e9,
                    "gradients": 3e9,
                    "optimizer": 6e9,
                    "activations": 24e9 - 9e9 * place,
                    "limit": 80e9,
                }
                for place in range(2)
            ],
            "events": [[event.rank, *event.action, event.begin, event.end] for event in events],
        },
        "flops_per_step": 2.1e15,
        "start": {"import": 4.0, "join": 0.5, "build": 2.0, "distribute": 12.5, "first step": 21.0, "compile": 17.0},
        "environment": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8"},
    } | changed


EVENTS = [
    {"time": BEGAN + 1, "kind": "notice", "rank": 0, "text": "training begins"},
    {"time": BEGAN + 70, "kind": "saved", "rank": 0, "text": "checkpoint at step 1000"},
    {"time": BEGAN + 120, "kind": "warning", "rank": SLOW, "text": "rank 3 (gpu02) is slower than its peers"},
]


def spans(rank: int, steps: Sequence[int] = (10, 11, 12), micro_batches: int = 8) -> list[Record]:
    """Kernels as of a GPU, by the phase that launched them. One step is 72 ms; the second of three 2 ms longer."""
    told = {"clock_offset": 0.0, "clock_error": 1e-5, "device": "cuda", "steps": [10, 12]}
    found: list[Record] = [{"rank": rank, "host": "gpu01", **told}]
    for step in steps:
        at = 100.0 + 0.08 * step
        begin = at + 0.004 * (rank % 2)
        for _ in range(micro_batches):
            middle, end = begin + 0.0026, begin + 0.0074
            found += _kernels("forward", begin, middle, step) + _kernels("backward", middle, end, step)
            begin = end + 0.0002
        found += _kernels("update", at + 0.067, at + 0.072 + 0.002 * (step == 11), step)
        message = {"name": "all_reduce bucket 0", "kind": "communicate", "lane": "network", "bytes": 25_000_000}
        found.append({**message, "begin": at + 0.03, "end": begin, "step": step})
        found.append({"name": "data", "kind": "data", "lane": "host", "begin": at, "end": at + 0.001, "step": step})
    return found


def _kernels(phase: str, begin: float, end: float, step: int) -> list[Record]:
    """Two, with a gap of 10 microseconds."""
    middle = (begin + end) / 2
    told = {"name": "gemm", "kind": "kernel", "lane": "device", "step": step, "in": phase}
    return [{**told, "begin": begin, "end": middle}, {**told, "begin": middle + 1e-5, "end": end}]


SUMMARY = {
    "steps": [10, 12],
    "step_ms": 72.0,
    "ranks": [
        {
            "rank": rank,
            "compute_ms": 60.8,
            "communicate_ms": 33.0,
            "exposed_ms": 5.0,
            "bubble_ms": 4.0,
            "update_ms": 5.0,
        }
        for rank in range(4)
    ],
    "slowest": SLOW,
    "exposed_communication": 0.07,
    "bubble": {"measured": 0.12, "theory": 0.111},
    "mfu": 0.431,
    "communication": [{"name": "all_reduce bucket 0", "bytes": 25e6, "ms": 33.0, "gb_per_s": 0.757}],
}

MEMORY = {
    "peak": {"bytes": 41e9, "moment": "backward of layers.3"},
    "kinds": {"parameters": 3e9, "gradients": 3e9, "optimizer": 6e9, "activations": 28e9, "buffers": 1e9},
    "modules": [
        {
            "name": f"layers.{place}",
            "parameters": 1e8,
            "gradients": 1e8,
            "optimizer": 2e8,
            "activations": 1e9 - place * 1e7,
            "buffers": 0,
        }
        for place in range(12)
    ],
    "savings": [{"what": "recompute", "bytes": 19e9}, {"what": "shard 1", "bytes": 3e9}],
    "measured": True,
}


def server_records(server: int, seconds: int = 120) -> list[Record]:
    return [
        {
            "time": BEGAN + second,
            "rows": {"users": 1000 * second, "items": 400 * second + server},
            "bytes_in": 2_000_000 * second,
            "bytes_out": (5_000_000 + 500_000 * server) * second,
            "pulls": 30 * second,
            "pushes": 29 * second,
            "staleness": {"mean": 1.5 + math.sin(second / 9) / 2, "max": 4},
            "memory": 2e8 + 1e6 * second,
        }
        for second in range(seconds)
    ]


def write(directory: Path, last: int = 3000, ranks: int = 4, servers: int = 0, **changed: Any) -> Path:
    """A run of ``ranks`` that has come to step ``last`` of 4,000. ``changed``: of run.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps(facts(ranks, **changed)))
    append(directory / "metrics.jsonl", metrics(10, last))
    append(directory / "metrics.jsonl", [_foretold(), *evaluations(last)])
    for rank in range(ranks):
        append(directory / f"rank-{rank}.jsonl", rank_records(rank, 10, last))
        append(directory / "timeline" / f"rank-{rank}.jsonl", spans(rank))
    for server in range(servers):
        append(directory / f"server-{server}.jsonl", server_records(server))
    append(directory / "events.jsonl", EVENTS)
    (directory / "timeline" / "summary.json").write_text(json.dumps(SUMMARY))
    (directory / "memory.json").write_text(json.dumps(MEMORY))
    return directory


def _foretold() -> Record:
    memory = {"predicted_memory": 36e9, "measured_memory": 41e9}
    return {"step": 20, "predicted_step_ms": 68.0, "measured_step_ms": 72.0, **memory}


def evaluations(last: int) -> list[Record]:
    return [
        {"step": step, "eval_loss": loss_at(step) + 0.04, "eval_accuracy": 1 - math.exp(-step / 800)}
        for step in range(500, last + 1, 500)
    ]
