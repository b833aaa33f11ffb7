"""Between a loss and gradients that are ready to be applied: merging steps, weighting by samples, reducing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.parallel.reduce import Reducer
from echelon.parallel.tally import Tally
from echelon.plan import Plan
from echelon.watch.clock import Clock


class Gradients:
    """The gradients of one model. ``groups`` carry the buckets; empty when this process is the whole job."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Iterable[str],
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self._plan, self._parameters = plan, parameters
        self._reducers = {key: Reducer(plan, key, parameters, groups) for key in optimizers} if groups else {}
        self._frozen = [(spec.name, parameters[spec.name]) for spec in plan.model if not spec.trainable]
        self._sum = plan.reduce_op == "sum"
        # Alone and unmerged, the loss's own gradient is the answer: nothing to weight, nothing to divide.
        self._plain = not groups and plan.gradient_merge == 1
        self.assumed: Tensor | float | None = None  #: samples of the previous update, see ``_assumption``
        self.merged = 0  #: forward passes since the last update
        self.merged_samples: Tensor | float = 0.0  #: samples all ranks saw in them
        self._stale = True  # those of a finished update stay readable until the next backward begins

    @property
    def ready(self) -> bool:
        return self.merged == self._plan.gradient_merge

    def add(self, loss: Tensor, samples: float, tally: Tally, clock: Clock) -> None:
        """Backward. The last of the merged passes also reduces, while backward runs.

        Every rank scales its loss by its own sample count, so that gradients are sums that add up over ranks and
        merged passes; one division by the global count gives the exact mean, however uneven the shares.
        """
        self.clear()
        self.merged += 1
        if self.ready:
            for reducer in self._reducers.values():
                reducer.arm(lambda: self._assumption(tally))
        scaled = loss if self._plain or self._sum else loss * samples
        scaled.backward()  # type: ignore[no-untyped-call]
        clock.lap("backward")
        if self.ready:
            self._finish(tally)
            clock.lap("communicate")
        else:
            self.merged_samples = self.merged_samples + tally.samples

    def add_local(self, loss: Tensor) -> None:
        """Backward and nothing else; ``reduce`` follows when the user says so."""
        self.clear()
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self, optimizers: Iterable[str], samples: float, tally: Tally) -> None:
        """Reduce what ``add_local`` gathered, this rank counting as ``samples``."""
        self._refuse_thawed()
        weight = 1.0 if self._sum else samples
        for key in optimizers:
            if key in self._reducers:
                self._reducers[key].arm(lambda: weight * self._divisor(tally))
                self._reducers[key].finish()

    def applied(self) -> None:
        """The optimizer has used them."""
        self.merged, self.merged_samples, self._stale = 0, 0.0, True

    def clear(self) -> None:
        if self._stale:
            for parameter in self._parameters.values():
                parameter.grad = None
            self._stale = False

    def unreduced(self) -> dict[str, Tensor]:
        """What has been merged but not reduced: part of the training state."""
        if not self.merged:
            return {}
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def facts(self) -> dict[str, float | None]:
        """The numbers that belong to the training state."""
        assumed = None if self.assumed is None else float(self.assumed)
        return {"merged": self.merged, "merged_samples": float(self.merged_samples), "assumed": assumed}

    def restore(self, facts: Mapping[str, Any], unreduced: Iterable[tuple[str, Callable[[], Tensor]]]) -> None:
        """Take up merged gradients again. A parameter named more than once gets the sum."""
        self._stale = True
        self.clear()
        self.merged, self.merged_samples, self.assumed = facts["merged"], facts["merged_samples"], facts["assumed"]
        for name, read in unreduced:
            parameter = self._parameters[name]
            grad = read().to(parameter.device)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _finish(self, tally: Tally) -> None:
        self._refuse_thawed()
        for reducer in self._reducers.values():
            reducer.finish()
        if self._sum or self._plain:
            return
        actual = self.merged_samples + tally.samples
        if self._reducers:
            self._correct(actual)
        else:
            self._scale(1.0 / actual)

    def _refuse_thawed(self) -> None:
        """A parameter that the plan does not reduce must not be trained: replicas would drift apart unseen."""
        for name, parameter in self._frozen:
            if self._reducers and parameter.grad is not None:
                raise UsageError(
                    f"'{name}' was frozen when distribute() was called and has a gradient now; "
                    "unfreeze it before distribute(), or call distribute() again"
                )

    def _assumption(self, tally: Tally) -> Tensor | float:
        """What to scale by while sending: as if there were as many samples as last time.

        Waiting for the true count here would hold a quick rank's backward until the slowest has done its forward
        pass. All ranks assume the same, so the sum can be put right afterwards, in the rare step where it must be.
        """
        if self._sum:
            return 1.0 / self._plan.gradient_merge
        if self.assumed is None:
            self.assumed = self.merged_samples + tally.samples
        return 1.0 / self.assumed

    def _correct(self, actual: Tensor | float) -> None:
        assert self.assumed is not None
        # On a GPU comparing would wait for the device; there the multiplication is cheaper than the question.
        if isinstance(actual, Tensor) or actual != self.assumed:
            self._scale(self.assumed / actual)
        self.assumed = actual

    def _scale(self, factor: Tensor | float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _divisor(self, tally: Tally) -> Tensor | float:
        return 1.0 / self._plan.gradient_merge if self._sum else 1.0 / tally.samples
