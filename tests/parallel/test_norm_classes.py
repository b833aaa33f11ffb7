"""Normalization layers that users bring: with a forward of another kind, functional, or of torch's SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from zoo import QUIET

import echelon
from echelon import Recompute, Strategy

CHANNELS = 4


class Activated(nn.BatchNorm2d):
    """A norm like timm's BatchNormAct2d: torch's forward written out, and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 4
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        running = (self.running_mean, self.running_var)
        return torch.relu(F.batch_norm(x, *running, self.weight, self.bias, self.training, 0.1, self.eps))


class Inheriting(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(super().forward(x))


class Explicit(nn.BatchNorm2d):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(nn.BatchNorm2d.forward(self, x) * scale)


class Functional(nn.Module):
    """No batch norm by its class."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("var", torch.ones(CHANNELS))
        self.scale = nn.Parameter(torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self)


class ByF(Functional):
    def __init__(self) -> None:
        super().__init__(None)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.scale, None, self.training, 0.2).relu()


class ByTorch(ByF):
    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, self.scale, None, self.mean, self.var, self.training, 0.1, 1e-5, False)


def helper(x: Tensor, layer: Functional) -> Tensor:
    return batch_norm(x, layer.mean, layer.var, layer.scale, training=layer.training)


class ByHelper(ByF):
    def normalized(self, x: Tensor) -> Tensor:
        return helper(x, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(x) + x


class Unrecorded(ByF):
    """Statistics of the batch in evaluation too, and none are kept."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.scale, training=True)


class Standardized(nn.Conv2d):
    """A layer like timm's StdConv2d: batch norm of a weight, which has nothing to do with the batch."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, CHANNELS, -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class SyncActivated(nn.SyncBatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Frozen(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        return x - self.running_mean.view(1, -1, 1, 1)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "activated": lambda: Activated(CHANNELS),
    "inheriting": lambda: Inheriting(CHANNELS),
    "explicit": lambda: Explicit(CHANNELS),
    "cumulative": lambda: Inheriting(CHANNELS, momentum=None),
    "untracked": lambda: Inheriting(CHANNELS, track_running_stats=False),
    "no affine": lambda: Explicit(CHANNELS, affine=False),
    "by F": ByF,
    "by torch": ByTorch,
    "by a helper": ByHelper,
    "unrecorded": Unrecorded,
    "standardized weight": Standardized,
    "sync": lambda: nn.SyncBatchNorm(CHANNELS),
    "sync activated": lambda: SyncActivated(CHANNELS),
    "frozen": lambda: Frozen(CHANNELS),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "instance tracked": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=False),
    "group": lambda: nn.GroupNorm(2, CHANNELS),
}


def network(norm: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    parts = [nn.Conv2d(3, CHANNELS, 3, padding=1), norm(), nn.Conv2d(CHANNELS, CHANNELS, 3), norm()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(CHANNELS * 16, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 6, 6, generator=draw) * 2 + 1, torch.randint(3, (8,), generator=draw)


Trained = tuple[list[float], dict[str, Tensor]]
STEPS = 4


def plain(norm: Callable[[], nn.Module], micro: int = 1) -> Trained:
    """A loop of plain torch on whole batches, or on micro-batches one after another."""
    net = network(norm)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        parts = [F.cross_entropy(net(a), b) for a, b in zip(x.chunk(micro), y.chunk(micro), strict=True)]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


MARKS: dict[str, dict[str, Any]] = {
    "": {},
    "pipeline": {"0-1": echelon.stage(0), "2-5": echelon.stage(1), "": echelon.pipeline(micro_batches=2)},
    "split": {"5": echelon.split("column")},
}


def train(
    norm: Callable[[], nn.Module], strategy: Strategy | None = None, shares: tuple[int, ...] = (), layout: str = ""
) -> Trained:
    net = echelon.annotate(network(norm), MARKS[layout])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=optimizer, strategy=strategy, log=QUIET)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        ranks, rank = (1, 0) if layout else (echelon.world_size(), echelon.rank())
        shares = shares or (8 // ranks,) * ranks
        rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        losses.append(float(engine.step(x[rows], y[rows])))
    weights = engine.whole_state()
    engine.close()
    return losses, weights


def train_all(names: list[str]) -> dict[str, Trained]:
    echelon.init()
    found = {name: train(NORMS[name]) for name in names}
    found |= {f"{name}, uneven": train(NORMS[name], shares=(6, 2)) for name in ("activated", "by F")}
    for layout in ("pipeline", "split"):
        found |= {f"{name}, {layout}": train(NORMS[name], layout=layout) for name in ("sync", "sync activated")}
    found["activated, recompute"] = train(
        NORMS["activated"], Strategy(recompute=Recompute(checkpoints=("1", "2", "3")))
    )
    return found


def assert_same(name: str, mine: Trained, expected: Trained) -> None:
    assert mine[0] == pytest.approx(expected[0], abs=1e-5), name
    for key, value in expected[1].items():
        assert torch.allclose(mine[1][key], value, rtol=1e-4, atol=1e-5), f"{name}: {key}"


def test_norms_of_every_class_give_the_numbers_of_one_process() -> None:
    for found in run(train_all, list(NORMS)):
        for name, mine in found.items():
            assert_same(name, mine, plain(NORMS[name.partition(",")[0]], micro=2 if "pipeline" in name else 1))


# ---- what cannot be as in one process is said ----


class ByHand(nn.BatchNorm2d):
    """A norm like InplaceABN: statistics that no call of torch's batch norm computes."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        mean = x.mean((0, 2, 3))
        self.running_mean.lerp_(mean.detach(), 0.1)
        return x - mean.view(1, -1, 1, 1)


class Parted(nn.BatchNorm2d):
    """A norm like timm's SplitBatchNorm2d."""

    def __init__(self) -> None:
        super().__init__(CHANNELS)
        self.other = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return torch.cat([super().forward(first), self.other(second)])


def said(norm: Callable[[], nn.Module]) -> list[str]:
    echelon.init()
    net = network(norm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=optimizer, log=QUIET)
    lines: list[str] = []
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign]
    for step in range(STEPS):
        engine.step(*(part.chunk(2)[echelon.rank()] for part in batch(step)))
    return lines


