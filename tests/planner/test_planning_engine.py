"""The stand-in for the engine of a script that is only planned or weighed, and the state of the script's optimizer."""

from __future__ import annotations

import inspect
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor, nn

from echelon.base.environment import PLAN_ONLY
from echelon.base.errors import UsageError
from echelon.engine.engine import Engine
from echelon.planner.cost.system import ECHELON
from echelon.planner.profiling.optimizer_state import bytes_an_entry
from echelon.planner.profiling.profile import profile
from echelon.tools.memory_profile import memory_options as memory
from echelon.tools.memory_profile.footprint_engine import FootprintEngine
from echelon.tools.plan_report import plan_options as plans
from echelon.tools.plan_report.make_report import make_report
from echelon.tools.plan_report.model_source import ModelSource
from echelon.tools.plan_report.plan_script import ask
from echelon.tools.plan_report.planning_engine import PlanningEngine

PUBLIC = [name for name in dir(Engine) if not name.startswith("_")]
METHODS = [name for name in PUBLIC if callable(getattr(Engine, name))]


@pytest.mark.parametrize("kind", [PlanningEngine, FootprintEngine])
def test_stand_in_has_signatures_of_the_engine(kind: type[PlanningEngine]) -> None:
    own = [name for name in dir(kind) if not name.startswith("_")]
    assert {"step", "backward", "update", "resume"} <= set(own) <= set(METHODS)
    for name in own:
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Engine, name)), name


def _signatures() -> dict[str, str | None]:
    """By the public name of an Engine, how the stand-in is called by it; None: it has no such name."""
    model = nn.Linear(4, 2)
    engine = PlanningEngine({}, model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
    return {name: str(inspect.signature(getattr(engine, name, lambda: None))) for name in METHODS}


def test_stand_in_answers_to_all_names_of_the_engine() -> None:
    [found] = run(_signatures, ranks=1)
    for name in METHODS:
        whole = inspect.signature(getattr(Engine, name))
        told = whole if isinstance(vars(Engine).get(name), staticmethod) else _without_self(whole)
        assert found[name] == str(told), name


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


# ---- scripts ----

SCRIPT = """
import torch, echelon
from torch import nn
echelon.init()
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
optimizer = torch.optim.{optimizer}(net.parameters())
rate = torch.optim.lr_scheduler.StepLR(optimizer, 1)
engine = echelon.distribute(net, loss=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=rate)
x, y = torch.randn(16, 8), torch.randint(0, 2, (16,))
{loop}
raise AssertionError("it went on")
"""
LOOPS = {
    "step": "engine.step(x, y, samples=20)",
    "own": "engine.backward(nn.functional.cross_entropy(net(x), y), samples=16)",
    "update": "engine.update(samples=16)",
}


def _answered(room: str, scripts: list[str]) -> list[tuple[Any, Any]]:
    """Return each script's answer to ``plan`` and to ``memory``."""
    script, question, answer = (Path(room, name) for name in ("train.py", "question.json", "answer.json"))
    asked = plans.PlanOptions(model=str(script), cluster="2xV100", keep=1).to_dict()
    weighed = {"footprint": memory.MemoryOptions(model=str(script), device="cpu").to_dict()}
    found = []
    for text in scripts:
        script.write_text(text)
        answers = []
        for wanted in ({"options": asked, "orders": {}}, weighed):
            question.write_text(json.dumps({**wanted, "answer": str(answer)}))
            os.environ[PLAN_ONLY] = str(question)
            with pytest.raises(SystemExit):
                runpy.run_path(str(script), run_name="__main__")
            answers.append(json.loads(answer.read_text()))
        found.append(tuple(answers))
    return found


def test_scripts_are_answered_whatever_optimizer_and_arguments(tmp_path: Path) -> None:
    """``samples=`` is known, Adadelta with a scheduler is planned, and an own loop is refused in one line."""
    scripts = [SCRIPT.format(optimizer="Adadelta", loop=loop) for loop in LOOPS.values()]
    [(stepped, own, update)] = run(_answered, str(tmp_path), scripts, ranks=1)
    planned, weighed = stepped
    entries = 8 * 32 + 32 + 32 * 2 + 2
    assert planned["report"]["asked"]["optimizer"] == "adadelta"
    assert planned["report"]["batch"] == 16
    # square_avg, acc_delta; and a count of steps for each parameter, which plans leave out
    [best] = planned["report"]["options"]
    assert best["prediction"]["memory"][0]["optimizer"] == 8 * entries
    assert weighed["footprint"]["kinds"]["optimizer"] == 8 * entries + 4 * 4
    for answer in (*own, *update):
        assert answer["error"].startswith("a custom loop (engine.backward and engine.update)")


def test_words_of_a_script_are_shown_only_if_it_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers = "import json, os; p = json.load(open(os.environ['ECHELON_PLAN_ONLY']))['answer']\n"
    assert PLAN_ONLY == "ECHELON_PLAN_ONLY"
    (tmp_path / "talks.py").write_text(f"print('a whole config')\n{answers}json.dump({{'ok': 1}}, open(p, 'w'))")
    (tmp_path / "fails.py").write_text("print('a whole config'); raise KeyError('no such tokenizer')")
    assert ask(str(tmp_path / "talks.py"), [], {}) == {"ok": 1}
    assert "a whole config" not in "".join(capfd.readouterr())
    with pytest.raises(UsageError, match="failed with exit code 1 before its first batch; its output is above"):
        ask(str(tmp_path / "fails.py"), [], {})
    said = capfd.readouterr().err
    assert "a whole config" in said
    assert "KeyError: 'no such tokenizer'" in said


# ---- optimizers ----

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plan_counts_the_state_of_any_optimizer(name: str) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2)), (torch.randn(4, 8), torch.randn(4, 2))
    entries = sum(parameter.numel() for parameter in model.parameters())
    given = OPTIMIZERS[name](model.parameters())
    found = bytes_an_entry(given, model)
    nn.functional.mse_loss(model(x), y).backward()
    given.step()
    kept = [value for state in given.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert found * entries == sum(value.numel() * value.element_size() for value in kept if value.dim())
    known = type(given).__name__.lower()
    if known in ECHELON.state and name not in ("amsgrad", "centered", "momentum"):
        assert found == ECHELON.state[known]


def test_plan_reckons_with_settings_of_the_scripts_optimizer() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2))
    looked = profile(model, (torch.randn(4, 8), torch.randn(4, 2)), loss=nn.functional.mse_loss, device="cuda")
    asked = plans.PlanOptions(model="train.py", cluster="V100", optimizer="adamw", keep=1)
    entries = sum(parameter.numel() for parameter in model.parameters())
    for options, size in (({}, 8), ({"amsgrad": True}, 12)):
        source = ModelSource(looked, model, torch.optim.AdamW(model.parameters(), **options))
        report = make_report(asked, asked.machines(), source, plans.PlanReportOptions())
        assert report.choice.prediction.memory[0].optimizer == size * entries
