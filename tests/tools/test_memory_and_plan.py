"""``echelon memory`` and the planner's cost model: the same bytes for the same plan, kind by kind and rank by rank.

Only resident tensors differ, and by little: ``memory`` counts every tensor of a rank, the cost model works with bytes
per entry. So ``memory`` adds step counts (4 bytes a parameter), rows left over where shards do not divide evenly, and
the last block of low_memory's scales.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.planner.planner_memory_models import CASES
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.cost.system import ECHELON
from echelon.planner.profiling.named_optimizers import named_optimizer
from echelon.planner.profiling.optimizer_state import with_state_of
from echelon.planner.profiling.profile import Profile, profile
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.memory_profile.peak import KINDS, PeakEstimator
from echelon.tools.memory_profile.requested_job import requested_job

MODELS = ("convnet", "transformer", "weights", "unet", "frozen", "resnet50")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replicas": {"procs": 2},
    "amp": {"amp": "bf16"},
    **{f"shard {level}": {"procs": 2, "shard": level} for level in (1, 2, 3)},
    "recompute": {"recompute": True},
    "pipeline": {"stages": 2, "micro_batches": 2},
    "pipeline, recompute": {"stages": 2, "micro_batches": 2, "recompute": True},
    "split": {"split": 2},
    "merge": {"merge": 2},
    "merge, shard 2": {"procs": 2, "merge": 2, "shard": 2},
    "merge, pipeline": {"merge": 2, "stages": 2, "micro_batches": 2},
    "low_memory": {"low_memory": True},
    "low_memory, replicas": {"procs": 2, "low_memory": True},
}
SPLIT = ("transformer", "weights", "frozen")  # models with layers that plans split by themselves
PAIRS = [(name, setting) for setting in SETTINGS for name in MODELS if setting != "split" or name in SPLIT]


@functools.cache
def profiled(name: str) -> tuple[Profile, PeakEstimator]:
    chosen = CASES["transformer" if name == "frozen" else name]
    model: nn.Module = chosen.model()
    if name == "frozen":
        next(iter(model.parameters())).requires_grad_(False)
    found = profile(model, chosen.batch(chosen.samples), loss=chosen.loss, name=name, device="cpu")
    return found, PeakEstimator(found, {"main": _optimizer(found)})


def _optimizer(found: Profile) -> torch.optim.Optimizer:
    return named_optimizer("adamw", found.model.parameters())


@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_memory_and_plan_count_the_same_bytes(name: str, setting: str) -> None:
    (found, peaks), options = profiled(name), SETTINGS[setting]
    copies = options.get("procs", 1)
    job = requested_job(MemoryOptions(name, device="cpu", **options, batch=found.batch // copies), found)
    spread = peaks.spread(job)
    system = with_state_of(ECHELON, _optimizer(found), found.model)
    predicted = predict(found, Cluster.parse(f"{job.procs}xCPU"), spread.plan, system=system, optimizer="adamw").memory
    assert {place.grids[0].coords["stage"] for place in spread.places} == set(range(len(predicted)))
    for place in spread.places:
        planned = predicted[place.grids[0].coords["stage"]]
        more = {kind: place.kinds[kind] - round(getattr(planned, kind)) for kind in KINDS}
        stepped = [name for name, held in place.resident.parameters.items() if held.optimizer]
        shapes = [found.model.get_parameter(name).shape for name in stepped]
        rows = 4 * sum(math.prod(shape[1:]) for shape in shapes) if "shard" in options else 0
        counts = 8 * len(stepped) if options.get("low_memory") else 4 * len(stepped)
        if rows or options.get("low_memory"):
            assert abs(more.pop("parameters")) <= rows
            assert abs(more.pop("optimizer")) <= counts + 2 * rows
        else:
            assert more.pop("optimizer") == counts
        assert not any(more.values()), more
