"""The start of a run, by part, is in run.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from harness import run
from torch import nn

import echelon


def train(folder: Path) -> None:
    echelon.init()
    model = nn.Linear(2, 1)
    engine = echelon.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.functional.mse_loss,
        log=echelon.Log(dir=str(folder), console=False),
    )
    for _ in range(2):
        engine.step(torch.ones(2, 2), torch.ones(2, 1))
    engine.close()


def test_the_first_step_writes_the_parts_of_the_start(tmp_path: Path) -> None:
    run(train, tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())["start"]
    assert list(found) == ["import", "join", "build", "distribute", "first step"]
    assert all(seconds >= 0 for seconds in found.values())
    del found["import"]  # since the start of the server that forks ranks
    assert sum(found.values()) < 200
