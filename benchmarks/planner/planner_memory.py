"""The planner's memory beside that of real training steps, for every rank of every setting.

    python benchmarks/planner/planner_memory.py [--device cpu|cuda] [--cases convnet ...] [--settings plain ...]
         [--optimizer adam] [--out results.json]

On a CPU the peak is that of the profiler's allocations in the third step, ranks are processes that talk over Gloo, and
models are small; on a GPU it is torch.cuda.max_memory_allocated() of ResNet-50, BERT-large and a GPT on one device. A
prediction is made from the model and a batch alone, before anything has run. Every setting has processes of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.planner.planner_memory_models import CASES, ON_CPU, ON_GPU
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory
from echelon.planner.cost.rank_memory import Place, find_peak_moments
from echelon.planner.profiling.profile import Profile, profile

MB = 1e6

#: Settings of a draft, beside the batch, which is the case's for each replica, and cuts, which halve the units.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 4},
    "recompute": {"recompute": (True,)},
    "recompute, micro-batches": {"recompute": (True,), "micro_batches": 2},
    "amp": {"amp": "bf16"},
    "amp, micro-batches": {"amp": "bf16", "micro_batches": 4},
    "amp, recompute": {"amp": "bf16", "recompute": (True,)},
    "replicas": {"replicate": 2},
    "replicas, micro-batches": {"replicate": 2, "micro_batches": 4},
    "shard 1": {"replicate": 2, "shard": 1},
    "shard 2": {"replicate": 2, "shard": 2},
    "shard 3": {"replicate": 2, "shard": 3},
    "shard 3, recompute": {"replicate": 2, "shard": 3, "recompute": (True,)},
    "1f1b": {"stage": 2, "schedule": "1f1b", "micro_batches": 4},
    "1f1b, recompute": {"stage": 2, "schedule": "1f1b", "micro_batches": 4, "recompute": (True, True)},
    "gpipe": {"stage": 2, "schedule": "gpipe", "micro_batches": 4},
    "zero-bubble": {"stage": 2, "schedule": "zero-bubble", "micro_batches": 4},
    "1f1b, replicas": {"stage": 2, "replicate": 2, "schedule": "1f1b", "micro_batches": 4},
}


def draft_for(case: str, setting: str, units: int) -> Draft:
    options = SETTINGS[setting]
    cuts = tuple(units * at // options["stage"] for at in range(1, options["stage"])) if "stage" in options else ()
    return Draft(batch=CASES[case].samples * options.get("replicate", 1), cuts=cuts, **options)


def profiled(case: str, device: Literal["cpu", "cuda"]) -> Profile:
    chosen = CASES[case]
    return profile(chosen.model(), chosen.batch(chosen.samples), loss=chosen.loss, name=case, device=device)


def measured(case: str, draft: Draft, optimizer: str, units: tuple[str, ...], device: str) -> list[dict[str, Any]]:
    """Return every rank's answer, in rank order."""
    asked = {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
    worker = [str(Path(__file__).with_name("planner_memory_worker.py")), case, optimizer]
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "echelon", "run", "--procs", str(draft.ranks), "--log-dir", f"{folder}/log"]
        command = [*(run if draft.ranks > 1 else run[:1]), *worker, json.dumps(asked), json.dumps(units), folder]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        told = [Path(folder) / f"{rank}.json" for rank in range(draft.ranks)]
        if not all(path.exists() for path in told):
            raise SystemExit(
                f"{case}, {draft}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
            )
        return [json.loads(path.read_text()) for path in told]


def compare(case: str, setting: str, anatomy: Profile, optimizer: str, device: str) -> Iterator[dict[str, Any]]:
    """One row for each rank along the stage axis; of replicas the fullest counts."""
    draft = draft_for(case, setting, len(anatomy.names))
    room = workspace() if device == "cuda" else 0.0
    place: Place = "cuda" if device == "cuda" else "cpu"
    foretold = find_peak_moments(anatomy, draft, optimizer=optimizer, place=place, workspace=room)
    ranks = measured(case, draft, optimizer, anatomy.names, device)
    for stage, one in enumerate(moment.memory for moment in foretold):
        peers = [ranks[replica * draft.stage + stage] for replica in range(draft.replicate)]
        peak = max(peer["peak"] for peer in peers)
        yield {
            "case": case, "setting": setting, "stage": stage, "predicted_mb": round(one.total / MB, 2),
            "measured_mb": round(peak / MB, 2), "error": round(one.total / peak - 1, 4), "parts_mb": parts(one),
        }  # fmt: skip


def workspace() -> float:
    """Return the workspace of cuBLAS, by default: 32 MiB on Hopper, 8 MiB and a little elsewhere."""
    return (32.0 if torch.cuda.get_device_capability()[0] == 9 else 8.125) * 2**20


def parts(one: PredictedMemory) -> dict[str, float]:
    return {
        field.name: round(getattr(one, field.name) / MB, 2)
        for field in dataclasses.fields(one)
        if field.name != "limit"
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'case':14}{'setting':26}{'stage':>6}{'predicted MB':>14}{'measured MB':>13}{'error':>8}"
    for row in rows:
        yield (
            f"{row['case']:14}{row['setting']:26}{row['stage']:>6}{row['predicted_mb']:>14.2f}"
            f"{row['measured_mb']:>13.2f}{row['error']:>8.1%}"
        )
    errors = [abs(row["error"]) for row in rows]
    yield f"mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}, over {len(errors)} ranks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("benchmarks/planner/planner_memory.py --device cuda needs a GPU; torch sees none here")
    rows: list[dict[str, Any]] = []
    for case in args.cases or (ON_GPU if on_gpu else ON_CPU):
        anatomy = profiled(case, args.device)
        for setting in args.settings or SETTINGS:
            if on_gpu and draft_for(case, setting, len(anatomy.names)).ranks > torch.cuda.device_count():
                continue
            for row in compare(case, setting, anatomy, args.optimizer, args.device):
                rows.append(row)
                print(json.dumps(row), flush=True)
            if args.out:  # at every setting: a run that is cut short leaves what it has
                args.out.write_text(
                    json.dumps({"torch": torch.__version__, "device": args.device, "rows": rows}, indent=1)
                )
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
