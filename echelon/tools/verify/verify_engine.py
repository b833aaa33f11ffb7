"""The engine of ``echelon verify``: trains as usual and calls a ``VerifyObserver`` before and after every update."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.data import Loader
from echelon.distributed.tensor_layout import Part
from echelon.engine.engine import Engine
from echelon.engine.whole_model import put_together, whole_state
from echelon.parallel.data.global_loss import GlobalLoss, PipelineGlobalLoss
from echelon.parallel.objective import as_batch, count_samples
from echelon.parallel.step_outputs import first_rows
from echelon.tools.verify.batches import WeightedBatches
from echelon.tools.verify.float64 import to_float64
from echelon.tools.verify.observer import VerifyObserver
from echelon.tools.verify.replica_drift import Held, sums_of


class VerifyEngine(Engine):
    """An engine that calls its observer (``witness``) and shows it batches, gradients and weights."""

    witness: VerifyObserver
    weighed = False  #: True if the script passed ``samples=`` to the current step
    _samples: float | None = None  # ``samples`` of the last ``backward`` before the next update

    # ---- calls of the observer ----

    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        self.weighed = samples is not None
        if self.witness.question.wide:
            batch, named = to_float64(batch), to_float64(named)
        loss = super().step(*batch, samples=samples, outputs=outputs, **named)
        if outputs:  # one process computes the rows of all replicas, but its script expects those of its own batch
            self.output = first_rows(self.output, count_samples(as_batch(batch, named, self.world.device)))
        return loss

    def _pass(self, inputs: Any, rows: float, samples: float | None = None) -> GlobalLoss | PipelineGlobalLoss:
        inputs, count = self.witness.batch(self, inputs, rows if samples is None else samples)
        staged = self._assembled().staged is not None
        with self.witness.listening(self) if staged else contextlib.nullcontext():  # not staged: see ``_loss``
            tally = super()._pass(inputs, count, None if samples is None else count)
        self.witness.loss(self, tally, count)
        return tally

    def _loss(self, inputs: Any) -> Tensor:
        with self.witness.listening(self):
            return self.forward(inputs)

    def forward(self, inputs: Any) -> Tensor:
        """Return the loss of a batch, or the weighted sum of the losses of ``WeightedBatches``."""
        if not isinstance(inputs, WeightedBatches):
            return super()._loss(inputs)
        if len(inputs.pieces) == 1 and inputs.pieces[0].weight == 1.0:
            return super()._loss(inputs.pieces[0].batch)  # unscaled: the loss's denominator is read from its graph
        losses = [super(VerifyEngine, self)._loss(piece.batch) * piece.weight for piece in inputs.pieces]
        return torch.stack(losses).sum()

    def backward(self, loss: Tensor, samples: float | None = None) -> None:
        self._samples = samples
        super().backward(self.witness.backward(self, loss), samples)

    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        told = self._samples if samples is None else samples
        self.witness.update(self, optimizer, float(self._passes.own_counts.known.count) if told is None else told)
        super().update(optimizer, samples)
        self._samples = None

    def loader(self, dataset: Any, *sizes: Any, **options: Any) -> Loader:
        return self.witness.loader(self, super().loader(dataset, *sizes, **options))

    def _update_weights(self, optimizers: Mapping[str, torch.optim.Optimizer], loss: Tensor) -> None:
        if self.witness.gradients(self, list(optimizers)):
            super()._update_weights(optimizers, loss)

    def _rate_factor(self, step: int) -> float:
        return self.witness.rate(step, super()._rate_factor(step))

    def _apply(self, optimizers: Mapping[str, torch.optim.Optimizer], tally: GlobalLoss | PipelineGlobalLoss) -> Tensor:
        loss = super()._apply(optimizers, tally)
        self.witness.applied(self)
        return loss

    # ---- disabled ----

    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        """Do nothing, so that the script's files are not touched."""
        return Path(directory or os.devnull)

    # ---- queries of the observer ----

    @property
    def speaks(self) -> bool:
        """True on the one rank that reports for its batch."""
        return self._passes.speaks

    @property
    def replica(self) -> int:
        return self._grid.index(*self.plan.data_axes)

    @property
    def counts_outputs(self) -> bool:
        """True if this rank's module outputs count: no other rank computes the same for the same samples."""
        return self.plan.batch_per_split_rank or self._grid.coords["split"] == 0

    @property
    def shows_draws(self) -> bool:
        """True if the random draws of a forward can be seen: not in compiled code, and not in pipeline stages."""
        fast = self.plan.fast
        return self._assembled().staged is None and not (fast.compiled or fast.graphs)

    @property
    def steps_alone(self) -> bool:
        return self._local is not None

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def allows_own_loop(self) -> bool:
        """True if the plan is known and supports ``backward`` and ``update``."""
        return self.plan.pipeline is None and self.served is None and self._choosing is None

    def whole_gradients(self, optimizers: Sequence[str]) -> dict[str, Tensor]:
        """Return the full gradients of the parameters of ``optimizers`` by name, in host memory, before the update.

        All ranks call it.
        """
        held = self._assembled().holdings
        stepped = {name for key in optimizers for group in held.groups[key] for name in group}
        found = {n: value.grad for n, value in held.parameters.items() if n in stepped and value.grad is not None}
        dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}
        mine: dict[str, Tensor | Part] = {name: held.part(name, grad.detach()) for name, grad in dense.items()}
        return put_together(mine, held.speaks, self.world.control if self._holds_parts else None)

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the full parameters and buffers by name, as ``whole_state`` does. All ranks call it."""
        held = self._assembled().holdings
        with self._company.explained(), self._one.shown():
            return whole_state(held, self.world.control, self._holds_parts)

    def held_sums(self) -> list[Held]:
        """Return the checksums of the parameters that this rank updates."""
        held = self._assembled().holdings
        return [sums_of(name, held.part(name, value.detach())) for name, value in held.parameters.items()]

    @property
    def _holds_parts(self) -> bool:
        return self.plan.is_model_parallel or self.plan.shard is not None
