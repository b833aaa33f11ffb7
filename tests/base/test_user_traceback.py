"""Errors show the place in the user's code, and no frames of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

import echelon
from echelon.base import user_traceback
from echelon.base.environment import TRACEBACK
from echelon.base.errors import UsageError
from echelon.base.user_traceback import format_error, install_hook, message_with_place, user_place

BEGIN = """
import torch, torch.nn.functional as F, echelon
from torch import nn
net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
quiet = echelon.Log(console=False)
def loss(out, labels):
    return F.cross_entropy(out, labels)
def train(x=torch.ones(4, 8), y=torch.zeros(4).long(), loss=loss):
    engine = echelon.distribute(net, optimizer, loss, log=quiet)
    return engine.step(x, y)
"""
LINES = BEGIN.count("\n")


Fails = Callable[[str], tuple[BaseException, TracebackType]]


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """A script's error, and its traceback from the script on."""
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> tuple[BaseException, TracebackType]:
        path = tmp_path / "train.py"
        path.write_text(BEGIN + text)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
        trace = caught.value.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        assert trace is not None
        return caught.value.with_traceback(trace), trace

    return run


def test_one_line_ends_with_the_users_innermost_frame(fails: Fails) -> None:
    error, trace = fails("echelon.Strategy(\n  bucket=3)\n")
    assert user_place(trace) == f"train.py:{LINES + 1}"
    told = format_error(error, trace)
    assert told.startswith("echelon: Strategy has no option 'bucket'")
    assert told.endswith(f" (train.py:{LINES + 1})\n")
    error, trace = fails("def mine(out, y):\n    echelon.Strategy(bucket=3)\ntrain(loss=mine)\n")
    assert message_with_place(error).endswith(
        f" (train.py:{LINES + 2})"
    )  # inside the user's own function, called by ours
    assert "train.py" not in str(error)


def test_one_line_without_a_users_frame_stays_as_it_is() -> None:
    assert format_error(UsageError("no")) == "echelon: no\n"
    with pytest.raises(UsageError) as caught:
        raise UsageError("rank 1: no such option (train.py:4)\nits traceback")
    assert message_with_place(caught.value) == str(caught.value)  # another process has told the place


def test_traceback_keeps_the_users_frames_and_the_last_one(fails: Fails) -> None:
    error, trace = fails("train(x=torch.ones(4, 9))\n")
    told = format_error(error, trace)
    assert told.count('  File "') == 3
    assert f'train.py", line {LINES + 1}, in <module>' in told
    assert f"frames of echelon and torch ({TRACEBACK}=1 shows them)\n" in told
    assert 'linear.py", line' in told
    assert told.endswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x9 and 8x4)\n")
    assert f"{Path(echelon.__file__).parent}" not in told


def test_switch_shows_everything(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACEBACK, "1")
    error, trace = fails("train(x=torch.ones(4, 9))\n")
    told = format_error(error, trace)
    assert "echelon/engine/engine.py" in told
    assert "frames of echelon" not in told
    error, trace = fails("echelon.Strategy(bucket=3)\n")
    told = format_error(error, trace)
    assert told.startswith("Traceback (most recent call last):\n")
    assert "echelon/base/config.py" in told
    assert told.endswith(f"(train.py:{LINES + 1})\n")


def test_error_inside_echelon_keeps_its_frames(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_traceback, "_ECHELON", str(Path.cwd()))  # as if the script's functions were ours
    error, trace = fails("def inner():\n    return {}['key']\ninner()\n")
    assert format_error(error, trace).count('  File "') == 2


def test_backward_after_step_is_answered(fails: Fails) -> None:
    error, trace = fails("train().backward()\n")
    told = format_error(error, trace)
    assert "does not require grad" in told
    assert told.splitlines()[-1].startswith(
        "echelon: engine.step() has done backward() and the optimizer's step already"
    )
    assert told.endswith(f"leave backward() out (train.py:{LINES + 1})\n")


def test_hook_is_installed_once_and_leaves_other_errors_alone(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(kind))
    install_hook()
    install_hook()
    error, trace = fails("echelon.Strategy(bucket=3)\n")
    sys.excepthook(type(error), error, trace)
    assert capsys.readouterr().err.endswith(f"(train.py:{LINES + 1})\n")
    error, trace = fails("train(x=torch.ones(4, 9))\n")
    sys.excepthook(type(error), error, trace)
    assert others == [RuntimeError]
