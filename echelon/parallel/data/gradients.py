"""Gradients from the loss to the optimizer: weights by samples, merges passes, reduces over ranks, unscales."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from echelon.base.errors import LossError, UsageError
from echelon.optim.grad_scaler import LossScaler, are_finite
from echelon.parallel.clip import Census
from echelon.parallel.data.dgc import SparseMomentum
from echelon.parallel.data.global_loss import GlobalLoss, PiggybackSum, PipelineGlobalLoss
from echelon.parallel.data.reducer import Passes, Reducer, once
from echelon.parallel.loss.loss_reduction import Count
from echelon.plan import Plan


class GradientReducer(Protocol):
    """Reduces the gradients of one optimizer over ranks."""

    def arm(self, compressing: bool = ..., passes: Passes = ...) -> None: ...

    def finish(self) -> None: ...


class PartialGradientSum(Protocol):
    """Sums gradients of which several ranks hold partial sums, after the reduction over replicas."""

    def add_up(self, optimizers: Collection[str]) -> None: ...


class Gradients:
    """The gradients of one model.

    parameters: parameters that backward computes gradients of, by name
    held:       parameters that optimizers step on, by name: the same ones, or their shards
    reducers:   reducers by optimizer; empty if this process steps alone
    census:     norm and finiteness over all ranks that hold a part of the model
    sums:       further sums to compute after the gradients are reduced
    group:      ranks that share a loss, which piggybacks on a reducer that covers them; None if this rank is alone
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        held: Mapping[str, nn.Parameter],
        optimizers: Mapping[str, torch.optim.Optimizer],
        reducers: Mapping[str, GradientReducer],
        scaler: LossScaler,
        census: Census,
        sums: Sequence[PartialGradientSum] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._plan = plan
        self._scaler = scaler
        self._census = census
        self._sums = sums
        self._parameters = parameters
        self._held = held
        self._reducers = reducers
        self._all = list({id(each): each for each in (*parameters.values(), *held.values())}.values())
        self._device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self._compressors = {key: o for key, o in optimizers.items() if isinstance(o, SparseMomentum)}
        self._owned = {key: [p for group in o.param_groups for p in group["params"]] for key, o in optimizers.items()}
        trainable = {spec.name: spec.trainable for spec in plan.model}
        self._frozen = [(name, parameter) for name, parameter in parameters.items() if not trainable[name]]
        self._sum = plan.reduce_op == "sum"
        self._may_be_sum = plan.reduce_op == "auto"  # a pipeline's last stage knows after the first pass
        self._adds_passes = False  # merged passes are added, not averaged: the loss itself is a sum over samples
        self._final = plan.low_memory is not None  # applied while backward runs: nothing can be corrected afterwards
        self.holds_sums = plan.shard is not None and plan.shard.level > 1  #: each pass is reduced immediately
        # One process without merging uses the loss's own gradient: there is nothing to weight or divide.
        self._plain = not reducers and plan.gradient_merge == 1 and plan.pipeline is None
        self.assumed: Tensor | float | None = None  #: samples of the previous update, see ``_assume``
        self._assumed_rows: Tensor | float = 1.0  # rows of the same update
        self.merged = 0  #: forward passes since the last update
        self.merged_samples: Tensor | float = 0.0  #: counts of all ranks' losses in these passes
        self.merged_rows: Tensor | float = 0.0  #: rows of all ranks' batches in these passes
        self.merged_loss: Tensor | float = 0.0  #: sum of all ranks' losses in these passes, each times its count
        self._own_samples: Count = 0.0  # counts of this rank's losses
        self.weights: Tensor | float = 0.0  #: sum of the weights of this rank's losses
        self._boost = 1.0  # factor in addition to the loss scale, see ``_assume``
        self._carrier = self._carrier_of(group)
        self.checks_finite = False  #: True to check gradients and loss without a loss scale, too
        self.overflowed = False  #: True if some gradient is not finite, so that the step must be skipped
        self.spoiled = False  #: True if the loss is not finite or, without a loss scale, some gradient
        self._stale = True  # gradients of a finished update stay readable until the next backward begins

    @property
    def ready(self) -> bool:
        return self.merged == self._plan.gradient_merge

    @property
    def is_reduced(self) -> bool:
        """True if ranks reduce their gradients; False if each rank steps alone."""
        return bool(self._reducers)

    @property
    def own_samples(self) -> float:
        """Sum of the counts of this rank's losses since the last update."""
        return float(self._own_samples)

    @property
    def loss(self) -> Tensor | float:
        """Loss of the update over all ranks and merged passes: the mean, or the sum if losses are sums."""
        if self._adds_passes:
            return self.merged_loss
        return self.merged_loss / (self.merged if self._sum else self.merged_samples)

    @property
    def empty(self) -> bool:
        """True if this rank steps alone and has seen no sample, so that there is nothing to apply."""
        return not self._reducers and isinstance(self.merged_samples, float | int) and self.merged_samples == 0

    def before_backward(self, loss: GlobalLoss | PipelineGlobalLoss, step: int, passes: Passes = once) -> None:
        """Prepare a backward pass, which multiplies losses by the result of ``weigh``.

        Every rank weights its loss by its share of the global batch, so that the sum of the gradients over ranks and
        merged passes is the exact mean, however uneven the shares are. In the last of the merged passes, the gradients
        are reduced while backward runs.
        """
        self.clear()
        self.merged += 1
        self._assume(loss)
        if self.ready or self.holds_sums:
            self._arm(self._owned, step, passes)

    def after_backward(self, loss: GlobalLoss | PipelineGlobalLoss, step: int) -> bool:
        """Add the pass to the totals; after the last of the merged passes, complete the reduction and return True."""
        rides, ready = loss.rides, self.ready
        if not rides:
            self._note(loss)
        if ready or self.holds_sums:
            self._reduce(self._owned)
        if rides:
            self._note(loss)
        if ready:
            self._finalize(self._owned, step, loss)
        return ready

    def _carrier_of(self, group: dist.ProcessGroup | None) -> PiggybackSum | None:
        """Return the reducer that the loss of each step can piggyback on."""
        if group is None or len(self._reducers) != 1 or self._plan.gradient_merge > 1:
            return None
        (reducer,) = self._reducers.values()
        return reducer if isinstance(reducer, Reducer) and reducer.can_piggyback(group) else None

    @property
    def counts_first(self) -> bool:
        """True if backward needs the number of samples of all ranks."""
        return self.assumed is None and not (self._plain or self._sum)

    @property
    def ride(self) -> PiggybackSum | None:
        """Reducer that the step's loss can piggyback on; None if the sample count is needed before backward."""
        return self._carrier if self.assumed is not None else None

    def add_local(self, loss: Tensor, weight: float = 1.0) -> None:
        """Run backward only; the user's loop triggers ``reduce`` later.

        weight: weight of this rank, default 1. Weighting afterwards gives the same result, except for the sums over
                replicas within backward itself (batch norm)
        """
        self.clear()
        backward_of(loss, self._scaler.scale * (weight if self._together and not self._sum else 1.0))

    def reduce(
        self, optimizers: Iterable[str], samples: Count, global_loss: GlobalLoss, step: int, weighed: bool = False
    ) -> None:
        """Reduce the gradients of ``add_local``, with ``samples`` as this rank's weight.

        weighed: True if ``add_local`` has applied the weight already; default False
        """
        self.merged, self.merged_samples, self._own_samples = self._plan.gradient_merge, global_loss.samples, samples
        self.merged_rows = global_loss.rows
        self.assumed, self._boost = global_loss.samples, 1.0
        chosen = list(optimizers)
        if self._together and not (self._sum or global_loss.is_sum):
            self._scale((1.0 if weighed else samples) / global_loss.samples)
        self._arm(chosen, step)
        self._reduce(chosen)
        self._finalize(chosen, step, global_loss)

    def applied(self) -> None:
        """Reset the counts after the optimizer has used the gradients."""
        self.merged = 0
        self.merged_samples = 0.0
        self._own_samples = 0.0
        self._stale = True
        self.merged_rows, self.merged_loss = 0.0, 0.0
        self.weights = 0.0
        if self._final:
            self.assumed = None  # makes the next step wait for its own count

    def clear(self) -> None:
        if self._stale:
            for parameter in self._all:
                parameter.grad = None
            self._stale = False

    def unreduced(self) -> dict[str, Tensor]:
        """Return the gradients that are merged but not reduced: part of the training state."""
        if not self.merged:
            return {}
        return {name: p.grad for name, p in self._gathering.items() if p.grad is not None}

    @property
    def _gathering(self) -> Mapping[str, nn.Parameter]:
        """Parameters whose ``grad`` holds the merged gradients."""
        return self._held if self.holds_sums else self._parameters

    def facts(self) -> dict[str, float | None]:
        """Return the numbers that belong to the training state."""
        return {name: float(value) if isinstance(value, Tensor) else value for name, value in self.numbers().items()}

    def numbers(self) -> dict[str, Tensor | float | None]:
        """Return the numbers of ``facts`` without waiting for a GPU that has not computed them yet."""
        return {
            "merged": self.merged, "merged_samples": self.merged_samples, "own_samples": self._own_samples,
            "merged_rows": self.merged_rows, "merged_loss": self.merged_loss, "assumed": self.assumed,
        }  # fmt: skip

    def restore(self, facts: Mapping[str, Any], unreduced: Iterable[tuple[str, Callable[[], Tensor]]]) -> None:
        """Restore merged gradients. A parameter that occurs more than once gets the sum."""
        self._stale = True
        self.clear()
        self.merged, self.assumed = facts["merged"], facts["assumed"]
        self.merged_samples, self._own_samples = facts["merged_samples"], facts["own_samples"]
        # checkpoints of earlier versions have neither, because they counted rows only
        self.merged_rows, self.merged_loss = (
            facts.get("merged_rows", self.merged_samples),
            facts.get("merged_loss", 0.0),
        )
        for name, read in unreduced:
            parameter = self._gathering[name]
            grad = read().to(parameter.device)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _assume(self, global_loss: GlobalLoss | PipelineGlobalLoss) -> None:
        """Set the total sample count that the weights of this pass refer to: the one of the previous update.

        Waiting here for the true number would delay a fast rank's backward until the slowest rank has finished its
        forward pass. All ranks assume the same number, so the sum can be corrected afterwards if it was wrong.

        A loss scale is chosen for the mean over one batch, as in one process. Gradients of one batch's share of a large
        global batch are smaller by the number of batches and would underflow in fp16, so the loss is multiplied by
        that number too.
        """
        passes = self._plan.gradient_merge
        if isinstance(global_loss, GlobalLoss) and global_loss.is_sum and not self._sum:
            self._sum = self._adds_passes = True
        if self._scaler.active and not self._plain:
            self._boost = float(passes * (self._plan.replicas if self._together and not self._sum else 1))
        if self._plain or self._sum or self.assumed is not None:
            return
        count, rows = global_loss.expected
        self.assumed = count * passes if isinstance(count, Tensor) or count else 1.0
        self._assumed_rows = rows * passes if isinstance(rows, Tensor) or rows else 1.0

    def weigh(self, count: Count) -> Count:
        """Return the factor for a loss over ``count`` samples: its share of all samples of the update, scaled."""
        scale = self._scaler.scale * self._boost
        if self._plain or self._adds_passes:
            weight: Count = scale
        elif self._sum:
            weight = scale / self._plan.gradient_merge
        else:
            assert self.assumed is not None
            weight = count * scale / self.assumed
        self.weights = self.weights + weight
        return weight

    def weigh_rows(self, rows: float) -> Count:
        """Return the weight of a loss that averages over rows, for an update whose main loss counts other items."""
        scale = self._scaler.scale * self._boost
        return scale / self._plan.gradient_merge if self._sum else rows * scale / self._assumed_rows

    def weigh_sum(self) -> float:
        """Return the weight of a loss that is a sum over samples."""
        return self._scaler.scale * self._boost

    def _note(self, global_loss: GlobalLoss | PipelineGlobalLoss) -> None:
        """Add the counts and the loss of a pass to the totals, after its backward."""
        if isinstance(global_loss, PipelineGlobalLoss) and self._may_be_sum:
            self._may_be_sum = False
            self._sum = self._adds_passes = global_loss.adds_up
        self._own_samples = self._own_samples + global_loss.count
        self.merged_samples = self.merged_samples + global_loss.samples
        self.merged_rows = self.merged_rows + global_loss.rows
        if self._plan.gradient_merge > 1:
            self.merged_loss = self.merged_loss + global_loss.total

    @property
    def _together(self) -> bool:
        """True if several replicas reduce their gradients in every step."""
        return bool(self._reducers) and self._plan.replicas > 1

    def _arm(self, optimizers: Iterable[str], step: int, passes: Passes = once) -> None:
        for key in optimizers:
            if key in self._reducers:
                self._reducers[key].arm(compressing=self._sparsity(key, step) is not None, passes=passes)

    def _sparsity(self, key: str, step: int) -> float | None:
        return self._compressors[key].sparsity(step) if key in self._compressors else None

    def _finalize(self, optimizers: Collection[str], step: int, loss: GlobalLoss | PipelineGlobalLoss) -> None:
        """Correct the reduced gradients for the assumed sample count, check for overflow, and exchange sparse ones."""
        if not (self._sum or self._plain or self.empty):
            self._correct(self.merged_samples)
        self.overflowed = (self._scaler.active or self.checks_finite) and not self._all_finite(optimizers)
        if self.checks_finite:
            total = self.loss if self._plan.gradient_merge > 1 else loss.loss
            self.spoiled = not (self.empty or math.isfinite(total)) or (self.overflowed and not self._scaler.active)
            self.overflowed |= self.spoiled
        for key in optimizers:
            sparsity = self._sparsity(key, step)
            if sparsity is not None and not self.overflowed:
                own = self.merged_samples / self._own_samples if self.own_samples else 0.0
                self._compressors[key].exchange(sparsity, magnify=own)

    def _reduce(self, optimizers: Collection[str]) -> None:
        self._refuse_thawed()
        for key in optimizers:
            if key in self._reducers:
                self._reducers[key].finish()
        for sums in self._sums if self.ready else ():
            sums.add_up(optimizers)

    def _all_finite(self, optimizers: Iterable[str]) -> bool:
        grads = [p.grad for key in optimizers for p in self._owned[key] if p.grad is not None]
        finite = self._scaler.unscale(grads, self._boost) if self._scaler.active else are_finite(grads)
        return self._census.all_finite(finite, self._device)

    def _refuse_thawed(self) -> None:
        """Raise UsageError if a frozen parameter has a gradient: it is not reduced, so replicas would diverge."""
        for name, parameter in self._frozen:
            if self._reducers and parameter.grad is not None:
                raise UsageError(
                    f"'{name}' was frozen when distribute() was called and has a gradient now; "
                    "unfreeze it before distribute(), or call distribute() again"
                )

    def _correct(self, actual: Tensor | float) -> None:
        assert self.assumed is not None
        self._assumed_rows = self.merged_rows
        # On a GPU a comparison would wait for the device; there the multiplication is cheaper.
        if isinstance(actual, Tensor) or actual != self.assumed:
            self._scale(self.assumed / actual)
        self.assumed = actual

    def _scale(self, factor: Tensor | float) -> None:
        scaled_already: set[int] = set()
        for parameter in (*self._parameters.values(), *self._held.values()):
            if parameter.grad is not None and id(parameter.grad) not in scaled_already:
                scaled_already.add(id(parameter.grad))
                parameter.grad.mul_(factor if not isinstance(factor, Tensor) else factor.to(parameter.grad.device))


def backward_of(loss: Tensor, weight: Tensor | float) -> None:
    """Run backward of ``loss * weight``, without the multiplication and without the checks of ``Tensor.backward``.

    Together these take 30 microseconds, a large part of a small step.
    """
    if isinstance(weight, Tensor):
        gradient = weight.to(loss.device, loss.dtype)
    else:
        finite = weight if weight <= torch.finfo(loss.dtype).max else math.inf  # a loss scale may exceed it
        gradient = torch.scalar_tensor(finite, dtype=loss.dtype, device=loss.device)
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on any trained parameter; compute it from the model's output, without detach(), "
            "argmax() or torch.no_grad(), and train some parameters (the loss that engine.step() returns has had its "
            "backward already)"
        )
    if type(loss) is not Tensor:
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    Variable._execution_engine.run_backward(
        (loss,),
        (gradient,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
