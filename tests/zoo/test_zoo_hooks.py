"""Hooks do what their parameters say, on every rank alike, and an error in one names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from torch.utils.data import TensorDataset

import echelon
from echelon.base.errors import UsageError
from echelon.observability.trace import summarize
from echelon.zoo.entry import Data, Request
from echelon.zoo.train.hooks import Hook, Hooks
from echelon.zoo.train.parameters import PARAMETERS

RATE, BEST = 0.05, 0.3  # training pulls the weight from 0 to 1, and the test part likes it best on the way


def request(**values: Any) -> Request:
    return Request({one.name: one.default for one in PARAMETERS} | values, "regress")


class SmallRun:
    """A run around a real engine: one weight, whose course is known."""

    def __init__(self, directory: str, **values: Any) -> None:
        self.request, self.directory, self.results = request(**values), Path(directory), dict[str, Any]()
        self.reason, self.said = "", list[str]()
        self.hooks = Hooks(self.request)
        echelon.init()
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        self.engine = echelon.distribute(
            model,
            loss=F.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            log=self.hooks.log(progress=False),
            checkpoint=self.hooks.checkpoint(dir=str(self.directory / "checkpoints")),
        )
        self.data = Data(train=(torch.ones(8, 1), torch.ones(8, 1)), test=_judge())
        self.loader = self.engine.loader(self.data.train, batch_size=8 // echelon.world_size())
        self.total_steps = None

    @property
    def steps(self) -> int:
        return self.engine.steps

    def stop(self, reason: str) -> None:
        self.reason = reason

    def say(self, line: str) -> None:
        self.said.append(line)

    def evaluate(self) -> dict[str, float]:
        return self.engine.evaluate(self.data.test)

    def train(self, most: int = 60) -> SmallRun:
        self.hooks.begin(self)
        while not self.reason and self.steps < most:
            for batch in self.loader:
                self.hooks.after_step(self, self.engine.step(*batch))
        self.hooks.end(self)
        return self


def _judge() -> TensorDataset:
    return TensorDataset(torch.ones(4, 1), torch.full((4, 1), BEST))


def evaluations(every: int, last: int) -> list[tuple[int, float]]:
    """By hand: each step takes the weight 2 * RATE of its way to 1."""
    weights = [1 - (1 - 2 * RATE) ** step for step in range(last + 1)]
    return [(step, (weights[step] - BEST) ** 2) for step in range(every, last + 1, every)]


# ---- stopping ----


def stopped(directory: str, **values: Any) -> tuple[int, str, list[dict[str, float]]]:
    run = SmallRun(directory, **values).train()
    run.engine.close()
    return run.steps, run.reason, run.results.get("evaluations", [])


def test_stop_at_step_ends_the_run_and_0_leaves_it_to_others(tmp_path: Path) -> None:
    """The run stops at stop_at_step; 0 leaves the end to the other limits."""
    ends = [run(stopped, str(tmp_path), stop_at_step=at, ranks=1)[0][:2] for at in (7, 0)]
    assert ends == [(7, "stop_at_step is 7"), (60, "")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_early_stopping_ends_all_ranks_at_the_computed_step(ranks: int, tmp_path: Path) -> None:
    results = run(
        stopped, str(tmp_path), hooks="EarlyStopHook", eval_every_n_iters=2, early_stop_patience=3, ranks=ranks
    )
    judged = evaluations(2, 60)
    best = min(range(len(judged)), key=lambda at: judged[at][1])
    for steps, reason, found in results:
        assert steps == judged[best + 3][0]
        assert f"3 evaluations without a lower loss than {judged[best][1]:.4g} at step {judged[best][0]}" == reason
        assert [(one["step"], one["loss"]) for one in found] == [
            (step, pytest.approx(loss, rel=1e-4, abs=1e-9)) for step, loss in judged[: best + 4]
        ]


def resumed(directory: str) -> tuple[int, list[int]]:
    options: dict[str, Any] = {"hooks": "EarlyStopHook", "eval_every_n_iters": 2, "early_stop_patience": 3}
    run = SmallRun(directory, **options, save_checkpoints_steps=5).train(7)  # evaluated at 6, saved at 5
    run.engine.close()
    again = SmallRun(directory, **options).train()
    again.engine.close()
    return again.steps, [one["step"] for one in again.results["evaluations"]]


def test_patience_after_a_resume_counts_no_evaluation_twice(tmp_path: Path) -> None:
    """Patience continues after a resume and counts no evaluation twice."""
    judged = evaluations(2, 60)
    best = min(range(len(judged)), key=lambda at: judged[at][1])
    end = judged[best + 3][0]
    assert run(resumed, str(tmp_path), ranks=2) == [(end, list(range(2, end + 1, 2)))] * 2


def test_early_stopping_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^EarlyStopHook: .* there are none; give --eval_every_n_iters N$"):
        Hooks(request(hooks="EarlyStopHook")).begin(_Begins())  # type: ignore[arg-type]


class _Begins:
    """The part of a run that hooks read before they read an engine."""

    request = request(hooks="EarlyStopHook")
    steps = 0


# ---- lines, checkpoints ----


def printed(directory: str, capture: str, **values: Any) -> None:
    import contextlib

    with open(capture, "w") as file, contextlib.redirect_stdout(file):
        SmallRun(directory, **values).train(6).engine.close()


@pytest.mark.parametrize(("hooks", "lines"), [("LoggingTensorHook", 3), ("", 0)])
def test_steps_are_printed_where_the_logging_hook_is(hooks: str, lines: int, tmp_path: Path) -> None:
    run(printed, str(tmp_path), str(tmp_path / "out"), hooks=hooks, log_loss_every_n_iters=2, ranks=1)
    text = (tmp_path / "out").read_text().splitlines()
    assert len([line for line in text if line.startswith("step ")]) == lines
    assert any(line.startswith("echelon: ") for line in text), "what the run says of itself stays"


def test_checkpoints_come_when_asked_for(tmp_path: Path) -> None:
    run(stopped, str(tmp_path), stop_at_step=7, save_checkpoints_steps=3, ranks=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


# ---- timelines ----


def profiled(directory: str) -> list[str]:
    run = SmallRun(directory, stop_at_step=8, profile_every_n_iters=3, profile_at_task=1).train()
    run.engine.close()
    return run.said


def test_timelines_of_chosen_steps_are_written_by_chosen_rank(tmp_path: Path) -> None:
    said, _ = run(profiled, str(tmp_path), ranks=2)
    names = ["step-000003-rank-1.json", "step-000006-rank-1.json"]
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == names
    assert [line.rpartition("/")[2] for line in said] == names
    for name in names:
        events = json.loads((tmp_path / "timeline" / name).read_text())["traceEvents"]
        losses = [event for event in events if event.get("name") == "aten::mse_loss"]
        assert len(losses) == 1, "the timeline is of one step"
        assert {"aten::mse_loss_backward", "aten::mul_"} & {event.get("name") for event in events}


def recorded(directory: str) -> int:
    run = SmallRun(directory, stop_at_step=5, profile_every_n_iters=2).train()
    run.engine.close()
    return run.steps


def test_without_a_rank_named_all_ranks_are_in_one_timeline(tmp_path: Path) -> None:
    assert run(recorded, str(tmp_path), ranks=2) == [5, 5]
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == ["step-000002", "step-000004"]
    figures = summarize(tmp_path)
    assert figures["steps"] == [4, 4], "the newest is shown"
    assert [row["rank"] for row in figures["ranks"]] == [0, 1]


def misplaced(directory: str) -> str:
    with pytest.raises(UsageError) as caught:
        SmallRun(directory, profile_every_n_iters=3, profile_at_task=2).train()
    return str(caught.value)


def test_a_rank_that_is_not_there_cannot_be_profiled(tmp_path: Path) -> None:
    lines = run(misplaced, str(tmp_path), ranks=2)
    assert lines == ["ProfilerHook: --profile_at_task 2: this job has 2 ranks; give one from 0 to 1"] * 2


# ---- users' hooks ----

OWN = """
from echelon.zoo.train.hooks import Hook

