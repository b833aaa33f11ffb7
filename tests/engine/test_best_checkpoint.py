"""The best checkpoint: one directory of its own, compared over restarts and on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from zoo import QUIET

import echelon
from echelon import Checkpoint
from echelon.base.errors import EchelonError


def make(directory: str | None, keep: int | None = None) -> Any:
    echelon.init(seed=4, device="cpu")
    net = nn.Linear(4, 2)
    settings = None if directory is None else Checkpoint(dir=directory, every=1, keep=keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, checkpoint=settings, log=QUIET)


def trained(directory: str, values: list[float], largest: bool, begin: int | None = None) -> Any:
    """Take a step for each value and offer it; return the steps that were saved, and the weights after each step."""
    engine = make(directory, keep=3)
    if begin is not None:
        engine.load(f"{directory}/step-{begin:08d}")
    saved, weights = [], {}
    for value in values:
        engine.step(torch.ones(2, 4) * (1 + engine.steps), torch.zeros(2, 2))
        path = engine.save_best(value, largest=largest)
        weights[engine.steps] = [p.detach().clone() for p in engine.model.parameters()]
        saved += [] if path is None else [engine.steps]
    engine.close()
    return saved, weights


def loaded(directory: str) -> Any:
    engine = make(None)
    engine.load(directory)
    return engine.steps, [p.detach().clone() for p in engine.model.parameters()]


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


@pytest.mark.parametrize("largest", [False, True])
def test_the_best_is_kept_alone_and_over_restarts(tmp_path: Path, largest: bool) -> None:
    place, sign = str(tmp_path / "ckpt"), -1.0 if largest else 1.0
    values = [sign * value for value in (3.0, 2.0, 2.5, 2.0, float("nan"), 4.0)]
    for saved, _ in run(trained, place, values, largest, ranks=2):
        assert saved == [1, 2]
    assert kept(tmp_path / "ckpt" / "best") == ["step-00000002"]
    assert kept(tmp_path / "ckpt") == ["step-00000004", "step-00000005", "step-00000006"]
    first = run(trained, place, [sign * 2.2, sign * 1.5], largest, ranks=1)[0]
    assert first[0] == [8]
    steps, weights = run(loaded, f"{place}/best", ranks=1)[0]
    assert steps == 8
    assert all(torch.equal(one, other) for one, other in zip(weights, first[1][8], strict=True))
    assert run(trained, place, [sign * 1.4], largest, 7, ranks=2)[1][0] == [8]


def test_an_earlier_step_replaces_a_later_one(tmp_path: Path) -> None:
    place = str(tmp_path / "ckpt")
    run(trained, place, [5.0, 6.0, 6.0, 3.0], False, ranks=1)
    assert kept(tmp_path / "ckpt" / "best") == ["step-00000004"]
    assert run(trained, place, [4.0], False, 3, ranks=1)[0][0] == []
    assert run(trained, place, [2.0], False, 3, ranks=1)[0][0] == [4]
    assert run(trained, place, [1.0], False, 4, ranks=1)[0][0] == [5]
    run(trained, place, [7.0, 0.5], False, 5, ranks=1)
    assert kept(tmp_path / "ckpt" / "best") == ["step-00000007"]
    assert run(trained, place, [0.25], False, 5, ranks=1)[0][0] == [6]
    assert kept(tmp_path / "ckpt" / "best") == ["step-00000006"]


def mistaken(directory: str | None, place: str | None) -> str:
    engine = make(directory)
    engine.step(torch.ones(2, 4), torch.zeros(2, 2))
    try:
        engine.save_best(1.0 + (echelon.rank() if place is None else 0), place)
    except EchelonError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    place = str(tmp_path / "ckpt")
    for found in run(mistaken, place, None, ranks=2):
        assert found.startswith("save_best() was given 1, 2 on ranks 0 to 1; give all ranks the same number")
    assert run(mistaken, place, place, ranks=1)[0].startswith("save_best() keeps one checkpoint alone in")
    assert run(mistaken, None, None, ranks=1)[0].startswith("save_best() needs a directory=")
