"""Doing what a Plan says about the fast path, before and after a rank gets its part of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.fast.chosen import Chosen
from echelon.fast.compiled import Compiling, Say, forget
from echelon.fast.fused import fuse
from echelon.fast.padded import pad
from echelon.objective import Objective
from echelon.parallel.gradients import backward_of
from echelon.parallel.strides import follow_weights
from echelon.plan import Plan

Backward = Callable[[Tensor | float], None]
Forward = Callable[[Any], Tensor]


def prepare(model: nn.Module, chosen: Chosen) -> None:
    """Goes before everything that takes parameters' strides for its own. What an earlier engine compiled is undone."""
    forget(model)
    if chosen.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def fast_path(
    plan: Plan, model: nn.Module, objective: Objective, given: Mapping[str, torch.optim.Optimizer], say: Say
) -> FastPath | None:
    """What the engine goes through in every step; None where a step is as it was."""
    chosen = plan.fast
    for optimizer in given.values() if chosen.channels_last else ():
        follow_weights(optimizer)
    for key in chosen.fused:
        fuse(given[key])
    pad(model, chosen.padded)
    if not (chosen.compiled or chosen.channels_last or chosen.graphs):
        return None
    return FastPath(plan, model, objective, say)


def plain_pass(batch: Any, forward: Forward) -> tuple[Tensor, Backward]:
    """A step as it was written: the loss, and what its backward takes."""
    loss = forward(batch)

    def backward(weight: Tensor | float) -> None:
        backward_of(loss, weight)

    return loss, backward


class FastPath:
    """One rank's forward and backward, by the fast path."""

    def __init__(self, plan: Plan, model: nn.Module, objective: Objective, say: Say) -> None:
        chosen = plan.fast
        self._channels_last = chosen.channels_last
        self._alone = plan.ranks == 1 and plan.lean is None  # lean has applied what a failed backward has made
        self._model = model
        self._compiling: Compiling | None = None
        loss = objective.loss
        if chosen.compiled:
            self._compiling = Compiling(say, model, loss)
            self._compiling.modules(model, chosen.compiled)
            objective.change_loss(self._compiling.function)
        self._graphs = None
        if chosen.graphs:
            from echelon.fast.graphs import Graphs

            self._graphs = Graphs(plan, model, loss, say)

    def arrange(self, batch: Any) -> Any:
        """Images as convolutions want them; on the device, without waiting for it."""
        return tree_map(_arranged, batch) if self._channels_last else batch

    def run(self, batch: Any, forward: Forward) -> tuple[Tensor, Backward]:
        """The loss, known when backward is over, and what that takes."""
        if self._compiling is not None:
            self._compiling.begin()
        if self._graphs is not None:
            return self._graphs.run(batch, lambda given: self._plain(given, forward))
        return self._plain(batch, forward)

    def _plain(self, batch: Any, forward: Forward) -> tuple[Tensor, Backward]:
        loss, inner = plain_pass(batch, forward)

        def backward(weight: Tensor | float) -> None:
            try:
                inner(weight)
            except Exception as error:
                if self._compiling is None or not self._alone or not self._compiling.failed(error):
                    raise
                self._again(error, batch, forward, weight)

        return loss, backward

    def _again(self, error: Exception, batch: Any, forward: Forward, weight: Tensor | float) -> None:
        """The whole pass once more, uncompiled: what backward had done until it failed is worth nothing."""
        assert self._compiling is not None
        self._compiling.give_up(error)
        for parameter in self._model.parameters():
            parameter.grad = None
        plain_pass(batch, forward)[1](weight)


def _arranged(leaf: Any) -> Any:
    is_image = isinstance(leaf, Tensor) and leaf.dim() == 4 and leaf.is_floating_point()
    return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf
