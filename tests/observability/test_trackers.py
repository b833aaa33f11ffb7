"""Log(to=...): records go to functions and to libraries, and what fails there costs a line and not the run."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn

import echelon
from echelon import Log
from echelon.base.errors import UsageError
from echelon.observability.metrics import trackers
from echelon.observability.metrics.mlflow_tracker import flat

Records = list[dict[str, Any]]


def train(log: Log, checkpoint: str | None = None, steps: int = 4) -> echelon.Engine:
    """Train some steps beyond the checkpoint, if there is one; log a number in each."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    engine = echelon.distribute(
        net, loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.25), log=log, checkpoint=checkpoint
    )
    for step in range(steps):
        engine.step(torch.ones(4, 3), torch.full((4, 1), float(step)))
        engine.log(own=step)
    engine.evaluate([(torch.ones(1, 3), torch.ones(1, 1))])
    return engine


def written(directory: Path) -> Records:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# ---- functions ----


def on_ranks(directory: str) -> Records:
    echelon.init()
    seen: Records = []
    train(Log(dir=directory, every=2, to=[seen.append])).close()
    return seen


def test_a_function_receives_each_record_of_rank_0(tmp_path: Path) -> None:
    seen, nothing = run(on_ranks, str(tmp_path), ranks=2)
    assert nothing == []
    assert seen == written(tmp_path)
    assert [one["step"] for one in seen if "loss" in one] == [2, 4]
    assert [one["logged"] for one in seen if "logged" in one] == [{"own": float(i)} for i in range(4)]
    assert [one["eval_loss"] > 0 for one in seen if "eval_loss" in one] == [True]


def test_a_function_that_raises_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: Records = []

    def broken(record: dict[str, Any]) -> None:
        record.clear()  # its own copy
        raise SystemExit("no more")

    train(Log(dir=str(tmp_path), every=1, to=[broken, seen.append])).close()
    said = capsys.readouterr().out
    line = "log function broken: a record of step 1 is missing there; training goes on: SystemExit: no more"
    assert said.count(line) == 1
    assert "log function broken: 9 records are missing there" in said
    assert seen == written(tmp_path)


def test_a_function_that_blocks_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "WAITING", 3)
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    gate, seen = threading.Event(), []

    def slow(record: dict[str, Any]) -> None:
        gate.wait(30)
        seen.append(record["step"])

    began = time.monotonic()
    train(Log(dir=str(tmp_path), every=1, to=slow)).close()
    assert time.monotonic() - began < 15
    said = capsys.readouterr().out
    assert "log function slow: 3 records wait for it; later ones are dropped until it goes on" in said
    assert "log function slow: not done 0.3 s after the end; 3 records may be missing" in said
    # of 9 records 3 wait, and the thread has one in hand if it has begun before they came
    assert any(f"log function slow: {dropped} records are missing there" in said for dropped in (5, 6))
    assert len(written(tmp_path)) == 9
    gate.set()


# ---- libraries ----


class StandInRun:
    """A run of W&B, as far as the engine uses it."""

    def __init__(self, **options: Any) -> None:
        self.id, self.options = options.get("id", "abc"), options
        self.config: dict[str, Any] = {}
        self.logged: Records = []
        self.ended: list[int] = []
        self.defined: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, numbers: dict[str, Any]) -> None:
        self.logged.append(numbers)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


