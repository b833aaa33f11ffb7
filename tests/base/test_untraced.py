"""Processes do not import torch if they do not train, nor torch's tracer if they do not compile."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import echelon

TRAINED = """
import json, sys
import torch
taken = torch.optim.SGD.step  # torch puts another in its place when the first optimizer is made, and keeps this one
own = taken.__code__
import echelon
swapped = taken.__code__ is not own

echelon.init()
torch.manual_seed(0)
inputs, targets = torch.randn(4, 8, 3), torch.randn(4, 8, 2)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
engine = echelon.distribute(model, optimizer=optimizer, loss=torch.nn.functional.mse_loss, scheduler=scheduler)
for batch in zip(inputs, targets):
    engine.step(*batch)
found = dict(weights=model.weight.tolist(), imported="torch._dynamo" in sys.modules)

def step(batch, target):
    torch.nn.functional.mse_loss(model(batch), target).backward()
    optimizer.step()
    optimizer.zero_grad()

optimizer.zero_grad()  # an engine keeps the last gradients to be looked at
compiled = torch.compile(step, backend="eager")
for batch in zip(inputs, targets):
    compiled(*batch)
frames = torch._dynamo.utils.counters["frames"]
hidden = getattr(torch.optim.Optimizer.add_param_group.__wrapped__, "__dynamo_disable", None)
optimizer.add_param_group(dict(params=[torch.nn.Parameter(torch.zeros(1))]))
after = torch.optim.Optimizer.add_param_group.__wrapped__
returned = swapped and taken.__code__ is own
print(json.dumps(dict(found, returned=returned, later=model.weight.tolist(), traced=frames["ok"], hidden=hidden is None,
                      plain=getattr(after, "__dynamo_disable") is after)))
"""


def in_a_fresh_process(script: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def by_hand(optimizer_text: str) -> list[list[list[float]]]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 8, 3), torch.randn(4, 8, 2)
    model = nn.Linear(3, 2)
    optimizer = eval(f"torch.optim.{optimizer_text}", {"torch": torch, "model": model})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    weights = []
    for scheduled in (True, False):
        for batch, target in zip(inputs, targets, strict=True):
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduled:
                scheduler.step()
        weights.append(model.weight.tolist())
    return weights


def test_training_without_tracer_can_compile_afterwards():
    """Training does not import the tracer, and compiling works afterwards."""
    optimizer = "SGD(model.parameters(), lr=0.1, momentum=0.9)"
    found = in_a_fresh_process(TRAINED.format(optimizer=optimizer))
    plain, later = by_hand(optimizer)
    assert not found["imported"]
    torch.testing.assert_close(torch.tensor(found["weights"]), torch.tensor(plain))
    torch.testing.assert_close(torch.tensor(found["later"]), torch.tensor(later))
    assert found["traced"] > 0
    assert found["hidden"]
    assert found["returned"]
    assert not found["plain"]


def test_the_command_line_is_there_without_torch():
    script = "import sys, json, echelon.cli; print(json.dumps({'torch': 'torch' in sys.modules}))"
    assert in_a_fresh_process(script) == {"torch": False}


def test_every_public_name_is_there_and_is_no_room():
    for name in echelon.__all__:
        assert getattr(echelon, name) is getattr(echelon.api.public, name)
        room = find_spec(f"echelon.{name}")
        assert room is None or room.origin is None, f"{name} would be a module or a name, whichever is loaded first"


def test_other_names_are_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'echelon' has no attribute 'nonsense'"):
        _ = echelon.nonsense
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from echelon import nonsense  # noqa: F401
