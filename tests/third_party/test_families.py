"""Families of transformers, split, in stages, sharded and in pairs of these, beside one process.

``table()`` makes that of docs/transformers.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from beside import ROWS
from families import FAMILIES, LAYOUTS, Family
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy
from echelon.base.errors import EchelonError

RANKS, STEPS, RATE, TOLERANCE = 4, 3, 0.1, 1e-5


class Trained(NamedTuple):
    """Losses of the steps, gradients of the first one, and the last weights."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose first step is the gradients times the rate."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def gradients(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (value.double() - after[name].double()) / RATE for name, value in before.items()}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items() if value.is_floating_point()}


def train(family: Family, strategy: dict[str, Any]) -> Trained:
    torch.manual_seed(3)
    model = family.make().train()
    engine = echelon.distribute(
        model, optimizer_of(model), strategy=Strategy(fast=False, **strategy), sample=family.batches(0), log=QUIET
    )
    before, losses, first = copied(engine.whole_state()), [], None
    for step in range(STEPS):
        rows, at = ROWS // engine.plan.replicas, engine.world.data_rank
        batch = {name: value[at * rows : (at + 1) * rows] for name, value in family.batches(step).items()}
        losses.append(float(engine.step(**batch)))
        first = first or gradients(before, copied(engine.whole_state()))
    weights = copied(engine.whole_state())
    engine.close()
    return Trained(losses, first or {}, weights)


def train_all(name: str) -> dict[str, Trained | str]:
    """Return what each layout gives: what it has trained, or the line by which it is refused."""
    echelon.init()
    found: dict[str, Trained | str] = {}
    for layout, strategy in LAYOUTS.items():
        try:
            found[layout] = train(FAMILIES[name], strategy)
        except EchelonError as error:
            found[layout] = str(error)
    return found


@functools.cache
def trained(name: str) -> list[dict[str, Trained | str]]:
    return run(train_all, name, ranks=RANKS)


@functools.cache
def alone(name: str) -> Trained:
    """Return what a loop of torch in one process gives."""
    family = FAMILIES[name]
    torch.manual_seed(3)
    model = family.make().train()
    optimizer = optimizer_of(model)
    before, losses, first = copied(model.state_dict()), [], None
    for step in range(STEPS):
        loss = model(**family.batches(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        first = first or gradients(before, copied(model.state_dict()))
    return Trained(losses, first or {}, copied(model.state_dict()))


def difference(found: Trained, expected: Trained) -> tuple[float, str]:
    """Return the largest difference, relative to what is compared (to 1 where that is less), and of what it is."""
    pairs = [
        (f"loss {step}", torch.tensor(a), torch.tensor(b))
        for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True))
    ]
    for kind in ("gradients", "weights"):
        some, others = getattr(found, kind), getattr(expected, kind)
        assert some.keys() == others.keys()
        pairs += [(f"{kind} of {name}", value, others[name]) for name, value in some.items()]
    return max((float(((a - b).abs() / b.abs().clamp(min=1)).max()), what) for what, a, b in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_one_process(name: str, layout: str) -> None:
    for rank in trained(name):
        found = rank[layout]
        assert isinstance(found, Trained), found
        largest, what = difference(found, alone(name))
        assert largest <= TOLERANCE, what


def table() -> str:
    """Return the largest difference of each family and layout as a table in Markdown."""
    lines = ["| | " + " | ".join(LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for name in FAMILIES:
        found = [trained(name)[0][layout] for layout in LAYOUTS]
        cells = [f"{difference(each, alone(name))[0]:.0e}" if isinstance(each, Trained) else each for each in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
