"""Models beside a plain loop of torch: ``check(cases, ranks)`` trains each on ``ranks`` ranks and in one process.

The one process takes the whole batch at once and knows nothing of the package; losses and weights must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy

STEPS, ROWS = 3, 8
#: The whole batch of a step; the model returns its loss.
Batches = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model and a way to train it.

    make:      builds the model; the same weights each time
    batches:   of each step
    marks:     as for ``echelon.annotate``
    strategy:  options of it
    tolerance: of losses and weights, relative to 1 or to what they are
    """

    make: Callable[[], nn.Module]
    batches: Batches
    marks: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]


def check(cases: Sequence[Case], ranks: int) -> None:
    """All ranks of every case have the losses and weights of one process."""
    many = run(train_all, cases, ranks=ranks)
    for number, case in enumerate(cases):
        one = train_alone(case)
        for rank, results in enumerate(many):
            where = f"case {number} ({case.make}, {case.strategy}), rank {rank}"
            _compare(results[number], one, case.tolerance, where)


def train_all(cases: Sequence[Case]) -> list[Trained]:
    echelon.init()
    return [train_together(case) for case in cases]


def train_together(case: Case) -> Trained:
    model = echelon.annotate(_made(case), case.marks)
    strategy = Strategy(**{"fast": False, **case.strategy})
    engine = echelon.distribute(model, optimizer=optimizer_of(model), strategy=strategy, log=QUIET)
    losses = [float(engine.step(**_share(case.batches(step), engine))) for step in range(STEPS)]
    weights = {name: value.clone() for name, value in engine.whole_state().items()}
    engine.close()
    return Trained(losses, weights)


def train_alone(case: Case) -> Trained:
    model, losses = _made(case), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        output = model(**case.batches(step))
        loss = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, dict(model.state_dict()))


def _made(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.make().train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, eps=1e-4)


def _share(batch: dict[str, Tensor], engine: echelon.Engine) -> dict[str, Tensor]:
    replicas = engine.plan.replicas
    rows, at = ROWS // replicas, engine.world.data_rank
    return {name: value[at * rows : (at + 1) * rows] for name, value in batch.items()}


def _compare(many: Trained, one: Trained, tolerance: float, where: str) -> None:
    for step, (mine, expected) in enumerate(zip(many.losses, one.losses, strict=True)):
        assert abs(mine - expected) <= tolerance * max(1.0, abs(expected)), f"{where}: loss {step}: {mine}, {expected}"
    shared = many.weights.keys() & one.weights.keys()
    assert shared, where
    for name in shared:
        torch.testing.assert_close(
            many.weights[name], one.weights[name], rtol=tolerance, atol=tolerance, msg=f"{where}: {name}"
        )
