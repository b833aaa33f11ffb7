"""Between a loss and gradients that are ready to be applied: merging steps, weighting by samples, reducing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

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
        self._sum = plan.reduce_op == "sum"
        # Alone and unmerged, the loss's own gradient is the answer: nothing to weight, nothing to divide.
        self._plain = not groups and plan.gradient_merge == 1
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
                reducer.arm(lambda: self._divisor(tally))
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

    def restore(
        self, merged: int, merged_samples: float, unreduced: Iterable[tuple[str, Callable[[], Tensor]]]
    ) -> None:
        """Take up merged gradients again. A parameter named more than once gets the sum."""
        self._stale = True
        self.clear()
        self.merged, self.merged_samples = merged, merged_samples
        for name, read in unreduced:
            parameter = self._parameters[name]
            grad = read().to(parameter.device)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _finish(self, tally: Tally) -> None:
        for reducer in self._reducers.values():
            reducer.finish()
        if not self._reducers and not self._plain:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._divisor(tally))

    def _divisor(self, tally: Tally) -> Tensor | float:
        if self._sum:
            return 1.0 / self._plan.gradient_merge
        return 1.0 / (self.merged_samples + tally.samples)
