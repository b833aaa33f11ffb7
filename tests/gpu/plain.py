"""Plain loops of torch on this rank's device, and the models that both sides train."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import token_loss

import echelon

#: Device of the ranks: ECHELON_TEST_GPU=cpu runs the same tests without a GPU.
DEVICE = "cpu" if os.environ.get("ECHELON_TEST_GPU") == "cpu" else "cuda"
ON_GPU = DEVICE == "cuda"
ROWS = 16

Batch = tuple[Tensor, Tensor]


class Images(nn.Module):
    """Convolutions and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A transformer of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"images": Images, "words": Words}
LOSSES: dict[str, Callable[..., Tensor]] = {"images": F.cross_entropy, "words": token_loss}


def batch_of(kind: str, step: int, rows: int = ROWS) -> Batch:
    """Return the global batch of a step, in host memory."""
    g = torch.Generator().manual_seed(300 + step)
    if kind == "words":
        ids = torch.randint(64, (rows, 12), generator=g)
        return ids, (ids * 7 + 3) % 64
    x = torch.randn(rows, 3, 16, 16, generator=g)
    return x, (x.mean((2, 3)).argmax(1) + 3 * (x[:, 0, 0, 0] > 0).long()) % 8


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[kind]()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Trained:
    """Losses, weights in host memory, and what else a test wants to know."""

    losses: list[float]
    weights: dict[str, Tensor]
    start: dict[str, Tensor] = field(default_factory=dict)  # parameters before the first step
    notes: dict[str, Any] = field(default_factory=dict)


def train_plainly(
    kind: str, steps: int, amp: torch.dtype | None = None, merge: int = 1, decay: float | None = None
) -> Trained:
    """Train as a script without the package does, on the device of the ranks.

    amp:   16 bits for forward and loss, whose gradient is scaled as fp16 needs it
    merge: batches whose gradients are averaged before an update
    decay: of a moving average of weights, which is returned in their place
    """
    device = torch.device(DEVICE)
    torch.backends.cudnn.enabled = amp is not None  # as in the harness, and where a GPU is to be quick
    model = made(kind).to(device)
    optimizer, losses = optimizer_of(model), list[float]()
    averages: dict[str, Tensor] = {}
    for step in range(steps):
        x, y = (part.to(device) for part in batch_of(kind, step))
        with torch.autocast(DEVICE, amp, enabled=amp is not None):
            loss = LOSSES[kind](model(x), y)
        scale = 2.0**12 if amp == torch.float16 else 1.0
        (loss * scale / merge).backward()
        losses.append(float(loss.detach()))
        if (step + 1) % merge:
            continue
        losses[-1] = sum(losses[-merge:]) / merge  # that of an update is the mean of its batches
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
        if decay is not None:
            follow(averages, model, decay)
    found = model.state_dict() if decay is None else averages
    return Trained(losses, in_host_memory(found), dict(made(kind).named_parameters()))


@torch.no_grad()
def follow(averages: dict[str, Tensor], model: nn.Module, decay: float) -> None:
    """Move averages of weights on by a step, as torch's AveragedModel does: they begin with the first."""
    for name, parameter in model.named_parameters():
        averages[name] = averages.get(name, parameter).lerp(parameter, 1 - decay)


def in_host_memory(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def my_share(batch: Batch) -> Batch:
    rows = len(batch[0]) // echelon.world_size()
    begin = rows * echelon.rank()
    return batch[0][begin : begin + rows], batch[1][begin : begin + rows]


def train_with_engine(kind: str, batches: Iterable[Batch], **options: Any) -> Trained:
    """Train a model by the engine on this rank's share of each batch; notes hold what was printed and the plan."""
    echelon.init(device=DEVICE)
    model = made(kind)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        options = {"loss": LOSSES[kind]} | options
        engine = echelon.distribute(model, optimizer=optimizer_of(model), log=echelon.Log(lines=False), **options)
        losses = [engine.step(*my_share(batch)) for batch in batches]
        values = [float(loss) for loss in losses]
        weights = in_host_memory(engine.whole_state())
        engine.close()
    devices = {parameter.device.type for parameter in model.parameters()}
    notes = {"said": said.getvalue(), "plan": engine.plan, "devices": devices, "backend": engine.world.backend}
    return Trained(values, weights, notes=notes)


def assert_equal(found: Trained, expected: Trained, tolerance: float = 1e-5, where: str = "") -> None:
    """Compare in fp32: each loss and each weight, in parts of what it is, or of 1."""
    assert found.losses, where
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance,
        msg=lambda message: f"{where}: losses: {message}",
    )  # fmt: skip
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], value, rtol=tolerance, atol=tolerance,
            msg=lambda message, name=name: f"{where}: {name}: {message}",
        )  # fmt: skip


def assert_alike(found: Trained, expected: Trained, where: str = "") -> None:
    """Compare in 16 bits, of which bf16 keeps 8: a product rounded elsewhere moves a loss by 2**-8 of it, and the way
    that all weights have gone by some per cent of its length; another gradient would move it by all of it."""
    assert found.losses == [value for value in found.losses if value == value], where  # noqa: PLR0124 - no NaN
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(mine - theirs) <= 2**-6 * max(1.0, abs(theirs)), f"{where}: loss {step}: {mine}, {theirs}"
    begin, mine, theirs = (
        torch.cat([values[name].detach().float().flatten() for name in expected.start])
        for values in (expected.start, found.weights, expected.weights)
    )
    apart, way = float((mine - theirs).norm()), float((theirs - begin).norm())
    assert apart <= 0.1 * way, f"{where}: weights are {apart:.3g} apart after a way of {way:.3g}"
