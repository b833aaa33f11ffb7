"""Plans are made for the precision and compilation of a run without a strategy, and are never slower than that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon import Strategy
from echelon.fastpath.policy import DeviceCapabilities
from echelon.plan.draft import Draft
from echelon.plan.prediction import PARTS, PredictedMemory, Prediction
from echelon.planner.apply.default_comparison import (
    compare_with_default,
    default_choice,
    doubt_of,
    with_rivals,
)
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.cost.system import ECHELON
from echelon.planner.default_run import FP32_EAGER, DefaultRun, capabilities_of, find_default_run
from echelon.planner.plan_search.search import search
from echelon.planner.plan_search.search_result import PlanChoice
from echelon.planner.profiling.builders import gpt

GPU = DeviceCapabilities(cuda=True, bf16=True, triton=True)
COMPILED = DefaultRun("bf16", "blocks", graphs=True)


def blocks(count: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


CASES: dict[str, tuple[nn.Module, Any, DeviceCapabilities, Strategy, str]] = {
    "blocks on a GPU": (blocks(), F.mse_loss, GPU, Strategy(), "bf16, compiled blocks"),
    "no blocks": (nn.Linear(8, 8), F.mse_loss, GPU, Strategy(), "bf16, compiled as a whole"),
    "a CPU": (blocks(), F.mse_loss, DeviceCapabilities(), Strategy(), "fp32, not compiled"),
    "an older GPU": (
        blocks(),
        F.mse_loss,
        DeviceCapabilities(cuda=True, triton=True),
        Strategy(),
        "fp32, compiled blocks",
    ),
    "no Triton": (blocks(), F.mse_loss, DeviceCapabilities(cuda=True, bf16=True), Strategy(), "bf16, not compiled"),
    "amp=False": (blocks(), F.mse_loss, GPU, Strategy(amp=False), "fp32, compiled blocks"),
    "fast=False": (blocks(), F.mse_loss, GPU, Strategy(fast=False), "fp32, not compiled"),
    "a loss that refuses 16 bits": (blocks(), nn.BCELoss(), GPU, Strategy(), "fp32, compiled blocks"),
    "16-bit weights": (blocks().bfloat16(), F.mse_loss, GPU, Strategy(), "fp32, compiled blocks"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_default_run_follows_the_fast_path(case: str) -> None:
    model, loss, machine, strategy, words = CASES[case]
    optimizers = {"": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert str(find_default_run(model, loss, optimizers, machine, strategy)) == words


def test_plans_that_cannot_be_compiled_are_known() -> None:
    plain = {"replicate": 4, "stage": 1, "split": 1, "shard": 0}
    for axis, size in (("stage", 2), ("split", 2), ("shard", 3)):
        assert COMPILED.compiles(**plain)
        assert not COMPILED.compiles(**plain | {axis: size})
    norms = find_default_run(normed(), F.cross_entropy, {}, GPU)
    assert norms.compiles(**plain | {"replicate": 1})
    assert not norms.compiles(**plain)  # statistics are exchanged inside forward
    assert not FP32_EAGER.compiles(**plain)


@pytest.mark.parametrize(
    ("machines", "bf16", "triton"), [("8xH100", True, True), ("4xV100", False, True), ("2xP100", False, False)]
)
def test_capabilities_are_those_of_every_kind(machines: str, bf16: bool, triton: bool) -> None:
    found = capabilities_of(Cluster.parse(machines, bench=False))
    assert (found.cuda, found.bf16, found.triton) == (True, bf16, triton)
    assert not capabilities_of(Cluster.parse("4xCPU", bench=False)).cuda


def test_a_search_plans_for_the_default_run() -> None:
    model, machines = gpt(4, 256, 4, 128, 1000), Cluster.parse("4xH100", bench=False)
    found = search(model, machines, batch=64, usual=COMPILED, system=COMPILED.runtime(ECHELON), keep=20)
    assert {choice.draft.amp for choice in found.best} == {"bf16"}
    for choice in found.best:
        draft = choice.draft
        axes = {"replicate": draft.replicate, "stage": draft.stage, "split": draft.split, "shard": draft.shard}
        assert draft.compile == COMPILED.compiles(**axes)
    assert "amp" not in [means.name for means in found.would_help]


def test_graphs_spare_the_host_on_one_device_alone() -> None:
    model, machines = gpt(2, 64, 4, 32, 500), Cluster.parse("2xH100", bench=False)
    captured = COMPILED.runtime(ECHELON)
    one = Draft(batch=8, amp="bf16", compile=True)
    assert predict(model, machines, one, system=captured).parts["host"] == pytest.approx(ECHELON.step + ECHELON.micro)
    assert predict(model, machines, one).parts["host"] > 1.2 * (ECHELON.step + ECHELON.micro)
    for other in (one.replaced(replicate=2), one.replaced(micro_batches=2)):
        assert predict(model, machines, other, system=captured).seconds == predict(model, machines, other).seconds


# ---- never slower ----


def choice(seconds: float, fits: bool = True, **draft: Any) -> PlanChoice:
    memory = PredictedMemory(8.0 if fits else 12.0, 0.0, 0.0, 0.0, limit=10.0)
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": seconds}
    return PlanChoice(Draft(batch=8, **draft), Prediction(seconds, parts, (memory,), ()))


PLAIN, FOUND = {"replicate": 2}, {"stage": 2, "cuts": (1,), "micro_batches": 2}


@pytest.mark.parametrize(
    ("best", "plain", "steps", "taken", "measure", "line"),
    [
        (choice(1.0, **PLAIN), choice(1.0, **PLAIN), 9, ["replicate 2"], False, "the plan of a run without a strategy"),
        (
            choice(1.0, **FOUND),
            choice(0.5, False, **PLAIN),
            9,
            ["stage 2"],
            False,
            "does not fit: a device needs 12 of",
        ),
        (choice(1.0, **FOUND), choice(1.5, **PLAIN), 10**6, ["stage 2"], False, "would take 1.5 s (+50%)"),
        (choice(1.0, **FOUND), choice(1.05, **PLAIN), 9, ["replicate 2"], False, "within the error"),
        (choice(1.0, **FOUND), choice(0.9, **PLAIN), 9, ["replicate 2"], False, "it is taken"),
        (choice(1.0, **FOUND), choice(1.15, **PLAIN), 9, ["stage 2"], False, "the found plan is taken"),
        (choice(1.0, **FOUND), choice(1.05, **PLAIN), 10**6, ["replicate 2", "stage 2"], True, "too close to tell"),
        (choice(1.0, **FOUND), choice(1.15, **PLAIN), 10**6, ["stage 2", "replicate 2"], True, "too close to tell"),
    ],
)
def test_a_found_plan_counts_only_if_it_beats_the_default(
    best: PlanChoice, plain: PlanChoice, steps: int, taken: list[str], measure: bool, line: str
) -> None:
    found = compare_with_default(best, plain, steps, measured=False, started=20.0)
    assert [str(each.draft).partition(",")[0] for each in found.choices] == taken
    assert found.measure is measure
    assert line in found.line


CLOSE, FAR = choice(1.1, split=2), choice(1.4, stage=2, cuts=(1,), micro_batches=4)


@pytest.mark.parametrize(
    ("plain", "steps", "taken"),
    [
        (choice(1.5, **PLAIN), 10**3, [FOUND, {"split": 2}]),  # the far one cannot be quicker by such an error
        (choice(1.01, **PLAIN), 10**6, [PLAIN, FOUND, {"split": 2}]),  # with the two that were to be measured anyway
        (choice(1.5, **PLAIN), 200, [FOUND]),  # the trials would take longer than they can save
    ],
)
def test_rivals_are_tried_where_that_costs_less_than_an_error(
    plain: PlanChoice, steps: int, taken: list[dict[str, Any]]
) -> None:
    against = compare_with_default(choice(1.0, **FOUND), plain, steps, measured=False, started=20.0)
    found = with_rivals(against, [*against.choices, CLOSE, FAR], steps, 0.15, started=20.0)
    assert [each.draft for each in found.choices] == [Draft(batch=8, **fields) for fields in taken]
    assert found.measure is (len(taken) > 1)
    assert (f"{len(taken)} plans are too close to tell" in found.line) is found.measure


def test_ranks_on_cpus_are_doubted_more_than_gpus() -> None:
    doubts = [doubt_of(Cluster.parse(words, bench=False)) for words in ("1xhere", "8xH100", "2xhere")]
    assert doubts == sorted(doubts)
    assert doubts[-1] > doubts[-2]


def test_the_default_choice_is_a_replica_on_every_device() -> None:
    model, machines = gpt(2, 64, 4, 32, 500), Cluster.parse("4xH100", bench=False)
    found = default_choice(model, machines, 10, COMPILED, {"system": ECHELON, "optimizer": "adam"})
    wanted = Draft(batch=10, replicate=4, amp="bf16", compile=True, shares=(3.0, 3.0, 2.0, 2.0))
    assert found.draft == wanted
    assert found.prediction.seconds == predict(model, machines, wanted).seconds
