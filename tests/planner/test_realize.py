"""Every draft that a search may return runs, and equals one process on the same global batches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import errors, run
from matrix import MODELS, batch_of, loss_of
from torch import nn
from zoo import QUIET

import echelon
from echelon import Strategy, split
from echelon.base.errors import UsageError
from echelon.parallel.objective import Objective
from echelon.plan.draft import Draft
from echelon.plan.saved_plan import SavedPlan, SavedPrediction, shapes_of
from echelon.plan.stage_trace import record
from echelon.planner.apply.realize import realize
from echelon.planner.cost.draft_of_plan import draft_of

BATCH, STEPS = 12, 3
UNITS = {
    "transformer": (("blocks.0",), ("blocks.1",), ("blocks.2",), ("blocks.3",)),
    "convnet": (("body.0", "body.1"), ("body.2",), ("body.3",), ("body.4",), ("body.5",), ("head",)),
}
SPLITS = {
    "transformer": {name: split() for name in ("embed", "head", *(f"blocks.{i}" for i in range(4)))},
    "convnet": {"body.0": split(), "head": split()},
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def saved(name: str, model: nn.Module, **decided: Any) -> SavedPlan:
    draft = Draft(batch=BATCH, **decided)
    return SavedPlan(draft=draft, units=UNITS[name], splits=SPLITS[name], model=shapes_of(model), name=name)


def train(name: str, plan: SavedPlan | None) -> dict[str, Any]:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(model, loss=loss_of(name), optimizer=optimizer, plan=plan, log=QUIET)
    batches = [batch_of(name, step, BATCH) for step in range(STEPS)]
    data = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    losses, sizes = [], []
    for batch in engine.loader(data, global_batch=BATCH, shuffle=False):
        losses.append(float(engine.step(*batch)))
        sizes.append(len(batch[0]))
    shown = {"losses": losses, "weights": engine.whole_state(), "sizes": sizes, "plan": engine.plan}
    engine.close()
    return shown


def train_all(name: str, drafts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    echelon.init()
    return {key: train(name, saved(name, make(name), **decided)) for key, decided in drafts.items()}


def alone(name: str) -> dict[str, Any]:
    echelon.init()
    return train(name, None)


def check(name: str, drafts: dict[str, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    one, many = run(alone, name, ranks=1)[0], run(train_all, name, drafts, ranks=ranks)
    for mine in many:
        for key, found in mine.items():
            case = f"{name}, {key}"
            for came, wanted in zip(found["losses"], one["losses"], strict=True):
                assert came == pytest.approx(wanted, rel=1e-5), case
            for weight, wanted in one["weights"].items():
                came = found["weights"][weight]
                torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5, msg=f"{case} {weight}")
    return many


STAGED = {"stage": 2, "micro_batches": 4, "cuts": (1,)}
ON_TWO: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    "recompute": {"replicate": 2, "recompute": (True,)},
    "micro-batches": {"replicate": 2, "micro_batches": 3},
    "shard 1": {"replicate": 2, "shard": 1},
    "shard 2, micro-batches": {"replicate": 2, "shard": 2, "micro_batches": 2},
    "shard 3, recompute, micro-batches": {"replicate": 2, "shard": 3, "recompute": (True,), "micro_batches": 2},
    "uneven shares": {"replicate": 2, "shares": (2.0, 1.0), "micro_batches": 2},
    "split": {"split": 2},
    "split, recompute, micro-batches": {"split": 2, "recompute": (True,), "micro_batches": 2},
    "split of uneven widths": {"split": 2, "widths": (3.0, 1.0)},
    "gpipe": STAGED | {"schedule": "gpipe"},
    "1f1b, recompute in the first": STAGED | {"schedule": "1f1b", "recompute": (True, False)},
    "zero-bubble, recompute in the second": STAGED | {"schedule": "zero-bubble", "recompute": (False, True)},
    "interleaved": STAGED | {"schedule": "interleaved", "chunks": 2, "cuts": (1, 2, 3)},
    "the other way round": STAGED | {"schedule": "1f1b", "order": (1, 0)},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "replicate x stage": STAGED | {"replicate": 2, "schedule": "1f1b", "shard": 1},
    "replicate x stage, uneven": STAGED | {"replicate": 2, "schedule": "zero-bubble", "shares": (1.0, 2.0)},
    "replicate x split": {"replicate": 2, "split": 2, "shard": 2, "recompute": (True,)},
    "stage x split": STAGED | {"split": 2, "schedule": "1f1b", "recompute": (False, True), "order": (0, 2, 1, 3)},
    "shard 3 in groups": {"replicate": 4, "shard": 3, "within": 2, "recompute": (True,)},
    "shard 3 x stage": STAGED | {"replicate": 2, "schedule": "gpipe", "shard": 3},
}


def test_drafts_on_two_ranks_equal_one_process() -> None:
    many = check("transformer", ON_TWO, ranks=2)
    assert [set(mine["uneven shares"]["sizes"]) for mine in many] == [{8}, {4}]
    plan = many[0]["1f1b, recompute in the first"]["plan"]
    assert plan.recompute == (("blocks.0",),)
    assert many[0]["the other way round"]["plan"].order == (1, 0)


def test_drafts_with_batch_norm_on_two_ranks_equal_one_process() -> None:
    # micro-batches of batch norms are batches of their own, in one process as well: without them
    plain = {key: decided for key, decided in ON_TWO.items() if "micro_batches" not in decided}
    check(
        "convnet", plain | {"stage": {"stage": 2, "cuts": (2,), "schedule": "1f1b", "recompute": (True, True)}}, ranks=2
    )


def test_drafts_on_four_ranks_equal_one_process() -> None:
    check("transformer", ON_FOUR, ranks=4)


class Drawing:
    """The part of a profile that ``draft_of`` needs."""

    name, ties, splits, batch = "drawn", (), 2, BATCH

    def __init__(self, name: str) -> None:
        self.names = tuple(names[0] for names in UNITS[name])


@pytest.mark.parametrize("key", ON_TWO)
def test_a_plan_is_described_by_the_draft_it_was_made_from(key: str) -> None:
    model, decided = make("transformer"), ON_TWO[key]
    plan, marks = realize(
        saved("transformer", model, **decided), model, {"main": torch.optim.SGD(model.parameters(), lr=0.1)}, 2
    )
    if plan.mesh.get("stage", 1) > 1:
        call = Objective(model, loss_of("transformer"), None, torch.device("cpu"))
        stages = record(call, model, batch_of("transformer", 0, 2), marks.units)
        plan = dataclasses.replace(plan, stages=stages)
    assert draft_of(plan, Drawing("transformer")) == Draft(batch=BATCH, **decided)  # type: ignore[arg-type]


# ---- plan.json ----


def test_a_saved_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    model = make("transformer")
    for decided in ON_TWO.values():
        plan = saved("transformer", model, **decided)
        plan.save(tmp_path / "plan.json")
        assert SavedPlan.load(tmp_path / "plan.json") == plan


def damaged(text: str) -> dict[str, tuple[str, str]]:
    values = json.loads(text)

    def with_(**changed: Any) -> str:
        return json.dumps(values | changed)

    return {
        "cut off": (text[: len(text) // 2], "is not JSON"),
        "a list": ("[1]", "not an Echelon plan"),
        "of someone else": (json.dumps({"stages": 2}), "not an Echelon plan"),
        "of another version": (with_(version=9), "has version 9, this echelon reads 1"),
        "unknown name": (with_(colour="red"), "plan has no option 'colour'"),
        "wrong type": (with_(units="blocks"), "expected tuple of tuple"),
        "wrong draft": (with_(draft=values["draft"] | {"shard": 7}), "plan.draft(shard=7): expected 0, 1, 2 or 3"),
        "cuts beyond the units": (with_(draft=values["draft"] | {"cuts": [9]}), "do not divide 4 units"),
        "deep": ("[" * 100_000, "plan"),
    }


def test_a_damaged_or_foreign_file_is_one_line(tmp_path: Path) -> None:
    text = saved("transformer", make("transformer"), **STAGED).to_json()
    path = tmp_path / "plan.json"
    for case, (written, line) in damaged(text).items():
        path.write_text(written)
        with pytest.raises(UsageError, match=r"^plan '.*plan\.json': ") as caught:
            SavedPlan.load(path)
        assert line in str(caught.value), case
        assert "\n" not in str(caught.value), case
        assert len(str(caught.value)) < 400, case
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        SavedPlan.load(path)
    with pytest.raises(UsageError, match="there is no such file"):
        SavedPlan.load(tmp_path / "none.json")


# ---- mistakes ----


def ask(plan: SavedPlan | str, **options: Any) -> None:
    echelon.init()
    model = make("transformer")
    if options.pop("marked", False):
        echelon.annotate(model, {"head": split()})
    if options.pop("other", False):
        model.norm = nn.LayerNorm(16, elementwise_affine=False)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    echelon.distribute(model, loss=loss_of("transformer"), optimizer=optimizer, plan=plan, log=QUIET, **options)


def mistakes(cases: dict[str, tuple[SavedPlan, dict[str, Any]]]) -> dict[str, str]:
    found = {}
    for case, (plan, options) in cases.items():
        try:
            ask(plan, **options)
            found[case] = "none"
        except UsageError as error:
            found[case] = str(error)
    return found


def test_a_plan_that_does_not_belong_here_is_refused_in_one_line() -> None:
    model = make("transformer")
    two = saved("transformer", model, replicate=2)
    cases: dict[str, tuple[SavedPlan, dict[str, Any]]] = {
        "ranks": (saved("transformer", model, replicate=4), {}),
        "strategy": (two, {"strategy": Strategy(amp="bf16", clip=1.0)}),
        "marks": (two, {"marked": True}),
        "slices": (two, {"cluster": echelon.cluster(average=2)}),
        "model": (two, {"other": True}),
        "described": (SavedPlan(draft=two.draft, units=two.units), {}),
    }
    wanted = {
        "ranks": "the plan is for 4 ranks (replicate 4), this job has 2; start it with 4",
        "strategy": "the saved plan says how to train, and Strategy sets amp, clip; remove amp=, clip= from it",
        "marks": "and the model has marks; remove the marks",
        "slices": "remove cluster= from distribute()",
        "model": "parameter 'norm.weight' has shape (16,) there and is missing here; make a new plan",
        "described": "made from a model description without parameters",
    }
    for mine in run(mistakes, cases, ranks=2):
        for case, line in mine.items():
            assert wanted[case] in line, case
            assert "\n" not in line


def test_prediction_is_kept() -> None:
    model = make("transformer")
    plan = SavedPlan(
        draft=Draft(batch=4),
        units=UNITS["transformer"],
        model=shapes_of(model),
        predicted=SavedPrediction(seconds=0.25, parts={"compute": 0.25}, memory=(1e9,), limit=2e9),
    )
    assert SavedPlan.from_json(plan.to_json()).predicted == plan.predicted


def test_a_missing_file_is_named() -> None:
    line = errors(ask, "nowhere.json", ranks=1)[0]
    assert line == "UsageError: plan 'nowhere.json': there is no such file; 'echelon plan --save' writes one"