class Count(Hook):
    def begin(self, run):
        run.results["losses"] = []
    def after_step(self, run, loss):
        run.results["losses"].append(float(loss))
    def end(self, run):
        run.results["ended"] = run.steps

class Fails(Hook):
    def after_step(self, run, loss):
        raise ValueError("no\\nsuch thing")

class Needs(Hook):
    def __init__(self, what): ...

not_a_hook = dict
"""


def own(directory: str, hook: str) -> Any:
    run = SmallRun(directory, hooks=f"StopAtStepHook, {directory}/own.py:{hook}", stop_at_step=3)
    try:
        return run.train().results
    except UsageError as error:
        return str(error)


def test_a_hook_of_ones_own_sees_every_loss(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = run(own, str(tmp_path), "Count", ranks=1)[0]
    assert found == {"losses": [pytest.approx((1 - 2 * RATE) ** (2 * step)) for step in range(3)], "ended": 3}


def test_a_hook_that_fails_is_named_with_its_step(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = run(own, str(tmp_path), "Fails", ranks=1)[0]
    assert (
        found
        == f"{tmp_path}/own.py:Fails, step 1: failed with ValueError: no such thing; mend the hook, or leave it out"
    )


@pytest.mark.parametrize(
    ("hooks", "line"),
    [
        ("StopAtStepHok", "there is no hook 'StopAtStepHok'; did you mean 'StopAtStepHook'?"),
        ("{here}/own.py:Count, {here}/own.py:Cuont", "there is no callable 'Cuont' in"),
        ("{here}/own.py:Needs", "a hook is made without arguments"),
        ("{here}/own.py:not_a_hook", "gave dict; it must be an echelon.zoo.train.hooks.Hook"),
        ("{here}/none.py:Count", "no file at"),
    ],
)
def test_what_is_no_hook_is_refused_in_one_line(hooks: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UsageError) as caught:
        Hooks(request(hooks=hooks.format(here=tmp_path)))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_of_steps_below_0_is_refused() -> None:
    with pytest.raises(UsageError, match="--log_loss_every_n_iters -1 is no number of steps"):
        Hooks(request(log_loss_every_n_iters=-1)).log()


def test_a_number_above_0_implies_its_hook() -> None:
    hooks = Hooks(request(hooks="StopAtStepHook", eval_every_n_iters=5, save_checkpoints_steps=2))
    assert list(hooks.by_name) == ["EvaluationHook", "StopAtStepHook", "CheckpointSaverHook"]
    assert hooks.checkpoint(dir="x").every == 2
    assert all(isinstance(hook, Hook) for hook in hooks.by_name.values())


def test_merged_gradients_take_several_turns_for_one_evaluation() -> None:
    from echelon.zoo.train.hooks.hook import EveryNSteps

    every = EveryNSteps(request(eval_every_n_iters=2), "eval_every_n_iters")
    assert [every.due(step) for step in (1, 2, 2, 3, 4, 4)] == [False, True, False, False, True, False]
