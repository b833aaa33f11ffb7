"""One rank of the planner's memory benchmark: trains some steps of a case as a Draft says, and tells its peak."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import echelon
from benchmarks.planner.planner_memory_models import CASES, OPTIMIZERS
from echelon.plan.draft import Draft
from echelon.plan.partition import find_units

STEPS = 3  # optimizer state and what ranks learn about each other is there from the second on


def measure(case: str, draft: Draft, optimizer: str = "adam", units: tuple[str, ...] = ()) -> dict[str, Any]:
    """The most bytes this rank had at once in its last step, and where it was on the way (CPU)."""
    chosen = CASES[case]
    torch.manual_seed(0)
    device = echelon.init().device
    if device.type == "cuda":
        return _on_gpu(case, draft, optimizer, units)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        batch = chosen.batch(round(draft.batch / draft.replicate))
        engine = engine_for(case, draft, optimizer, units)
        for _ in range(STEPS - 1):
            engine.step(*batch)
        before = live_bytes()
        with torch.profiler.record_function("measured step"):
            engine.step(*batch)
    engine.close()
    return peak_of(profile, before)


def peak_of(profile: torch.profiler.profile, before: int) -> dict[str, Any]:
    """From the profiler's allocations: the most in the step, which began with ``before`` bytes.

    All of the run is recorded, or what was made before the step and freed in it would not be counted as freed; but
    what other threads free is not seen, hence ``before``.
    """
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == "measured step")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = before
    when = 0
    for at, change in changes:
        if step.start_ns() <= at <= step.end_ns():
            held += change
            if held > most:
                most, when = held, at
    around = [event for event in events if event.start_ns() <= when <= event.end_ns() and event.nbytes() == 0]
    names = [event.name() for event in sorted(around, key=lambda event: event.start_ns())]
    return {"peak": most, "before": before, "within": names[1:]}


def live_bytes() -> int:
    """All memory of tensors that anything refers to."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _on_gpu(case: str, draft: Draft, optimizer: str, units: tuple[str, ...]) -> dict[str, Any]:
    device = echelon.init().device
    batch = tuple(part.to(device) for part in CASES[case].batch(round(draft.batch / draft.replicate)))
    engine = engine_for(case, draft, optimizer, units)
    for _ in range(STEPS - 1):
        engine.step(*batch)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.step(*batch)
    torch.cuda.synchronize()
    found = {"peak": torch.cuda.max_memory_allocated(), "before": before}
    engine.close()
    return found


def engine_for(case: str, draft: Draft, optimizer: str, units: tuple[str, ...] = ()) -> echelon.Engine:
    chosen = CASES[case]
    model = chosen.model()
    names = units or tuple(find_units(model))
    echelon.annotate(model, marks(draft, names))
    return echelon.distribute(
        model,
        loss=chosen.loss,
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        strategy=strategy(draft, names),
        log=echelon.Log(console=False),
    )


def marks(draft: Draft, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if draft.micro_batches > 1 or draft.stages > 1:
        stages = None if draft.stages > 1 else 1  # where they are marked, they are not counted
        found[""] = echelon.pipeline(draft.micro_batches, draft.schedule or "1f1b", stages=stages)
    if draft.stages > 1:
        for stage, inside in enumerate(_by_stage(draft, names)):
            found |= {name: echelon.stage(stage) for name in inside}
    return found


def strategy(draft: Draft, names: tuple[str, ...]) -> echelon.Strategy:
    recomputed = [
        name
        for stage, inside in enumerate(_by_stage(draft, names))
        if draft.recompute and draft.recompute[stage]
        for name in inside
    ]
    return echelon.Strategy(
        amp=draft.amp,
        recompute=echelon.Recompute(checkpoints=tuple(recomputed)) if recomputed else None,
        shard=draft.shard or None,
        fp16_allreduce=draft.comm_dtype,
    )


def _by_stage(draft: Draft, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    edges = [0, *draft.cuts, len(names)]
    return [names[first:end] for first, end in itertools.pairwise(edges)]


def main() -> None:
    """``CASE OPTIMIZER DRAFT UNITS FOLDER``, the draft and the units as JSON; leaves FOLDER/rank.json."""
    case, optimizer, draft, units, folder = sys.argv[1:]
    torch.set_num_threads(1)
    asked = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(draft).items()}
    found = measure(case, Draft(**asked), optimizer, tuple(json.loads(units)))
    (Path(folder) / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
