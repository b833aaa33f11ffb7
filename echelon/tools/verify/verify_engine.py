"""The engine of ``echelon verify``: trains as usual and calls a ``VerifyObserver`` before and after every update."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.data import Loader
from echelon.data.torch_loader import LoaderRequest
from echelon.distributed.tensor_layout import Part
from echelon.engine.deferred_engine import DeferredEngine
from echelon.engine.early_calls import EarlyCalls
from echelon.engine.engine import Engine
from echelon.engine.forward_backward import PreparedBatch, StepLoss
from echelon.engine.planned_run import PlannedRun
from echelon.engine.run_context import RunContext
from echelon.engine.update import UpdateRecord
from echelon.engine.whole_model import put_together, whole_state
from echelon.parallel.objective import as_batch, count_samples
from echelon.parallel.step_outputs import first_rows
from echelon.plan import Plan
from echelon.tools.verify.batches import WeightedBatches
from echelon.tools.verify.float64 import to_float64
from echelon.tools.verify.observer import VerifyObserver
from echelon.tools.verify.replica_drift import Held, sums_of


class VerifyEngine(Engine):
    """An engine that calls its observer (``observer``) and shows it batches, gradients and weights."""

    def __init__(self, observer: VerifyObserver, planned: PlannedRun, batch: Any, early: EarlyCalls) -> None:
        self.observer = observer
        self.weighed = False  #: True if the script passed ``samples=`` to the current step
        self._samples: float | None = None  # ``samples`` of the last ``backward`` before the next update
        super().__init__(planned, batch, early)

    # ---- calls of the observer ----

    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        self.weighed = samples is not None
        if self.observer.question.wide:
            batch, named = to_float64(batch), to_float64(named)
        loss = super().step(*batch, samples=samples, outputs=outputs, **named)
        if outputs:  # one process computes the rows of all replicas, but its script expects those of its own batch
            self._output = first_rows(self.output, count_samples(as_batch(batch, named, self.world.device)))
        return loss

    def _prepare(
        self, batch: tuple[Any, ...], named: dict[str, Any], samples: float | None, outputs: bool
    ) -> PreparedBatch:
        made = super()._prepare(batch, named, samples, outputs)
        inputs, count = self.observer.batch(self, made.inputs, made.rows if samples is None else samples)
        return PreparedBatch(inputs, count, None if samples is None else count)

    def _forward_backward(self, batch: PreparedBatch) -> StepLoss:
        staged = self._parts.staged is not None
        with (
            self.observer.listening(self) if staged else contextlib.nullcontext()
        ):  # not staged: see ``_observed_loss``
            return super()._forward_backward(batch)

    def _reduce(self, loss: StepLoss, batch: PreparedBatch) -> bool:
        is_complete = super()._reduce(loss, batch)
        self.observer.loss(self, loss, batch.rows)
        return is_complete

    @property
    def _forward(self) -> Callable[[Any], Tensor]:
        return self._observed_loss

    def _observed_loss(self, inputs: Any) -> Tensor:
        with self.observer.listening(self):
            return self.forward(inputs)

    def forward(self, inputs: Any) -> Tensor:
        """Return the loss of a batch, or the weighted sum of the losses of ``WeightedBatches``."""
        forward = self._planned.objective.forward_loss
        if not isinstance(inputs, WeightedBatches):
            return forward(inputs)
        if len(inputs.pieces) == 1 and inputs.pieces[0].weight == 1.0:
            return forward(inputs.pieces[0].batch)  # unscaled: the loss's denominator is read from its graph
        losses = [forward(piece.batch) * piece.weight for piece in inputs.pieces]
        return torch.stack(losses).sum()

    def backward(self, loss: Tensor, samples: float | None = None) -> None:
        self._samples = samples
        super().backward(self.observer.backward(self, loss), samples)

    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        samples_of_loss = self._samples if samples is None else samples
        self.observer.update(
            self, optimizer, float(self._passes.own_counts.known.count) if samples_of_loss is None else samples_of_loss
        )
        super().update(optimizer, samples)
        self._samples = None

    def _open_loader(self, request: LoaderRequest) -> Loader:
        return self.observer.loader(self.world, super()._open_loader(request))

    def _update_weights(
        self, optimizers: Mapping[str, torch.optim.Optimizer], loss: Tensor, factor: float
    ) -> Tensor | None:
        if self.observer.gradients(self, list(optimizers)):
            return super()._update_weights(optimizers, loss, factor)
        return None

    def _rate_factor(self, step: int) -> float:
        return self.observer.rate(step, super()._rate_factor(step))

    def _observe(self, update: UpdateRecord) -> Tensor:
        loss = super()._observe(update)
        self.observer.applied(self)
        return loss

    # ---- disabled ----

    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        """Do nothing, so that the script's files are not touched."""
        return Path(directory or os.devnull)

    # ---- queries of the observer ----

    @property
    def contributes(self) -> bool:
        """True on the one rank that reports for its batch."""
        return self._passes.contributes

    @property
    def replica(self) -> int:
        return self.world.data_rank

    @property
    def counts_outputs(self) -> bool:
        """True if this rank's module outputs count: no other rank computes the same for the same samples."""
        return self.plan.batch_per_split_rank or self._planned.grid.coords["split"] == 0

    @property
    def shows_draws(self) -> bool:
        """True if the random draws of a forward can be seen: not in compiled code, and not in pipeline stages."""
        fast = self.plan.fast
        return self._parts.staged is None and not (fast.compiled or fast.graphs)

    @property
    def steps_alone(self) -> bool:
        return self._parts.local is not None

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def allows_own_loop(self) -> bool:
        """True if the plan supports ``backward`` and ``update``."""
        return self.plan.pipeline is None and not self._run.backend.pushes

    def whole_gradients(self, optimizers: Sequence[str]) -> dict[str, Tensor]:
        """Return the full gradients of the parameters of ``optimizers`` by name, in host memory, before the update.

        All ranks call it.
        """
        held = self._parts.local_state
        stepped = {name for key in optimizers for group in held.groups[key] for name in group}
        found = {n: value.grad for n, value in held.parameters.items() if n in stepped and value.grad is not None}
        dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}
        own: dict[str, Tensor | Part] = {name: held.part(name, grad.detach()) for name, grad in dense.items()}
        return put_together(own, held.contributes, self.world.control if self._holds_parts else None)

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the full parameters and buffers by name, as ``whole_state`` does. All ranks call it."""
        held = self._parts.local_state
        with self._run.checker.explained(), self._replicas.shown():
            return whole_state(held, self.world.control, self._holds_parts)

    def held_sums(self) -> list[Held]:
        """Return the checksums of the parameters that this rank updates."""
        held = self._parts.local_state
        return [sums_of(name, held.part(name, value.detach())) for name, value in held.parameters.items()]

    @property
    def _holds_parts(self) -> bool:
        return self.plan.is_model_parallel or self.plan.shard is not None


class DeferredVerifyEngine(DeferredEngine):
    """Waits for the first batch, as the script's own engine does, and shows the observer its loaders."""

    def __init__(self, observer: VerifyObserver, run: RunContext, plan: Plan, **known: Any) -> None:
        self._observer = observer
        super().__init__(run, plan, **known)

    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        if self._observer.question.wide:
            batch, named = to_float64(batch), to_float64(named)
        return super().step(*batch, samples=samples, outputs=outputs, **named)

    def _open_loader(self, request: LoaderRequest) -> Loader:
        loader = super()._open_loader(request)
        return loader if self._engine is not None else self._observer.loader(self.world, loader)