class StandInConfig(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
        assert allow_val_change, "a run that goes on has other settings than before"
        super().update(values)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[StandInRun]:
    """Install a module in place of wandb; return the runs that it begins."""
    runs: list[StandInRun] = []

    def init(**options: Any) -> StandInRun:
        made = StandInRun(**options)
        made.config = StandInConfig()
        runs.append(made)
        return made

    module: Any = ModuleType("wandb")
    module.run, module.init = None, init
    module.__spec__ = sys.__spec__  # as of an installed module
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_gets_settings_numbers_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_TEST_TOKEN", "secret")
    runs = stand_in(monkeypatch)
    log = Log(dir=str(tmp_path), every=2, to=[("wandb", {"project": "digits"})])
    train(log).close()
    (only,) = runs
    assert only.options == {"project": "digits"}
    assert only.config["settings"]["shard"] is None
    assert only.config["plan"]["mesh"] == {"replicate": 1}
    assert only.config["torch"] == torch.__version__
    assert "secret" not in str(only.config)
    assert not {"ranks", "predicted"} & only.config.keys()
    assert only.defined == [("step", None), ("*", "step")]
    records = written(tmp_path)
    assert [one["step"] for one in only.logged] == [one["step"] for one in records]
    assert [one["train/loss"] for one in only.logged if "train/loss" in one] == [
        one["loss"] for one in records if "loss" in one
    ]
    assert [one["own"] for one in only.logged if "own" in one] == [0.0, 1.0, 2.0, 3.0]
    assert only.ended == [0]


def test_training_that_goes_on_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = stand_in(monkeypatch)
    log = Log(dir=str(tmp_path / "run"), every=1, to=["wandb"])
    for fresh in (True, False):
        engine = train(log, checkpoint=str(tmp_path / "saved"))
        if fresh:
            engine.save(wait=True)
        engine.close()
    assert [one.options for one in runs] == [{}, {"id": "abc", "resume": "allow"}]
    assert [one["step"] for one in runs[1].logged if "train/loss" in one] == [5, 6, 7, 8]
    train(log).close()  # from the start: another run
    assert runs[2].options == {}


def test_a_failure_is_told_and_a_run_of_the_script_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = stand_in(monkeypatch)
    engine = train(Log(to="wandb", every=2, console=False))  # without a directory
    engine._run.exit._run(ValueError("it failed"))
    assert runs[0].ended == [1]
    assert runs[0].config["settings"]["shard"] is None
    sys.modules["wandb"].run = mine = StandInRun()
    mine.config = StandInConfig()
    train(Log(to="wandb", every=2, console=False)).close()
    assert len(runs) == 1
    assert mine.logged
    assert not mine.ended


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_a_missing_library_is_said_and_the_run_goes_on(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    train(Log(dir=str(tmp_path), to=[library, "jsonl"], every=2)).close()
    line = f"echelon: {library}: not installed, so it gets no records; pip install 'echelon[{library}]'"
    assert capsys.readouterr().out.count(line) == 1
    assert len(written(tmp_path)) == 7


def test_event_files_hold_norm_and_own_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(Log(dir=str(tmp_path), every=2, to=["tensorboard"], grad_norm=True)).close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("logged/own")] == [
        (i + 1, float(i)) for i in range(4)
    ]
    norms = [one["gradient_norm"] for one in written(tmp_path) if "gradient_norm" in one]
    assert [event.value for event in events.Scalars("train/gradient_norm")] == pytest.approx(norms)
    assert len(norms) == 2


@pytest.mark.parametrize(
    ("to", "line"),
    [
        ("tensorbord", r"Log\(to=...\): unknown destination 'tensorbord'; did you mean 'tensorboard'"),
        ([("mlflow", {"run": "x"})], r"mlflow has no option 'run'; known: experiment_name, run_name, tags"),
        ([("jsonl", {"path": "x"})], "jsonl has no option 'path'; it takes none"),
        ([3], "3 is no destination; give a name"),
        (["jsonl"], r"Log\(to='jsonl'\) needs a directory"),
        (["tensorboard"], r"Log\(to='tensorboard'\) needs a directory"),
    ],
)
def test_a_wrong_destination_is_one_line(to: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        train(Log(to=to), steps=0)


def test_settings_become_parameters_by_dotted_names() -> None:
    found = dict(flat({"plan": {"mesh": {"replicate": 2}, "a*b": None}, "said": "x" * 600}))
    assert found == {"plan.mesh.replicate": "2", "plan.a_b": "None", "said": "x" * 500}
