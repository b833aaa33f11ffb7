"""Output of a run: console lines, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn

import echelon
from echelon import Log, Strategy
from echelon.base.errors import UsageError
from echelon.observability.metrics.sinks import summary
from echelon.observability.runlog.step_phases import PHASES


def train(directory: str, tensorboard: bool = False, merge: int = 1) -> None:
    echelon.init()
    net = nn.Linear(3, 1)
    engine = echelon.distribute(
        net,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.25),
        strategy=Strategy(gradient_merge=merge),
        log=Log(dir=directory, every=2, tensorboard=tensorboard),
    )
    loader = engine.loader((torch.randn(20, 3), torch.randn(20, 1)), batch_size=4 // echelon.world_size())
    for _ in loader.epochs(2):
        for x, y in loader:
            engine.step(x, y)
    engine.evaluate([(torch.ones(1, 3), torch.ones(1, 1))])
    engine.close()


def records(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_json_lines_hold_every_figure(ranks: int, tmp_path: Path) -> None:
    run(train, str(tmp_path), ranks=ranks)
    *steps, evaluation = records(tmp_path)
    assert [record["step"] for record in steps] == [2, 4, 6, 8, 10]
    for record in steps:
        assert record["total"] == 10
        assert record["learning_rate"] == 0.25
        assert record["examples_per_s"] > 0
        assert set(PHASES) <= record.keys()
    assert evaluation["eval_loss"] >= 0


def test_merged_steps_count_once_and_their_examples_all(tmp_path: Path) -> None:
    run(train, str(tmp_path), ranks=1, merge=2)
    second, fourth, fifth = records(tmp_path)[:-1]
    assert [second["step"], fourth["step"], fifth["step"]] == [2, 4, 5]
    assert fourth["examples_per_s"] * (fourth["time"] - second["time"]) == pytest.approx(2 * 2 * 4, rel=0.2)


def test_own_loop_logs_examples_if_told_and_else_steps_only(tmp_path: Path) -> None:
    """A user's own loop logs as many examples as it passes to update(), or steps alone if it passes none."""
    for name, samples in (("told", 4.0), ("untold", None)):
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        log = Log(dir=str(tmp_path / name), every=2, console=False)
        engine = echelon.distribute(net, optimizer=optimizer, log=log)
        for _ in range(4):
            engine.backward(net(torch.ones(4, 3)).square().mean())
            engine.update(samples=samples)
        engine.close()
    first, last = records(tmp_path / "told")
    assert last["examples_per_s"] * (last["time"] - first["time"]) == pytest.approx(2 * 4, rel=0.2)
    first, last = records(tmp_path / "untold")
    assert "examples_per_s" not in last, "nobody has said how many there were"
    assert last["steps_per_s"] * (last["time"] - first["time"]) == pytest.approx(2, rel=0.2)


def test_steps_after_the_last_line_are_in_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, log=Log(dir=str(tmp_path), every=2))
    losses = [float(engine.step(torch.ones(4, 3), torch.full((4, 1), float(step)))) for step in range(3)]
    engine.close()
    assert [(record["step"], record["loss"]) for record in records(tmp_path)] == [(2, losses[1]), (3, losses[2])]
    own = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [record["step"] for record in own] == [2, 3]
    assert "step 3" not in capsys.readouterr().out


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(train, str(tmp_path), tensorboard=True, ranks=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert logged == [(r["step"], pytest.approx(r["loss"])) for r in records(tmp_path)[:-1]]


def test_the_console_line_reads_well() -> None:
    record = {"step": 20, "total": 100, "loss": 0.5, "examples_per_s": 1234.5} | dict.fromkeys(PHASES, 1.25)
    assert summary(record) == (
        "step 20/100  loss 0.5000  1,234 examples/s  data 1.2 forward 1.2 backward 1.2 communicate 1.2 update 1.2 ms"
    )
    del record["examples_per_s"]
    assert summary(record | {"steps_per_s": 12.34}).startswith("step 20/100  loss 0.5000  12.3 steps/s  data")


def test_a_log_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    net = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="cannot be made"):
        echelon.distribute(
            net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=Log(dir=str(tmp_path / "file" / "log"))
        )


def test_missing_tensorboard_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(str(tmp_path), tensorboard=True)
    assert "echelon: tensorboard: not installed, so no event files are written; pip install" in capsys.readouterr().out
    assert len(records(tmp_path)) > 1
    assert not (tmp_path / "tensorboard").exists()
