"""The Plan: a pure function of model and strategy, the same through JSON, and comparable."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from zoo import SparseEmbedder, TiedTransformer, build

from echelon import annotate, pipeline, stage
from echelon.base.errors import UsageError
from echelon.plan import Plan, make_plan
from echelon.plan.plan import first_difference
from echelon.strategy import Reduction, Strategy
from echelon.strategy.annotations.annotate import collect


def plan_for(model: nn.Module, ranks: int = 2, **options: object) -> Plan:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_plan(model, {"main": optimizer}, Strategy(**options), ranks)


def test_a_plan_survives_json() -> None:
    plan = plan_for(TiedTransformer(), clip=1.0, gradient_merge=3)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert Plan.from_json(plan_for(TiedTransformer(), clip=2.0, gradient_merge=3).to_json()).hash != plan.hash


@pytest.mark.parametrize(("micro_batches", "said"), [(1, "statistics over all replicas"), (4, "of each micro-batch")])
def test_batch_norm_of_micro_batches_is_said(micro_batches: int, said: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    marks = collect(annotate(model, {"0": stage(0), "1": stage(1), "": pipeline(micro_batches)}))
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
    plan = make_plan(model, optimizers, Strategy(), 2, marks=marks, mesh={"replicate": 1, "stage": 2})
    assert [line for line in plan.describe().splitlines() if line.startswith("batch norm: ") and said in line]


def test_nonsense_is_no_plan() -> None:
    for text in ("", "{}", "[1]", '{"mesh": 3, "model": [], "buckets": []}'):
        with pytest.raises(UsageError):
            Plan.from_json(text)


def test_plan_trained_parameters_in_one_bucket_backward_order() -> None:
    """Every trained parameter is in exactly one bucket, in the order of backward."""
    model, _ = build("partial")
    plan = plan_for(model, reduction=Reduction(bucket_mb=0.0001, first_bucket_mb=0.0001))
    sent = [name for bucket in plan.buckets for name in bucket.parameters]
    assert sent == [name for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    assert len(plan.buckets) > 3


def test_buckets_keep_to_their_size_and_dtype() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    model[3].double()
    plan = plan_for(model, reduction=Reduction(bucket_mb=3 * 64 * 64 * 4 / 2**20, first_bucket_mb=0.001))
    assert [bucket.parameters for bucket in plan.buckets] == [
        ("7.weight",), ("6.weight", "5.weight", "4.weight"), ("3.weight",), ("2.weight", "1.weight", "0.weight")
    ]  # fmt: skip


def test_a_plan_says_of_buckets_what_is_known() -> None:
    def said(mesh: dict[str, int]) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        marks = collect(annotate(model, {"0": stage(0), "1": stage(1), "": pipeline(2)}))
        optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
        plan = make_plan(model, optimizers, Strategy(), math.prod(mesh.values()), marks=marks, mesh=mesh)
        return [line for line in plan.describe().splitlines() if line.startswith("gradients")]

    assert "gradients: mean over replicas, 1 bucket on 1 communicator" in plan_for(TiedTransformer()).describe()
    assert said({"replicate": 2, "stage": 2, "split": 1}) == ["gradients: mean over replicas"]
    assert said({"replicate": 1, "stage": 2, "split": 1}) == []


def test_sparse_gradients_travel_alone_and_tied_weights_once() -> None:
    plan = plan_for(SparseEmbedder())
    assert {b.parameters for b in plan.buckets if b.sparse} == {("words.weight",), ("bags.weight",)}
    tied = plan_for(TiedTransformer())
    assert "head.weight" not in {p.name for p in tied.model}


def test_plan_batch_norm_shared_only_with_several_ranks() -> None:
    """Batch norm is shared only if it is switched on and there are other ranks."""
    model, _ = build("convnet")
    assert plan_for(model, ranks=2).sync_batch_norm == ("body.1", "body.4")
    assert plan_for(model, ranks=1).sync_batch_norm == ()
    assert plan_for(model, ranks=2, sync_batch_norm=False).sync_batch_norm == ()


def test_difference_names_the_place() -> None:
    small, large = (json.loads(plan_for(nn.Sequential(nn.Linear(2, n))).to_json()) for n in (3, 4))
    assert first_difference(small, small) is None
    found = first_difference(large, small)
    assert found is not None
    assert "0.weight" in found
    assert "[4, 2] against [3, 2]" in found
