"""Other runtimes: what they compute otherwise than this one, and what of their communication is hidden."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from echelon.base.dynamo_stub import without_dynamo
from echelon.plan.draft import Draft
from echelon.planner.cluster.calibration import CALIBRATED
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.known_systems import MEGATRON, MEGATRON_CORE, TORCHTITAN
from echelon.planner.cost.predict import predict
from echelon.planner.cost.runtime_units import is_changed, replayed_unit, run_by
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.model_costs import Kernel
from echelon.planner.profiling.builders import gpt
from echelon.planner.profiling.profile import Profile

BETWEEN = ("pointwise", "normalization", "reduction", "copy")


@pytest.fixture(scope="module")
def model() -> Profile:
    return gpt(3, 256, 4, 128, 500, dtype=torch.bfloat16)


def layer_kernels(model: Profile, system: System, split: int) -> list[Kernel]:
    units = run_by(system, model.sheet(2, split), model.sheet(2, 1)).units
    assert units[1] is units[2]  # equal layers stay one object
    return list(units[1].forward.kernels)


def moved(kernels: list[Kernel]) -> float:
    return sum(kernel.bytes * kernel.count for kernel in kernels if kernel.kind in BETWEEN)


def test_sequence_parallelism_divides_what_lies_between(model: Profile) -> None:
    system = System("s", sequence_split=True)
    whole = moved(list(model.sheet(2, 1).units[1].forward.kernels))
    assert moved(layer_kernels(model, system, 2)) == pytest.approx(whole / 2)
    assert moved(list(model.sheet(2, 2).units[1].forward.kernels)) > whole / 2
    unit = run_by(system, model.sheet(2, 2), model.sheet(2, 1)).units[1]
    kinds = [message.kind for message in unit.forward.messages]
    assert kinds == ["reduce_scatter", "all_gather"]


def test_products_take_another_dtype_inside_layers_alone(model: Profile) -> None:
    sheet = model.sheet(2, 1)
    units = run_by(System("s", product_dtype="float8"), sheet, sheet).units
    inside = {kernel.dtype for kernel in units[1].forward.kernels if kernel.kind == "product"}
    head = {kernel.dtype for kernel in units[-1].forward.kernels if kernel.kind == "product"}
    assert (inside, head) == ({"float8"}, {"bfloat16"})


def test_unaligned_products_cost_more(model: Profile) -> None:
    sheet = model.sheet(2, 1)
    head = run_by(System("s", unaligned=3.0), sheet, sheet).units[-1]  # 500 words are no multiple of 8
    before, after = (
        sum(k.flops for k in unit.forward.kernels if k.kind == "product") for unit in (sheet.units[-1], head)
    )
    assert after == pytest.approx(3 * before)


def test_selective_recompute_runs_parts_of_kinds_again(model: Profile) -> None:
    unit = model.sheet(2, 1).units[1]
    again = replayed_unit(unit, System("s", replayed_kinds={"product": 0.5, "attention": 0.0})).again
    assert again is not None
    flops = [sum(k.flops * k.count for k in way.kernels if k.kind == "product") for way in (unit.forward, again)]
    assert flops[1] == pytest.approx(flops[0] / 2)
    assert not any(kernel.kind == "attention" for kernel in again.kernels)


def test_this_runtime_computes_what_its_profile_says(model: Profile) -> None:
    assert not is_changed(ECHELON, 8)


def test_overlap_of_systems_hides_gradients_and_parameters(model: Profile) -> None:
    cluster = CALIBRATED["Megatron-Core"].on(Cluster.parse("4x8xH100", bench=False))
    draft = Draft(batch=64, replicate=32, shard=1)
    hidden = predict(model, cluster, draft, system=MEGATRON_CORE)
    bare = dataclasses.replace(MEGATRON_CORE, overlap=0.0, parameter_overlap=0.0)
    seen = predict(model, cluster, draft, system=bare)
    assert hidden.seconds < seen.seconds
    assert hidden.parts["parameters"] < seen.parts["parameters"]
    inside = Draft(batch=64, replicate=4, split=8, shard=1)
    split = predict(gpt(3, 256, 8, 128, 512, dtype=torch.bfloat16), cluster, inside, system=MEGATRON_CORE)
    assert split.parts["split"] > 0


def test_calibration_changes_figures_and_keeps_the_catalogue() -> None:
    cluster = Cluster.parse("2x8xA100", bench=False)
    found = CALIBRATED["Megatron-LM"].on(cluster)
    assert found.size == cluster.size
    assert found.kinds[0].memory == cluster.kinds[0].memory
    assert found.network.bandwidth < cluster.network.bandwidth
    assert found.network.rails == cluster.network.rails
    assert {system.name for system in (MEGATRON, MEGATRON_CORE, TORCHTITAN)} == set(CALIBRATED)


def test_stand_in_for_dynamo_leaves_no_trace() -> None:
    before = sys.modules.get("torch._dynamo")
    with without_dynamo():
        assert "torch._dynamo" in sys.modules
        torch.nn.init.normal_(torch.empty(2, device="meta"))
    assert sys.modules.get("torch._dynamo") is before
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert compiled(torch.ones(1, 2)).shape == (1, 2)
