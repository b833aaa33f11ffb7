"""``OwnLoop``: the engine's calls for a user's own loop: ``backward``, ``update``, and what clips gradients between."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.engine.collective_calls import collective_call
from echelon.engine.engine_state import EngineState
from echelon.engine.forward_backward import StepLoss, refuse_own_loop
from echelon.engine.local_gradients import clip_values
from echelon.engine.preconditions import refuse_partial_gradients
from echelon.engine.update import Optimizers, UpdateRecord, parameters_of
from echelon.parallel.clip import clip_gradients


class OwnLoop(EngineState):
    """Calls for a user's own loop, exact on replicas, shards and splits."""

    if TYPE_CHECKING:

        def _update(self, optimizers: Optimizers, step_loss: StepLoss) -> UpdateRecord:
            """Apply the reduced gradients."""

        def _observe(self, update: UpdateRecord) -> Tensor:
            """Record the update."""

    def backward(self, loss: Tensor, samples: float | None = None) -> None:
        """Accumulate the gradients of this loss in a user's own loop. They stay local until ``update`` or ``reduce``.

        loss:    mean loss over this rank's batch
        samples: the same as in ``update``, but known before backward; synchronized batch norm needs it if the batches
                 of replicas have different sizes

        >>> engine.backward(loss(engine.model(x), y))
        >>> engine.update()
        """
        refuse_own_loop(self.plan, self._run.backend.pushes)
        self._nonfinite.check_loop(has_own_loop=True)
        self._run.schedules.before_pass(self._planned.loaders.epoch)
        self._passes.add(loss, samples)
        self._local_gradients.added()

    @collective_call("communicate")
    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        """Reduce and clip gradients, step the named optimizer (or all), and drop all gradients, in a user's own loop.

        optimizer: name of one of several optimizers; default: all
        samples:   weight of this rank in the mean, here or in ``backward``: the count that its loss averages over;
                   default: found from the loss. If it is unknown, all ranks count equally

        >>> engine.backward(loss(engine.model(x), y))
        >>> engine.update()
        """
        chosen = self._updates.chosen(optimizer)
        self._clock.lap("backward")
        self._local_gradients.about_to_reduce()
        with self._run.checker.explained():
            loss = self._passes.reduce_local(chosen, samples, self.steps)
            self._clock.lap("communicate")
            update = self._update(chosen, loss)
        self._observe(update)

    @collective_call("communicate")
    def reduce(self, optimizer: str | None = None, samples: float | None = None) -> None:
        """Reduce the accumulated gradients of the named optimizer (or all) now instead of in ``update``.

        From here to ``update``, a parameter's ``.grad`` is the global gradient; under ``shard`` and ``split``, it is
        the part that this rank holds. No ``backward`` may follow before ``update``.

        optimizer: name of one of several optimizers; default: all
        samples:   the same as in ``update``

        >>> engine.backward(loss(engine.model(x), y))
        >>> engine.reduce()
        >>> engine.update()
        """
        self._reduce_early(self._updates.chosen(optimizer), samples)

    @collective_call("communicate")
    def grad_norm(self, optimizer: str | None = None) -> Tensor:
        """Return the 2-norm of all gradients of the whole model that wait for ``update``, else of the last applied.

        After ``step`` with ``clip``, the result is the norm after clipping.

        optimizer: name of one of several optimizers; default: all

        >>> engine.backward(loss(engine.model(x), y))
        >>> norm = engine.grad_norm()
        """
        chosen = self._updates.chosen(optimizer)
        self._refuse("grad_norm")
        self._reduce_early(chosen)
        with self._run.checker.explained():
            return self._parts.census.norm(parameters_of(chosen), self._run.world.device)

    @collective_call("communicate")
    def clip_grad_norm_(self, max_norm: float, optimizer: str | None = None) -> Tensor:
        """Scale the gradients that wait for ``update`` to a joint 2-norm of at most ``max_norm``; return their norm.

        max_norm:  largest norm
        optimizer: name of one of several optimizers; default: all

        >>> engine.backward(loss(engine.model(x), y))
        >>> norm = engine.clip_grad_norm_(1.0)
        >>> engine.update()
        """
        chosen = self._waiting("clip_grad_norm_", optimizer)
        with self._run.checker.explained():
            return clip_gradients(parameters_of(chosen), float(max_norm), self._parts.census, self._run.world.device)

    @collective_call("communicate")
    def clip_grad_value_(self, clip_value: float, optimizer: str | None = None) -> None:
        """Clamp the gradients that wait for ``update`` to the range from ``-clip_value`` to ``clip_value``.

        clip_value: largest absolute value of an entry
        optimizer:  name of one of several optimizers; default: all

        >>> engine.backward(loss(engine.model(x), y))
        >>> engine.clip_grad_value_(0.5)
        >>> engine.update()
        """
        with torch.no_grad():
            clip_values(parameters_of(self._waiting("clip_grad_value_", optimizer)), float(clip_value))

    def _waiting(self, call: str, optimizer: str | None) -> Optimizers:
        """Reduce the gradients that wait for ``update`` and return their optimizers.

        Raises ``UsageError`` if no gradients wait.
        """
        chosen = self._updates.chosen(optimizer)
        self._refuse(call)
        if not self._passes.is_waiting:
            raise UsageError(
                f"{call}(): no gradients wait for update(), and step() has applied its own; call it between "
                "engine.backward(loss) and engine.update(), or give Strategy(clip=max_norm)"
            )
        self._reduce_early(chosen)
        return chosen

    def _refuse(self, call: str) -> None:
        refuse_partial_gradients(self._parts.plan, f"{call}()")

    def _reduce_early(self, optimizers: Collection[str], samples: float | None = None) -> None:
        with self._run.checker.explained():
            self._passes.reduce_early(optimizers, samples, self.steps)
