"""Tables in the workers: checkpoints, also from and for servers, and workers that end or differ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Raised, errors, run, run_raw
from serving import served
from test_engine_served import STEPS, alone, compare, train
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding

PLACES = {
    "two workers": lambda *args: run(train, *args, ranks=2, mode="collective"),
    "four workers": lambda *args: run(train, *args, ranks=4, mode="collective"),
    "one process": lambda *args: run(train, *args, ranks=1),
    "three servers": lambda *args: served(train, *args, servers=3, workers=2, dense="allreduce"),
}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("two workers", "three servers"),
        ("four workers", "one process"),
        ("three servers", "four workers"),
    ],
)
def test_a_checkpoint_goes_on_wherever_tables_are(first: str, then: str, tmp_path: Path) -> None:
    PLACES[first]("adam", str(tmp_path), 3)
    found: list[dict[str, Any]] = PLACES[then]("adam", str(tmp_path))
    for worker in found:
        assert len(worker["losses"]) == STEPS - 3
        compare(worker, alone("adam"), losses=False)


def test_optimizer_state_on_servers_is_not_lost_silently(tmp_path: Path) -> None:
    served(train, "adam", str(tmp_path), 3, servers=1, workers=1)
    for line in errors(train, "adam", str(tmp_path), ranks=2, mode="collective"):
        assert "has the Adam state of dense parameters that were on servers" in line


class Wayward(nn.Module):
    """Worker 1 does something else than worker 0 from some step on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        capacity = 4 if how == "full" else None
        self.rows = SparseEmbedding(2, name="rows", optimizer="sgd", capacity=capacity)
        self.more = SparseEmbedding(2, name="more", optimizer="sgd")
        self.scale = nn.Parameter(torch.ones(1))
        self.how, self.calls = how, 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        differs = self.calls == 2 and echelon.rank() == 1
        if differs and self.how == "ends":
            os._exit(7)
        if differs and self.how == "stands still":
            time.sleep(9)
        out = self.rows(ids).sum() * self.scale.sum()
        if self.how == "looks up more" and self.training:
            out = out + self.more(ids % 3 if differs else ids * 2).sum() + (self.more(ids * 3).sum() if differs else 0)
        if differs and self.how == "not a number":
            out = out + 0 * (self.rows(ids) * 0).sqrt().sum()
        return out


def go_wrong(how: str) -> None:
    echelon.init(timeout=4.0)
    model = Wayward(how)
    engine = echelon.distribute(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log=echelon.Log(console=False)
    )
    for step in range(6):
        if how == "reads alone" and step == 4 and echelon.rank() == 0:
            engine.model.eval()(torch.ones(2, 2, dtype=torch.int64))
        engine.step(torch.arange(4).view(2, 2) + 4 * (step + echelon.rank()))


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("looks up more", "worker 0 has looked up all the rows of its step, worker 1 looks up table 'more' "),
        ("reads alone", "worker 0 reads table 'rows' outside of a step, worker 1 begins a step"),
        ("not a number", "worker 1's gradient of table 'rows' in step 2 is NaN or infinite"),
        ("full", "table 'rows' is full: "),
    ],
)
def test_workers_that_differ_all_get_the_line(how: str, line: str) -> None:
    for said in errors(go_wrong, how):
        assert line in said, said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("how", "line"),
    [("ends", "lost contact with worker 1"), ("stands still", "worker 1 has not come to the exchange")],
)
def test_a_worker_that_is_gone_or_still_is_named(how: str, line: str) -> None:
    first = run_raw(go_wrong, how, timeout=30)[0]
    assert isinstance(first, Raised)
    assert line in first.line
