"""``echelon run --plan``: the plan of a file, on as many processes as it needs; and trials of ``auto="measure"``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from command import echelon, here, processes_with, write
from harness import errors
from harness import script as run_script
from torch import nn

from echelon.base.environment import PLAN
from echelon.plan.draft import Draft
from echelon.plan.saved_plan import SavedPlan, SavedPrediction, shapes_of
from echelon.planner.cluster.cluster import Cluster

SCRIPT = """
import sys, torch, echelon
from torch import nn

echelon.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
checkpoint = None
STRATEGY
engine = echelon.distribute(
    model,
    loss=nn.functional.cross_entropy,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    strategy=strategy,
    checkpoint=checkpoint,
    log=echelon.Log(every=1),
)
g = torch.Generator().manual_seed(2)
data = torch.randn(48, 8, generator=g), torch.randint(4, (48,), generator=g)
for batch in engine.loader(data, global_batch=12, shuffle=False):
    loss = engine.step(*batch)
    if echelon.rank() == 0:
        print(f"loss {float(loss):.5f}")
"""


def script(path: Path, strategy: str = "strategy = None") -> Path:
    return write(path, SCRIPT.replace("STRATEGY", strategy))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def planned(path: Path, **decided: Any) -> SavedPlan:
    plan = SavedPlan(
        draft=Draft(batch=12, **decided),
        units=tuple((str(at),) for at in range(5)),
        model=shapes_of(model()),
        predicted=SavedPrediction(seconds=0.01, memory=(1e6,) * decided.get("stage", 1)),
        created_by="a test",
    )
    plan.save(path)
    return plan


def losses(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"^loss (\S+)$", out, re.MULTILINE)]


def one_process() -> list[float]:
    """The same training in plain torch."""
    torch.manual_seed(1)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(48, 8, generator=g), torch.randint(4, (48,), generator=g)
    found = []
    for at in range(0, 48, 12):
        loss = nn.functional.cross_entropy(net(x[at : at + 12]), y[at : at + 12])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_a_plan_is_run_on_as_many_processes_as_it_needs(tmp_path: Path) -> None:
    script(tmp_path / "train.py")
    planned(tmp_path / "plan.json", stage=2, cuts=(2,), micro_batches=3, schedule="1f1b", recompute=(True, False))
    end = echelon("run", "--plan", "plan.json", "train.py", cwd=tmp_path)
    assert end.code == 0, end.err
    torch.testing.assert_close(torch.tensor(losses(end.out)), torch.tensor(one_process()), rtol=1e-4, atol=1e-4)
    said = end.out.splitlines()
    assert f"echelon: plan: from {tmp_path}/plan.json: stage 2, 3 micro-batches (1f1b), recompute in 1 stages" in said
    assert "echelon: mesh: replicate 1 x stage 2 (2 ranks)" in said


def test_unusable_plan_is_named_before_or_at_the_start(tmp_path: Path) -> None:
    """Whatever makes a plan unusable is named in one line, before the job starts or at its start."""
    script(tmp_path / "train.py")
    script(tmp_path / "own.py", "strategy = echelon.Strategy(amp='bf16')")
    planned(tmp_path / "plan.json", replicate=2)
    write(tmp_path / "torn.json", planned(tmp_path / "whole.json", replicate=2).to_json()[:100])
    write(tmp_path / "other.json", json.dumps({"echelon": "plan", "version": 2}))
    wanted = {
        ("--plan", "plan.json", "--procs", 3, "train.py"): "--plan plan.json is for 2 processes, and 3 were asked for",
        (
            "--plan",
            "none.json",
            "train.py",
        ): "plan 'none.json': there is no such file; 'echelon plan --save' writes one",
        ("--plan", "torn.json", "train.py"): "plan 'torn.json': it is not JSON",
        ("--plan", "other.json", "train.py"): "plan 'other.json': it has version 2, this echelon reads 1",
        ("--plan", "plan.json", "--servers", 1, "train.py"): "--plan is for jobs without parameter servers",
    }
    for words, line in wanted.items():
        end = here("run", *words, cwd=tmp_path)
        assert end.code == 2
        assert end.first_line.startswith(f"echelon: {line}")
        assert len(end.err.splitlines()) == 1
    for line in errors(with_plan, str(tmp_path / "own.py"), str(tmp_path / "plan.json")):
        assert "the saved plan says how to train, and Strategy sets amp; remove amp= from it" in line
        assert "\n" not in line


def with_plan(path: str, plan: str) -> None:
    """A rank as ``echelon run --plan`` would start it."""
    os.environ[PLAN] = plan
    run_script(path, [])


# ---- trials ----

#: The trials' children know by the place of their orders the how manieth they are.
TRIED = """
import os, pathlib, resource, time
told = os.environ.get("ECHELON_TRIAL")
trial = int(pathlib.Path(told).parent.name) if told else 0
if trial:
    print("this is a trial")
if trial == 1:
    step = echelon.Engine.step
    echelon.Engine.step = lambda self, *a, **k: (time.sleep(0.5), step(self, *a, **k))[1]
if trial == 2 and echelon.rank() == 1:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32)); torch.empty(1 << 33)
if trial == 3 and echelon.rank() == 1:
    os.kill(os.getpid(), 9)
strategy = echelon.Strategy(auto=echelon.Auto(measure=True, cluster="machine.yaml", trials=4))
checkpoint = echelon.Checkpoint(dir='kept', every=1)
"""


def described(path: Path, link: float) -> None:
    """This machine, with a link so many times as quick: of a slow one, plans that send little are foretold to win."""
    Cluster.parse("2xhere", bench=False).with_(link=link).to_yaml(path)


def tried(out: str) -> dict[str, str]:
    return dict(re.findall(r"^echelon: auto: tried (.*?): (.*)$", out, re.MULTILINE))


def taken(out: str) -> str:
    return re.findall(r"^echelon: auto: chosen after . trials: (.*)$", out, re.MULTILINE)[0]


@pytest.mark.timeout(300)
def test_fastest_trial_is_taken_and_failed_trials_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest trial is taken; a trial that runs out of memory or is killed does not harm the run."""
    monkeypatch.setattr(command, "LIMIT", 280.0)  # four trials, each with two fresh starts
    described(tmp_path / "machine.yaml", link=1e-4)
    script(tmp_path / "train.py", TRIED)
    end = echelon("run", "--procs", 2, "train.py", tmp_path.name, cwd=tmp_path)
    assert end.code == 0, end.err
    slow, large, killed, quick = tried(end.out).values()
    assert "ms a step, predicted" in slow
    assert large.startswith("failed, RuntimeError: ")
    assert killed.startswith("failed, signal 9")
    assert "ms a step, predicted" in quick
    assert taken(end.out) == list(tried(end.out))[3]  # though the first was foretold to be the quickest
    torch.testing.assert_close(torch.tensor(losses(end.out)), torch.tensor(one_process()), rtol=1e-4, atol=1e-4)
    assert "this is a trial" not in end.out
    assert processes_with(tmp_path.name) == []
    # trials leave nothing behind: the four steps of the run itself are all that was kept and written
    assert sorted(path.name for path in (tmp_path / "kept").glob("step-*")) == [f"step-{at:08}" for at in range(1, 5)]
    records = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
