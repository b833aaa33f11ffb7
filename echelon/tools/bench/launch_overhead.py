"""Measure the fixed costs of a kernel: host time to launch it, and device time of the shortest kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.tools.bench.device_timer import DeviceTimer, Row


def launch_rows(clock: DeviceTimer) -> list[Row]:
    """Return the seconds per kernel, measured in three ways.

    chain:  host seconds per kernel of a small transformer's forward and backward, through modules and autograd
    bare:   host seconds of the cheapest operation alone
    device: device seconds of the shortest kernel
    """
    tiny = torch.zeros(8, device=clock.device)
    step = _chain(clock.device)
    with _OpCounter() as counted:
        step()
    chain = clock.host_seconds(step) / counted.kernels
    return [
        {"what": "chain", "kernels": counted.kernels, "seconds": chain},
        {"what": "bare", "seconds": clock.host_seconds(lambda: tiny.add_(1.0))},
        {"what": "device", "seconds": clock.seconds(lambda: tiny.add_(1.0))},
    ]


def training() -> tuple[nn.Module, Tensor]:
    """Return a transformer whose step takes one core a few milliseconds, and a batch for it."""
    return nn.Sequential(*(_Block(128) for _ in range(4))), torch.randn(8, 64, 128)


def training_rows(clock: DeviceTimer) -> list[Row]:
    """Time forward and backward of the ``training`` model as a whole.

    Consecutive kernels find less of their data in caches than a kernel that is timed alone.
    """
    model, batch = training()

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(batch).sum().backward()

    step()
    seconds = sorted(clock.lap(step) for _ in range(40))
    return [{"what": "training", "seconds": seconds[len(seconds) // 4]}]


def _chain(device: torch.device) -> Any:
    """Return a step of a transformer so small that its time is host overhead on a GPU, and Python overhead on a CPU."""
    width, samples, positions = (256, 2, 64) if device.type == "cuda" else (16, 1, 4)
    model = nn.Sequential(*(_Block(width) for _ in range(12))).to(device)
    batch = torch.randn(samples, positions, width, device=device)

    def step() -> None:
        model(batch).sum().backward()

    step()  # allocates the gradients, so that later steps accumulate as a second micro-batch does
    return step


class _Block(nn.Module):
    """A transformer block as in GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.answer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.ask(self.before(x)).chunk(3, 2))
        x = x + self.answer(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.between(x))))  # type: ignore[no-any-return]


class _OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that launch a kernel: all but views, detach and empty allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        self.kernels += not aliases and "empty" not in func.__name__ and "detach" not in func.__name__
        return out
