"""A pipeline in one process: every stage, or rank of several, with a model of its own, against plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.parallel.objective import Objective
from echelon.parallel.pipeline.placeholder_pool import keep_only
from echelon.parallel.pipeline.stage_runner import StageRunner
from echelon.plan.fake_forward import is_placeholder
from echelon.plan.stage_trace import StageTrace, record

CPU = torch.device("cpu")


class FixedWeights:
    """A weight for every micro-batch, whatever its loss averages over."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights

    def of_loss(self, micro: int, loss: Tensor) -> float:
        return self._weights[micro]

    def of_auxiliary(self, micro: int) -> float:
        return self._weights[micro]


class Staged:
    """Runs forward of all stages in order, then backward in reverse, as a schedule with one micro-batch at a time."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None,
        batch: Any,
        units: Mapping[str, int],
        ranks: Sequence[Sequence[int]] | None = None,
        amp: Any = None,
        defer: Any = None,
    ) -> None:
        self.recording: StageTrace = record(Objective(model, loss, amp, CPU), model, batch, units)
        self.stages = range(self.recording.stages)
        self.ranks = ranks or [[stage] for stage in self.stages]
        self.models = [copy.deepcopy(model) for _ in self.ranks]
        self.runners: dict[int, StageRunner] = {}
        for mine, stages in zip(self.models, self.ranks, strict=True):
            keep_only(mine, self.recording, stages)
            runner = StageRunner(mine, Objective(mine, loss, amp, CPU), self.recording, stages, CPU, defer)
            self.runners.update(dict.fromkeys(stages, runner))

    def begin(self, batches: Sequence[Any], weights: Sequence[float], training: bool = True) -> None:
        for runner in dict.fromkeys(self.runners.values()):
            runner.begin(batches, FixedWeights(weights) if training else None)

    def forward(self, micro: int) -> dict[str, Tensor | None]:
        made: dict[str, Tensor | None] = {}
        for stage in self.stages:
            keys = {one.key for one in self.recording.transfers if one.target == stage}
            received = {key: _leaf(made[key]) for key in keys if made[key] is not None}
            made.update(self.runners[stage].forward(stage, micro, received))
        return made

    def backward(self, micro: int, parts: Sequence[Any] = ("B",)) -> None:
        back: dict[str, Tensor] = {}
        for stage in reversed(self.stages):
            keys = {one.key for one in self.recording.transfers if one.source == stage}
            found = self.runners[stage].backward(stage, micro, {key: back.get(key) for key in keys}, parts[0])
            for part in parts[1:]:
                self.runners[stage].backward(stage, micro, {}, part)
            for key, gradient in found.items():
                if gradient is not None:
                    back[key] = back[key] + gradient if key in back else gradient

    def step(self, batches: Sequence[Any], weights: Sequence[float], parts: Sequence[Any] = ("B",)) -> list[Tensor]:
        self.begin(batches, weights)
        for micro in range(len(batches)):
            self.forward(micro)
            self.backward(micro, parts)
        return [self.runners[self.stages[-1]].losses[micro] for micro in range(len(batches))]

    def gradients(self) -> dict[str, Tensor | None]:
        """Summed over the ranks that hold a parameter."""
        found: dict[str, Tensor | None] = {}
        for model in self.models:
            for name, value in model.named_parameters():
                if not is_placeholder(value) and value.grad is not None:
                    grad = value.grad.to_dense() if value.grad.is_sparse else value.grad
                    found[name] = grad + found[name] if found.get(name) is not None else grad.clone()
                found.setdefault(name, None)
        return found

    def buffers(self) -> dict[str, list[Tensor]]:
        """Return each buffer, from every rank that holds it."""
        found: dict[str, list[Tensor]] = {}
        for model in self.models:
            for name, value in model.named_buffers():
                if not is_placeholder(value):
                    found.setdefault(name, []).append(value)
        return found


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def plain_step(
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    batches: Sequence[Any],
    weights: Sequence[float],
    amp: Any = None,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Losses and gradients of one process; the model's buffers move on."""
    objective = Objective(model, loss, amp, CPU)
    losses = []
    for batch, weight in zip(batches, weights, strict=True):
        _, value = objective(batch)
        (value * weight).backward()
        losses.append(value.detach())
    return losses, {name: value.grad for name, value in model.named_parameters()}


def assert_same_step(
    staged: Staged, model: nn.Module, loss: Any, batches: Sequence[Any], amp: Any = None, parts: Sequence[Any] = ("B",)
) -> None:
    """One step of several micro-batches: losses, gradients and buffers of one process. ``model`` is trained."""
    weights = [0.25 + 0.5 * micro for micro in range(len(batches))]
    losses = staged.step(batches, weights, parts)
    expected, gradients = plain_step(model, loss, batches, weights, amp)
    close = {"rtol": 1e-6, "atol": 1e-6} if amp is None else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(losses, expected, **close)
    found = staged.gradients()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, **close, msg=lambda text, name=name: f"{name}: {text}")
    held = staged.buffers()
    for name, buffer in model.named_buffers():
        for copy_of_it in held[name]:
            torch.testing.assert_close(copy_of_it, buffer, **close)
