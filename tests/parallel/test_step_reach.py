"""Optimizers that look at whole parameters, where ranks hold parts of them: right, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy, pipeline, split, stage
from echelon.optim import LAMB
from echelon.optim.step_reach import StepReach, find_reach

# ---- optimizers of other libraries, in a few lines each ----


class Stepping(torch.optim.Optimizer):
    """Base of the optimizers: a direction for each parameter."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        self.calls: list[int] = []
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls.append(len(self.calls))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.sub_(group["lr"] * self.direction(parameter, momentum))

    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        raise NotImplementedError


class Lion(Stepping):
    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        return momentum.lerp(parameter.grad, 0.5).sign() + 0.01 * parameter  # type: ignore[arg-type]


class Lamb(Stepping):
    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        return momentum * parameter.norm() / (momentum.norm() + 1e-6)


class Shampoo(Stepping):
    """Preconditions the rows of matrices only."""

    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        if parameter.dim() != 2:
            return momentum
        left = momentum @ momentum.T + 0.1 * torch.eye(len(momentum))
        return torch.linalg.solve(left, momentum)


class Clipped(Stepping):
    """Clips by the norm of all gradients together."""

    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return momentum / torch.stack([grad.norm() for grad in grads]).norm().clamp(min=1.0)


class Noisy(Stepping):
    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        return momentum + torch.randn_like(momentum)


class Closing(Stepping):
    def direction(self, parameter: Tensor, momentum: Tensor) -> Tensor:
        raise ValueError("step() needs a closure")


class Warm(torch.optim.AdamW):
    """A subclass of torch's that changes nothing."""


REACHES: list[tuple[Any, StepReach | str]] = [
    (torch.optim.AdamW, StepReach.ENTRY), (torch.optim.Adafactor, StepReach.PARAMETER),
    (torch.optim.LBFGS, StepReach.ALL),
    (LAMB, StepReach.ENTRY), (Lion, StepReach.ENTRY), (Warm, StepReach.ENTRY), (Lamb, StepReach.PARAMETER),
    (Shampoo, StepReach.PARAMETER), (Clipped, StepReach.ALL), (Noisy, "its steps are random"),
    (Closing, "ValueError: step() needs a closure"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "expected"), REACHES, ids=lambda v: getattr(v, "__name__", ""))
def test_reach_of_a_step_is_found_by_trying(kind: Any, expected: StepReach | str) -> None:
    parameter = nn.Parameter(torch.randn(3, 5))
    optimizer = kind([parameter], lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # begins with a rate of 0, and patches step()
    before, chance = parameter.detach().clone(), torch.get_rng_state()
    assert find_reach(optimizer, optimizer.param_groups[0]) == expected
    assert torch.equal(parameter, before)
    assert torch.equal(torch.get_rng_state(), chance)
    assert not optimizer.state
    assert getattr(optimizer, "calls", []) == []


def test_every_optimizer_of_torch_is_known() -> None:
    """A new one of torch's is tried as any other is; those that are known by their class are what trying finds."""
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"):
        kind = type(f"Own{name}", (getattr(torch.optim, name),), {})
        optimizer = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.01)
        assert find_reach(optimizer, optimizer.param_groups[0]) is StepReach.ENTRY, name


# ---- in training ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.middle = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


MARKS: dict[str, dict[str, Any]] = {
    "split": {"first": split("column"), "middle": split("row")},
    "pipeline": {"": pipeline(micro_batches=2), "first": stage(0), "middle": stage(1), "last": stage(1)},
    "shard": {},
}
Muon = getattr(torch.optim, "Muon", None) or torch.optim.Adafactor


def _engine(layout: str, make: Any) -> echelon.Engine:
    torch.manual_seed(4)
    model = Net()
    many = echelon.world_size() > 1
    echelon.annotate(model, MARKS[layout] if many else {})
    strategy = Strategy(fast=False, shard=1 if layout == "shard" and many else None)
    return echelon.distribute(model, loss=F.cross_entropy, optimizer=make(model), strategy=strategy, log=QUIET)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=g), torch.randint(4, (8,), generator=g)