def test_statistics_that_cannot_be_shared_are_named_once() -> None:
    by_hand, parted, quiet = (run(said, norm)[0] for norm in (_by_hand, Parted, _activated))
    assert by_hand == [
        f"batch norm: '{name}' (ByHand) computes statistics without F.batch_norm; they stay per replica"
        for name in ("1", "3")
    ]
    assert [line.partition(";")[0] for line in parted] == [
        f"batch norm: '{name}' (Parted) normalizes 2 rows of 4 by themselves, chosen by their place in each replica's "
        "batch"
        for name in ("1", "3")
    ]
    assert quiet == []


def _by_hand() -> nn.Module:
    return ByHand(CHANNELS)


def _activated() -> nn.Module:
    return Activated(CHANNELS)


# ---- a forward that not all ranks run ----


def sample_on_rank_0(own_loop: bool, after: int, grad: bool) -> None:
    echelon.init()
    net = network(_activated)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=optimizer, log=QUIET)

    def train_on(step: int) -> None:
        x, y = (part.chunk(2)[echelon.rank()].to(echelon.device()) for part in batch(step))
        if own_loop:
            engine.backward(F.cross_entropy(net(x), y))
            engine.update()
        else:
            engine.step(x, y)

    for step in range(after):
        train_on(step)
    with torch.set_grad_enabled(grad):
        whole = batch(0)[0].to(echelon.device())
        net(whole)  # on all ranks together it is a forward like others
        net.eval()(whole)
        net.train()
        if echelon.rank() == 0:
            net(whole)
    train_on(after)


@pytest.mark.parametrize(("own_loop", "after", "grad"), [(False, 1, False), (True, 1, True), (False, 2, True)])
def test_a_training_forward_on_one_rank_only_names_batch_norm(own_loop: bool, after: int, grad: bool) -> None:
    for line in errors(sample_on_rank_0, own_loop, after, grad):
        assert line.startswith("MismatchError: rank 1 calls ")
        assert "while rank 0 calls forward(batch norm '" in line
        assert line.endswith("run this forward on every rank, or call model.eval() before it")


# ---- pipelines of replicas ----


class Between(nn.Module):
    """Batch norm that the model itself calls, between its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, CHANNELS), nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.batch_norm(self.body(x), None, None, training=self.training))


def lines_of_a_pipeline() -> list[str]:
    echelon.init()
    marks = {"body": echelon.stage(0), "head": echelon.stage(1), "": echelon.pipeline(micro_batches=2)}
    net = echelon.annotate(Between(), marks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = echelon.distribute(
        net, loss=F.cross_entropy, optimizer=optimizer, log=QUIET, cluster=echelon.cluster(average=2)
    )
    lines: list[str] = []
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign]
    for step in range(STEPS):
        x, y = (part[engine.world.data_rank :: 2] for part in batch(step))
        engine.step(x[:, 0, 0, :4], y)
    return lines


def test_batch_norm_between_stages_is_named_with_replicas() -> None:
    assert run(lines_of_a_pipeline, ranks=4)[0] == [
        "batch norm: forward of the model calls F.batch_norm outside of any stage; its statistics stay those of each "
        "replica: move the call into a module with a stage"
    ]
