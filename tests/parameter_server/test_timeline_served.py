"""Traffic to and from parameter servers is in the timeline, byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from serving import served
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding
from echelon.observability import runlog
from echelon.observability.trace import summarize, trace_files
from echelon.observability.trace.span import HOST, NETWORK
from echelon.observability.trace.trace_report import conclude

DIM, IDS, BATCH, STEPS = 4, 6, 8, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = SparseEmbedding(DIM, name="words")
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).squeeze(1)


def train(directory: str) -> int:
    echelon.init()
    model = Model()
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(mode="sync", prefetch=False)),
        log=echelon.Log(dir=directory, every=2, timeline="3:4", console=False),
    )
    for _ in range(STEPS):
        engine.step(torch.arange(BATCH) % IDS, torch.ones(BATCH))
    return engine.steps


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    assert served(train, str(directory), servers=1, workers=2) == [STEPS, STEPS]
    return directory


def spans(recorded: Path, kind: str, lane: str) -> list[list[Any]]:
    return [[s for s in r.spans if s.kind == kind and s.lane == lane] for r in trace_files.read(recorded / "timeline")]


def test_pulls_and_pushes_of_every_step_are_there_with_bytes(recorded: Path) -> None:
    dense = 4 * (DIM + 1)
    rows = 8 * IDS + 4 * DIM * IDS  # ids there, rows back; the blocks come with the end of the step
    for own in spans(recorded, "pull", NETWORK):
        assert [(span.step, span.bytes) for span in own] == [(3, rows), (3, dense), (4, rows), (4, dense)]
    pushed = 8 * IDS + 4 * DIM * IDS + dense  # ids, gradients, and with them what the worker would go on from
    for own in spans(recorded, "push", NETWORK):
        assert [span.step for span in own] == [3, 4]
        assert own[0].bytes > pushed
    for own in spans(recorded, "pull", HOST):
        assert {span.step for span in own} == {3, 4}


def test_the_launcher_puts_workers_together_that_never_met(recorded: Path) -> None:
    lines = conclude(recorded)
    assert lines[0].startswith("timeline of steps 3 to 4: ")
    assert conclude(recorded) == [], "once"
    figures = summarize(recorded)
    assert [row["rank"] for row in figures["ranks"]] == [0, 1]
    assert all(row["server_ms"] > 0 for row in figures["ranks"])
    by_name = {row["name"]: row for row in figures["communication"]}
    assert by_name["pull (servers)"]["bytes"] == 8 * IDS + 4 * DIM * IDS + 4 * (DIM + 1)
    assert figures["clock_error_ms"] is None, "nobody compared the clocks"


def test_speed_counts_all_workers_and_server_waits_are_not_work(recorded: Path) -> None:
    """The speed is that of all workers, and waiting for servers does not count as a worker's own work."""
    run = runlog.read(recorded)
    second, fourth, _ = run.steps
    assert fourth.time
    assert second.time
    assert fourth.examples_per_s
    assert fourth.examples_per_s * (fourth.time - second.time) == pytest.approx(2 * BATCH * 2, rel=0.2)
    assert [step.step for step in run.ranks[1]] == [2, 4, 5]
    assert all(0 < step.phases["communicate"] < sum(step.phases.values()) for step in run.ranks[1])