def refuse_all() -> list[str]:
    echelon.init()
    said = []
    for layout, kind in REFUSED:
        with pytest.raises(echelon.EchelonError) as refused:
            _engine(layout, lambda model, kind=kind: kind(model.parameters(), lr=0.02)).step(*_batch(0))
        said.append(str(refused.value))
    return said


REFUSED = [
    ("split", torch.optim.Adafactor), ("split", Muon), ("split", Lamb), ("split", Shampoo),
    ("shard", torch.optim.Adafactor), ("shard", Muon), ("shard", Lamb), ("pipeline", Clipped),
]  # fmt: skip
MEANS = {
    "split": "split() gives it parts; use Adam, AdamW or SGD{}, or train without split()",
    "shard": "sharding gives it parts; use Adam, AdamW or SGD{}, or train without sharding",
    "pipeline": "a pipeline gives it those of its own stages; use Adam, AdamW or SGD{}, or train without stages",
}


def test_optimizers_that_need_the_whole_are_refused_by_name() -> None:
    for said in run(refuse_all):
        for (layout, kind), line in zip(REFUSED, said, strict=True):
            needs = "all parameters together" if kind is Clipped else "whole parameters"
            ours = " (with Strategy(lamb=True) for LAMB)" if kind is Lamb else ""
            means = MEANS[layout].format(ours)
            assert line == f"optimizer 'main' is {kind.__name__}, whose step needs {needs}, and {means}"


def _muon_of_whole(model: nn.Module) -> Any:
    """Matrices that are not split may have any optimizer."""
    parts = [*model.first.parameters(), *model.middle.parameters()]  # type: ignore[union-attr]
    whole = Muon(model.last.parameters(), lr=0.02)  # type: ignore[union-attr]
    return {"whole": whole, "parts": torch.optim.AdamW(parts, lr=0.02, eps=1e-4)}


KEPT: list[tuple[str, Any]] = [
    ("split", lambda model: Lion(model.parameters(), lr=0.003)),
    ("split", _muon_of_whole),
    ("shard", lambda model: Lion(model.parameters(), lr=0.003)),
    ("pipeline", lambda model: Muon(model.parameters(), lr=0.02)),
    ("pipeline", lambda model: Lamb(model.parameters(), lr=0.02)),
]


def train_kept() -> list[dict[str, Tensor]]:
    echelon.init()
    found = []
    for layout, make in KEPT:
        engine = _engine(layout, make)
        rows = slice(echelon.rank() * 4, echelon.rank() * 4 + 4) if engine.plan.replicas > 1 else slice(0, 8)
        for step in range(4):
            engine.step(*(part[rows] for part in _batch(step)))
        found.append(engine.whole_state())
        engine.close()
    return found


def test_optimizers_stepping_held_parameters_equal_one_process() -> None:
    """Optimizers that step only the parameters a rank holds give the numbers of one process."""
    (expected,) = run(train_kept, ranks=1)
    for found in run(train_kept):
        for weights, one in zip(found, expected, strict=True):
            torch.testing.assert_close(weights, one, rtol=0, atol=2e-6)


def step_in_doubt() -> list[str]:
    echelon.init()
    said: list[str] = []
    engine = _engine("pipeline", lambda model: Noisy(model.parameters()))
    engine._run.voice.say = lambda text, kind="notice": said.append(text)  # type: ignore[method-assign, assignment]
    engine.step(*_batch(0))
    return said


def test_an_optimizer_that_cannot_be_tried_is_told_of() -> None:
    for said in run(step_in_doubt):
        assert [line for line in said if "Noisy" in line] == [
            "optimizer 'main' is Noisy, whose step may need whole parameters (its steps are random); ranks hold parts "
            "here, and the result matches one process only if each entry is updated by itself, as in Adam"
        ]
