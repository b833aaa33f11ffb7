"""Files that were written before the modules were moved are still read: checkpoint, plan, run log, server state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from harness import run
from kept_shard import make_job, opened, state_of, trained
from torch import nn

import echelon
from echelon.observability import runlog
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan

FILES = Path(__file__).parent / "before_moves"


class Net(nn.Module):
    """The model that the files were written with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def resume(directory: str, shard: int | None = None) -> tuple[int, float, dict[str, Any]]:
    """Return the step, the learning rate and the weights that a run goes on with."""
    echelon.init(seed=7)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine = echelon.distribute(
        net,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        strategy=echelon.Strategy(shard=shard),
        checkpoint=echelon.Checkpoint(dir=directory),
        log=echelon.Log(console=False),
    )
    weights = {name: value.tolist() for name, value in engine.whole_state().items()}
    return engine.steps, optimizer.param_groups[0]["lr"], weights


def test_checkpoint_resumes(tmp_path: Path) -> None:
    shutil.copytree(FILES / "checkpoint", tmp_path / "checkpoint")
    expected = json.loads((FILES / "expected.json").read_text())["weights"]
    for end in run(resume, str(tmp_path / "checkpoint"), ranks=1):
        assert end == (3, 0.005, expected)
    for end in run(resume, str(tmp_path / "checkpoint"), shard=1, ranks=2):
        assert end == (3, 0.005, expected)


def test_plan_is_for_the_same_model() -> None:
    plan = SavedPlan.load(FILES / "plan.json")
    plan.check_model(Net())
    assert (plan.name, plan.draft.batch, plan.units) == ("Net", 8, (("layers.0",), ("layers.1",), ("layers.2",)))
    assert plan.predicted is not None
    assert plan.predicted.parts["host"] == 0.0012000000000000001


def test_plan_of_a_run_reads() -> None:
    """Its field ``lean`` is called ``low_memory`` now."""
    plan = Plan.from_json((FILES / "run_plan.json").read_text())
    assert plan.low_memory is not None
    assert plan.low_memory.reserve == "8 GB"


def test_run_log_reads() -> None:
    found = runlog.read(FILES / "run")
    assert [event.kind for event in found.events] == ["notice", "saved", "ended"]
    assert [step.step for step in found.steps] == [3]
    assert found.facts is not None
    assert found.facts.mesh == {"replicate": 1}


def test_server_restores_snapshot_and_journal(tmp_path: Path) -> None:
    shutil.copytree(FILES / "server", tmp_path / "server")
    shard = opened(make_job(), directory=tmp_path / "server")
    assert state_of(shard) == state_of(trained(5, make_job()))
    shard.close()
