"""Tensor parallelism without marks: models with a plan are split by it, and equal one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from beside import Case, check, optimizer_of
from counting import Collectives
from harness import run
from planned_models import PLAN, PlannedModel, UnplannedModel, words
from torch import nn
from zoo import QUIET

import echelon
from echelon import Strategy
from echelon.base.errors import UsageError
from echelon.planner.apply.tensor_marks import annotate_tensor
from echelon.strategy.annotations.annotate import collect

Model = partial(partial, PlannedModel)


def test_models_split_by_their_plan_equal_one_process() -> None:
    cases = [
        Case(Model(tied=True), words, strategy={"split": 2}),
        Case(Model(fused=True), words, strategy={"split": 2}),
        Case(fused, words, strategy={"split": 2}),
        Case(Model(routed=True), words, strategy={"split": 2, "recompute": True}),
        Case(by_structure, words, strategy={"split": 2}),
        Case(Model(key_heads=1), words, strategy={"split": 2}),
        Case(Model(heads=3, key_heads=3), words, strategy={"split": 2}),
        Case(Model(key_heads=1), words, strategy={"stages": 2}),
    ]
    check(cases, ranks=2)


def test_splits_stages_and_shards_together_equal_one_process() -> None:
    cases = [
        Case(Model(), words, strategy={"split": 2, "shard": 3}),
        Case(Model(fused=True, tied=True), words, strategy={"split": 2, "stages": 2}),
        Case(Model(routed=True), words, strategy={"split": 4}),
        Case(Model(tied=True), words, strategy={"stages": {"stages": 2, "micro_batches": 2}, "shard": 3}),
    ]
    check(cases, ranks=4)


def sent() -> dict[str, tuple[int, int]]:
    """Return how many tensors a step sums and gathers over the split."""
    echelon.init()
    made = {"grouped": Model(), "one": Model(key_heads=1), "tied": Model(tied=True)}
    return {name: sent_by(make()) for name, make in made.items()} | {
        "fused": sent_by(fused()),
        "structure": sent_by(by_structure()),
    }


def fused() -> nn.Module:
    """Return a model whose fused projection of queries, keys and values is split by its parts."""
    marks = {"model.layers.*.attn.qkv": echelon.split(parts=[32, 16, 16])}
    kept = {name: style for name, style in PLAN.items() if not name.endswith("qkv")}
    model = PlannedModel(fused=True)
    model._tp_plan = {"head": "colwise"} | {f"model.{name}": style for name, style in kept.items()}
    return echelon.annotate(echelon.annotate(model, marks), "tensor")


def by_structure() -> nn.Module:
    """Return a model with fused projections of GPT-2's kind, marked by its structure."""
    return echelon.annotate(UnplannedModel(), "tensor", sample=words(0))


def sent_by(model: nn.Module) -> tuple[int, int]:
    engine = echelon.distribute(model, optimizer=optimizer_of(model), strategy=Strategy(split=2), log=QUIET)
    engine.step(**words(0))
    with Collectives() as seen:
        engine.step(**words(1))
    return seen.count["all_reduce"], seen.count["all_gather"]


def test_a_layer_costs_two_sums_each_way_and_no_gather() -> None:
    """Each of 2 layers sums after attention and MLP, in backward before them, and the gradient of the queries' norm.

    Embedding and head add a sum each, the loss of split classes gathers once, the engine twice. With one head of keys,
    the gradients of whole keys and values are gathered in each layer.
    """
    expected = {"grouped": (12, 3), "one": (12, 7), "tied": (12, 3), "fused": (12, 3), "structure": (8, 2)}
    assert run(sent, ranks=2) == [expected, expected]


def test_the_line_names_source_layers_and_what_stays_whole() -> None:
    line = annotate_tensor(PlannedModel(key_heads=1), 2).line(2)
    assert line.startswith("split over 2 ranks by PlannedModel.tp_plan: 10 modules (")
    assert "model.layers.*.attn.k stays whole: 1 key heads for 2 ranks" in line


def test_a_base_model_is_split_by_its_configuration() -> None:
    model = PlannedModel().model
    echelon.annotate(model, "tensor")
    splits = collect(model).splits
    assert splits["layers.1.mlp.gate_up"] == echelon.split("column", parts=2)
    assert splits["layers.0.attn.o"] == echelon.split("row")


def test_structure_finds_pairs_and_parts_of_fused_layers() -> None:
    column, row, fused_column = echelon.split("column"), echelon.split("row"), echelon.split("column", parts=3)
    block = {"c_attn": fused_column, "c_proj": row, "mlp.c_fc": column, "mlp.c_proj": row}
    expected = {f"blocks.{at}.{name}": mark for at in (0, 1) for name, mark in block.items()}
    assert collect(by_structure()).splits == expected


def test_a_model_without_plan_and_batch_says_what_to_give() -> None:
    with pytest.raises(UsageError, match="give one as sample="):
        echelon.annotate(UnplannedModel(), "tensor")


def test_a_model_without_layers_to_split_says_so() -> None:
    with pytest.raises(UsageError, match="no layers to split by"):
        echelon.annotate(nn.Sequential(nn.ReLU()), "tensor", sample=(torch.ones(2, 2),))


def test_stages_beside_other_marks_are_refused() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    echelon.annotate(model, {"": echelon.pipeline(stages=3)})
    with pytest.raises(UsageError, match="the model is marked with 3 stages"):
        echelon.distribute(model, optimizer_of(model), nn.functional.mse_loss, strategy=Strategy(stages=2), log=QUIET)
