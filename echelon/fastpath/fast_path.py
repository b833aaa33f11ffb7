"""Applies the fast path of a Plan, before and after a rank gets its part of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.base.errors import UsageError
from echelon.checkpoint.state_strides import follow_weights
from echelon.fastpath.compile import ModuleCompiler, Say, forget
from echelon.fastpath.compile_cache import keep_programs
from echelon.fastpath.fused_optimizers import fuse
from echelon.fastpath.graph_validation import PassSnapshot
from echelon.fastpath.padded_vocab import pad
from echelon.parallel.data.gradients import backward_of
from echelon.parallel.loss.loss_weights import weighs_losses
from echelon.parallel.objective import Objective
from echelon.plan import Plan
from echelon.strategy.fastpath_choice import FastPathChoice

EARLY = 3  #: first passes, before which buffers and random state are saved to repeat a pass that fails to compile

Backward = Callable[[Tensor | float], None]
Forward = Callable[[Any], Tensor]


class ForwardPass(NamedTuple):
    """A forward pass whose backward has not run yet.

    loss:     loss of the batch; with a CUDA graph it is valid after backward
    backward: function that runs backward of the loss times a weight
    """

    loss: Tensor
    backward: Backward


class EagerPass:
    """A forward pass that has run eagerly, whose backward has not run yet."""

    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def backward(self, weight: Tensor | float) -> None:
        """Run backward of the loss times ``weight``."""
        backward_of(self.loss, weight)


def prepare(model: nn.Module, chosen: FastPathChoice) -> None:
    """Set channels last if chosen, and undo what an earlier engine compiled.

    Call this before any code that stores the parameters' strides.
    """
    forget(model)
    if chosen.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def fast_path(
    plan: Plan,
    model: nn.Module,
    objective: Objective,
    given: Mapping[str, torch.optim.Optimizer],
    forward: Forward,
    say: Say,
    keep: Path | None = None,
) -> FastPath | None:
    """Apply the chosen parts, and return the FastPath that the engine runs each step with.

    The result is None if steps run unchanged.

    forward: function from a batch to its loss
    keep:    directory of the run in which compiled programs are kept
    """
    chosen = plan.fast
    if chosen.compiled and (line := keep_programs(keep, next(model.parameters()).device)):
        say(line)
    for optimizer in given.values() if chosen.channels_last else ():
        follow_weights(optimizer)
    for key in chosen.fused:
        fuse(given[key])
    pad(model, chosen.padded)
    if not (chosen.compiled or chosen.channels_last or chosen.graphs):
        return None
    return FastPath(plan, model, objective, forward, say)


class FastPath:
    """Runs one rank's forward and backward on the fast path."""

    def __init__(self, plan: Plan, model: nn.Module, objective: Objective, forward: Forward, say: Say) -> None:
        chosen = plan.fast
        self._loss_of, self._say = forward, say
        self._channels_last = chosen.channels_last
        self._alone = (
            plan.ranks == 1 and plan.low_memory is None
        )  # low_memory has already applied gradients of a failed backward
        self._model, self._objective, self._passes = model, objective, 0
        self._parameters = list(model.parameters())  # cached, because walking all modules in each step takes longer
        self._compiling: ModuleCompiler | None = None
        loss = objective.loss
        if chosen.compiled:
            self._compiling = ModuleCompiler(say, model, loss)
            self._compiling.modules(model, chosen.compiled)
            if not weighs_losses(plan):  # the graph of a compiled loss does not show what it averages over
                objective.change_loss(self._compiling.function)
        self._graphs = None
        if chosen.graphs:
            from echelon.fastpath.cuda_graphs import CudaGraphRunner

            self._graphs = CudaGraphRunner(plan, model, loss, say)

    def stop_graphs(self, reason: str) -> None:
        """Stop using CUDA graphs, and log the reason if they were in use."""
        if self._graphs is not None:
            self._graphs = None
            self._say(f"fast: CUDA graphs disabled: {reason}")

    def arrange(self, batch: Any) -> Any:
        """Convert images to channels last on the device, without waiting for it."""
        return tree_map(_arranged, batch) if self._channels_last else batch

    def run(self, batch: Any) -> ForwardPass:
        """Run forward: eagerly, compiled, or as a CUDA graph."""
        if self._compiling is not None:
            self._compiling.begin()
        if self._graphs is not None and self._objective.outputs is None:  # a graph returns only a loss
            return ForwardPass(*self._graphs.run(batch, self._plain))
        return self._plain(batch)

    def count_pass(self) -> None:
        """Count a forward pass, or a step of a pipeline; after the first ones, report what was not compiled."""
        self._passes += 1
        if self._passes == EARLY + 1 and self._compiling is not None:
            self._compiling.report_if_nothing_was_made()
            self._compiling.report_graph_breaks()

    def _plain(self, batch: Any) -> ForwardPass:
        if self._compiling is None or self._compiling.gave_up:
            return self._forward(batch)
        before = self._kept()
        try:
            with self._compiling.step(recovers=before is not None):
                loss, inner = self._forward(batch)
        except Exception as error:
            if not self._gives_up(error):
                raise
            return self._again(before, batch)

        def backward(weight: Tensor | float) -> None:
            fresh = all(parameter.grad is None for parameter in self._parameters)
            try:
                inner(weight)
            except Exception as error:
                # The partial gradients of a failed backward are invalid and cannot be separated from earlier gradients.
                if not fresh or not self._gives_up(error):
                    raise
                for parameter in self._parameters:
                    parameter.grad = None
                self._again(before, batch).backward(weight)

        return ForwardPass(loss, backward)

    def _kept(self) -> PassSnapshot | None:
        """Return a snapshot of the state that a pass changes, in the first passes, which are likely to compile."""
        self.count_pass()
        early = self._passes <= EARLY and self._alone
        return PassSnapshot(self._model, next(self._model.parameters()).device) if early else None

    def _gives_up(self, error: Exception) -> bool:
        """Return True if the failed pass can be run again uncompiled; give up compiling then."""
        assert self._compiling is not None
        if not self._alone or not self._compiling.failed(error):
            return False
        self._compiling.give_up(error)
        return True

    def _again(self, before: PassSnapshot | None, batch: Any) -> ForwardPass:
        if before is not None:
            before.restore()
        return self._eager(batch)

    def _eager(self, batch: Any) -> ForwardPass:
        made = EagerPass(self._loss_of(batch))
        return ForwardPass(made.loss, made.backward)

    def _forward(self, batch: Any) -> ForwardPass:
        try:
            return self._eager(batch)
        except RuntimeError as error:
            if not self._channels_last or "view size is not compatible" not in str(error):
                raise
            raise UsageError(
                "forward() calls view() on a tensor that is not contiguous, because images are in channels_last format "
                "here; use reshape() or flatten(), or give Strategy(fast=Fast(channels_last=False))"
            ) from error


def _arranged(leaf: Any) -> Any:
    is_image = isinstance(leaf, Tensor) and leaf.dim() == 4 and leaf.is_floating_point()
    return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf
