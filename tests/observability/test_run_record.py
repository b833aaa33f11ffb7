"""The record that a run writes, and reading it back: after restarts, cuts, damage and full disks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn

import echelon
from echelon import Checkpoint, Log, Strategy
from echelon.base.process_info import own_command
from echelon.distributed.activity import activity
from echelon.observability import runlog
from echelon.observability.runlog.run_description import describe_optimizer, relevant_environment, shown_command
from echelon.observability.runlog.run_reader import RankStepRecord
from echelon.observability.runlog.step_phases import PHASES

STEPS, EVERY, CLIP = 6, 2, 3.0


def train(
    directory: str | None, checkpoint: str | None = None, steps: int = STEPS, staged: bool = False, lost: bool = False
) -> dict[str, Any]:
    """A few steps; what the rank knows of itself. ``lost``: the directory goes away after the start."""
    echelon.init(seed=0)
    net = _staged() if staged else nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    waited = activity.waited
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = echelon.distribute(
            net,
            loss=F.mse_loss,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.25),
            strategy=Strategy(clip=CLIP),
            checkpoint=Checkpoint(dir=checkpoint, every=4) if checkpoint else None,
            log=Log(dir=directory, every=EVERY),
        )
        if lost and directory is not None:
            shutil.rmtree(directory)
        data = torch.Generator().manual_seed(1 if staged else 1 + echelon.rank())  # replicas have their own samples
        losses, norms = [], []
        for _ in range(steps - engine.steps):
            losses.append(float(engine.step(torch.randn(4, 3, generator=data), torch.randn(4, 1, generator=data))))
            norms.append(0.0 if staged else float(engine.grad_norm()))  # after clipping
        engine.close()
    return {
        "pid": os.getpid(),
        "waited": activity.waited - waited,
        "said": said.getvalue().splitlines(),
        "losses": losses,
        "norms": norms,
    }


def _staged() -> nn.Module:
    with echelon.pipeline(micro_batches=2):
        with echelon.stage():
            first = nn.Linear(3, 4)
        with echelon.stage():
            second = nn.Linear(4, 1)
    return nn.Sequential(first, second)


def test_every_rank_records_its_place_and_its_step_phases(tmp_path: Path) -> None:
    """Every rank records its place in the mesh and the time that each phase of its steps took."""
    ends = run(train, str(tmp_path), str(tmp_path / "kept"), ranks=2)
    seen = runlog.read(tmp_path)
    assert seen.facts is not None
    assert seen.facts.world.size == 2
    assert [(rank.rank, rank.pid, rank.at["replicate"]) for rank in seen.facts.ranks] == [
        (0, ends[0]["pid"], 0),
        (1, ends[1]["pid"], 1),
    ]
    assert seen.facts.parameter_count == 3 * 4 + 4 + 4 + 1
    assert seen.facts.parameter_bytes == 4 * seen.facts.parameter_count
    origins = {setting.name: (setting.value, setting.origin) for setting in seen.facts.settings}
    assert origins["clip"] == (CLIP, "script")
    assert origins["gradient_merge"] == (1, "default")
    assert [f"echelon: {line}" for line in seen.facts.said] == ends[0]["said"][: len(seen.facts.said)]
    assert [step.loss for step in seen.steps] == pytest.approx(ends[0]["losses"][1::EVERY])
    clipped = [min(step.gradient_norm or 0.0, CLIP) for step in seen.steps]
    assert clipped == pytest.approx(ends[0]["norms"][1::EVERY], rel=1e-4)
    assert min(clipped) < CLIP
    for rank, end in enumerate(ends):
        _check_rank(seen.ranks[rank], end)
    for one, other in zip(seen.steps, seen.ranks[0], strict=True):
        assert one.phases == pytest.approx(other.phases, abs=1e-4)
    kinds = [(event.kind, event.rank, event.text) for event in seen.events]
    assert kinds == [
        ("saved", 0, f"saved {tmp_path / 'kept' / 'step-00000004'}"),
        ("ended", 0, f"training ended after step {STEPS}"),
    ]


def _check_rank(steps: tuple[RankStepRecord, ...], end: dict[str, Any]) -> None:
    assert [one.step for one in steps] == [2, 4, 6]
    assert [set(one.phases) - set(PHASES) for one in steps] == [set(), set(), {"checkpoint"}]  # saved after step 4
    communicate = sum(EVERY * one.phases["communicate"] / 1e3 for one in steps)
    assert 0 < communicate <= end["waited"] + 0.1  # waits, and the handling of what arrived
    assert all(1e6 < (one.memory or 0) <= (one.peak or 0) for one in steps)


def test_a_pipelines_stages_join_with_the_first_batch(tmp_path: Path) -> None:
    run(train, str(tmp_path), staged=True, ranks=2)
    facts = runlog.read(tmp_path).facts
    assert facts is not None
    assert [(one.stage, one.ranks, one.units, one.parameters) for one in facts.stages] == [
        (0, (0,), ("0",), 16),
        (1, (1,), ("1",), 5),
    ]
    assert facts.schedule is not None
    assert facts.schedule.micro_batches == 2
    assert facts.mesh == {"replicate": 1, "stage": 2}


def test_resumed_training_is_the_same_run_and_a_restart_is_not(tmp_path: Path) -> None:
    """Training that resumes is another attempt of the same run; training from the beginning is a new run."""
    directory, kept = str(tmp_path / "log"), str(tmp_path / "kept")
    run(train, directory, kept, 4, ranks=1)
    first = runlog.read(directory)
    run(train, directory, kept, 6, ranks=1)
    second = runlog.read(directory)
    assert first.facts is not None
    assert second.facts is not None
    assert (first.facts.attempt, second.facts.attempt) == (0, 1)
    assert second.facts.began == first.facts.began < second.facts.started
    assert [step.step for step in second.steps] == [2, 4, 6]
    assert [event.kind for event in second.events] == ["saved", "ended", "resumed", "ended"]
    run(train, directory, None, 2, ranks=1)
    third = runlog.read(directory)
    assert third.facts is not None
    assert third.facts.attempt == 0
    assert [step.step for step in third.steps] == [2]
    assert [one.step for one in third.ranks[0]] == [2]


def test_full_disk_or_lost_directory_costs_one_line_and_no_step(tmp_path: Path) -> None:
    [whole] = run(train, None, ranks=1)
    full = tmp_path / "full"
    full.mkdir()
    for name in ("metrics.jsonl", "rank-0.jsonl", "events.jsonl"):
        (full / name).symlink_to("/dev/full")
    for directory, lost in ((full, False), (tmp_path / "lost", True)):
        [(losses, errors)] = run(_complained, str(directory), lost, ranks=1)
        assert losses == whole["losses"]
        assert len(errors) == 1, errors
        assert str(directory) in errors[0]
    assert runlog.read(full).steps == ()
    assert runlog.read(tmp_path / "lost").empty


def _complained(directory: str, lost: bool) -> tuple[list[float], list[str]]:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        end = train(directory, lost=lost)
    return end["losses"], errors.getvalue().splitlines()


def test_nothing_is_written_without_a_directory(tmp_path: Path) -> None:
    [files] = run(_alone_in, str(tmp_path), ranks=1)
    assert files == []


def _alone_in(directory: str) -> list[str]:
    os.chdir(directory)
    train(None)
    return os.listdir(directory)


def test_command_is_as_the_user_has_typed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/env/bin/python", "/env/bin/echelon", "run", "--procs", "2", "train.py"])
    assert own_command() == ["echelon", "run", "--procs", "2", "train.py"]
    monkeypatch.setattr("sys.orig_argv", ["/env/bin/python3", "train.py", "--lr", "1"])
    assert own_command() == ["python3", "train.py", "--lr", "1"]


def test_optimizer_is_described_by_its_given_options() -> None:
    net = nn.Linear(2, 2)
    assert describe_optimizer(torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.9)) == "SGD(lr=0.25, momentum=0.9)"
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 1.0}]
    assert describe_optimizer(torch.optim.AdamW(groups)) == "AdamW(lr=0.001) in 2 groups"


def test_read_keeps_the_later_of_repeated_steps_and_skips_damage(tmp_path: Path) -> None:
    """If steps were done twice the later ones count, and damaged lines are left out."""
    now = time.time()

    def step(number: int, loss: float) -> str:
        return json.dumps({"step": number, "loss": loss, "learning_rate": 0.1, "time": now, "total": 9})

    lines = [
        *(step(1, 5.0), step(2, 4.0), step(3, 3.0), json.dumps({"step": 3, "eval_loss": 9.0, "time": now})),
        *("{damaged", "[1]", '"x"', "\x00\xff", '{"step": "4", "loss": 1, "learning_rate": 1}'),
        *(step(2, 4.5), json.dumps({"step": 2, "eval_loss": 8.0}), step(3, float("nan"))),
        step(4, 2.5)[:-9],
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "run.json").write_text('{"world": [], "ranks": [7, {"rank": 1}], "mesh": null, "stages": "x"}')
    (tmp_path / "events.jsonl").write_text('{"time": 2, "kind": "failed", "text": "b"}\n{"time": 1, "kind": "notice"}')
    (tmp_path / "server-0.jsonl").write_text('{"time": 3, "rows": {"t": 5}, "staleness": {"mean": 1.5, "max": 4}}\n{')
    seen = runlog.read(tmp_path)
    assert [(one.step, one.loss) for one in seen.steps] == [(1, 5.0), (2, 4.5), (3, None)]
    assert [(one.step, one.results) for one in seen.evaluations] == [(2, {"loss": 8.0})]
    assert [event.kind for event in seen.events] == ["notice", "failed"]
    [look] = seen.servers[0]
    assert (look.rows, look.staleness_mean, look.staleness_max, look.pulls) == ({"t": 5}, 1.5, 4, 0)
    assert seen.facts is not None
    assert [rank.rank for rank in seen.facts.ranks] == [1]


def test_an_empty_directory_is_an_empty_run(tmp_path: Path) -> None:
    assert runlog.read(tmp_path / "nowhere").empty


def test_secrets_stay_out() -> None:
    environment = {"NCCL_DEBUG": "1", "ECHELON_TOKEN": "x", "ECHELON_PS_KEY": "x", "HOME": "/", "OMP_NUM_THREADS": "2"}
    assert relevant_environment(environment) == {"NCCL_DEBUG": "1", "OMP_NUM_THREADS": "2"}
    words = ["a.py", "--api-key", "x", "--token=x", "--lr", "1"]
    assert shown_command(words) == ["a.py", "--api-key", "...", "--token=...", "--lr", "1"]
