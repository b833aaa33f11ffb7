"""Buffers that the batch feeds, or a weight of another stage: one model has one of each, as one process has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy

STEPS = 5


class Centred(nn.Module):
    """A running mean of inputs, read before it is fed; and buffers that are the same on all replicas anyhow."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4, dtype=torch.double))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(torch.tanh(self.body((x - self.mean) / self.spread.float())))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.3)
                self.spread = self.spread * 0.8 + 0.2 * x.square().mean(0).double()
                self.calls += 1
                self.average.lerp_(self.head.weight, 0.1)
        return output


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draw) * 3 + 2, torch.randn(8, 2, generator=draw)


Trained = tuple[list[float], dict[str, Tensor]]


def plain(make: Callable[[], nn.Module], micro: int = 1) -> Trained:
    torch.manual_seed(2)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = torch.stack([F.mse_loss(net(a), b) for a, b in zip(x.chunk(micro), y.chunk(micro), strict=True)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


def train(
    make: Callable[[], nn.Module],
    shares: tuple[int, ...] = (4, 4),
    marks: dict[str, Any] | None = None,
    own_loop: bool = False,
    strategy: Strategy | None = None,
) -> tuple[Trained, list[str]]:
    echelon.init()
    torch.manual_seed(2)
    net = echelon.annotate(make(), marks or {})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, strategy=strategy, log=QUIET)
    losses, lines = [], list[str]()
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign]
    for step in range(STEPS):
        at = engine.world.data_rank
        rows = slice(sum(shares[:at]), sum(shares[: at + 1]))
        x, y = (part[rows] for part in batch(step))
        if own_loop:
            engine.backward(F.mse_loss(net(x), y), samples=len(x))
            engine.update()
        else:
            losses.append(float(engine.step(x, y)))
    weights = engine.whole_state()
    engine.close()
    return (losses, weights), lines


def assert_same(mine: Trained, expected: Trained) -> None:
    assert mine[0] == pytest.approx(expected[0][: len(mine[0])], abs=1e-5)
    for key, value in expected[1].items():
        assert torch.allclose(mine[1][key], value, rtol=1e-4, atol=1e-5), key


def several() -> dict[str, tuple[Trained, list[str]]]:
    return {
        "even": train(Centred),
        "uneven": train(Centred, (6, 2)),
        "own loop": train(Centred, (6, 2), own_loop=True),
        "shard": train(Centred, (5, 3), strategy=Strategy(shard=3)),
    }


def test_a_running_mean_is_that_of_the_global_batch_and_is_named() -> None:
    expected = plain(Centred)
    for found in run(several):
        for name, (mine, lines) in found.items():
            assert_same(mine, expected)
            assert lines == [
                "buffers: 'mean' and 1 more differ between replicas, fed by each one's own batch; after every step "
                "such a buffer becomes its mean over replicas, as in one process for a running mean that is read "
                "before it is fed"
            ], name


class Late(Centred):
    """Fed when the first steps are over; whole numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls < 4:
            self.calls += 1
            return self.head(self.body(x))
        self.seen += int(x.sum() * 1000)
        return super().forward(x)


def test_buffers_diverging_later_reported_when_model_is_shown() -> None:
    """Buffers that begin to differ between ranks later are found when the model is shown."""
    (first, lines), (second, _) = run(train, Late)
    assert [line.partition(" differ ")[0] for line in lines] == ["buffers: 'mean' and 2 more"]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


# ---- pipelines: buffers of the model itself, fed between its stages ----

STAGES: dict[str, Any] = {
    "body": echelon.stage(0),
    "head": echelon.stage(1),
    "": echelon.pipeline(micro_batches=2),
}


class Averaging(nn.Module):
    """Buffers outside of any stage, fed by weights of either one; ``late`` is fed by the first stage's at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("average", torch.zeros(2, 6))
        self.register_buffer("late", torch.zeros(6, 4))
        self.register_buffer("made", torch.zeros(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("read", torch.ones(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.head.weight, 0.1)
        output = self.head(torch.tanh(self.body(x))) * (1 + self.read.mean())
        with torch.no_grad():
            self.late.lerp_(self.body.weight, 0.1)
            self.made = 0.9 * self.made + 0.1 * output.mean(0)
            self.calls += 1
            self.read.lerp_(self.head.weight, 0.5)
        return output


class Ended(Averaging):
    """The first stage reads what changes when it has ended."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x * (1 + self.late.mean()))
        return output + self.late.sum()


def in_stages() -> dict[str, Trained]:
    return {"even": train(Averaging, (8,), STAGES)[0]}


def test_buffers_from_other_stages_weights_equal_one_process() -> None:
    """Buffers computed from weights of other stages equal those of one process."""
    expected = plain(Averaging, micro=2)
    for found in run(in_stages):
        assert_same(found["even"], expected)


def test_buffer_changed_after_its_stage_ended_is_refused() -> None:
    for line in errors(train, Ended, (8,), STAGES):
        assert line == (
            "UsageError: buffer 'late' is changed after a module of stage 1 was called, but stage 0 has it, which has "
            "ended by then; change it before that, or in a module of stage 0"
        )
