"""Optimizer in backward: each gradient is applied as soon as it is complete, and then freed.

With several replicas, a gradient is first all-reduced over them, in fp32 and in the same order on all ranks, so that
their weights stay bitwise equal; a few all-reduces overlap with backward.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.activity import waiting
from echelon.parallel.data.reducer import Passes, once
from echelon.parallel.low_memory.adam import LowMemoryAdam, LowMemoryParam
from echelon.plan import Plan

UNDER_WAY = 2  # all-reduces in flight at a time


class OptimizerInBackward:
    """Replaces the reducer and the optimizer's step.

    order:   names of the parameters, in the order in which replicas all-reduce their gradients
    carrier: process group of the replicas; None if there is only one
    """

    def __init__(self, optimizer: LowMemoryAdam, order: Sequence[str], carrier: dist.ProcessGroup | None) -> None:
        self._optimizer, self._carrier = optimizer, carrier
        by_name = {entry.name: entry for entry in optimizer.entries}
        self._entries = [by_name[name] for name in order]
        self._came_in = self._entries  # the order of the last backward
        self._armed = False
        self._waiting: dict[LowMemoryParam, None] = {}  # parameters without a gradient yet, in order
        self._unsent: deque[LowMemoryParam] = deque()
        self._sums: deque[_GradientSum] = deque()
        for entry in self._entries:
            entry.parameter.register_post_accumulate_grad_hook(_hook(self, entry))  # type: ignore[no-untyped-call]

    def arm(self, compressing: bool = False, passes: Passes = once) -> None:
        """Apply the gradients of the next backward as they are computed."""
        self._armed, self._waiting, self._unsent = True, dict.fromkeys(self._entries), deque(self._entries)
        self._sums.clear()
        self._optimizer.begin(self._came_in)
        self._came_in = []

    def arrived(self, entry: LowMemoryParam) -> None:
        """Apply or send a gradient that backward has computed."""
        if not self._armed:
            return
        if entry not in self._waiting:
            raise UsageError(
                f"the gradient of '{entry.name}' changed after it was applied: one backward finished it twice; with "
                "torch.utils.checkpoint use use_reentrant=False"
            )
        del self._waiting[entry]
        self._came_in.append(entry)
        if self._carrier is None:
            self._apply(entry)
        else:
            self._send_complete(self._carrier)

    def finish(self) -> None:
        """Apply the remaining gradients: those of a backward before ``arm``, and those that only other ranks have."""
        self._armed = False
        if self._carrier is None:
            for entry in self._waiting:
                self._apply(entry)
        else:
            self._waiting.clear()
            self._send_complete(self._carrier)
            while self._sums:
                self._apply_sum()
        received = set(self._came_in)
        self._came_in += [entry for entry in self._entries if entry not in received]

    def _apply(self, entry: LowMemoryParam) -> None:
        grad, entry.parameter.grad = entry.parameter.grad, None
        if grad is not None:
            self._optimizer.apply(entry, grad)

    def _send_complete(self, carrier: dist.ProcessGroup) -> None:
        while self._unsent and self._unsent[0] not in self._waiting:
            self._sums.append(_GradientSum(self._unsent.popleft(), carrier))
            while len(self._sums) > UNDER_WAY:
                self._apply_sum()

    def _apply_sum(self) -> None:
        found = self._sums.popleft()
        grad = found.received()
        if grad is not None:
            self._optimizer.apply(found.entry, grad)


class _GradientSum:
    """All-reduce of one gradient and of a "used" flag: a parameter that no replica used is not updated."""

    def __init__(self, entry: LowMemoryParam, carrier: dist.ProcessGroup) -> None:
        self.entry, self._carrier = entry, carrier
        parameter = entry.parameter
        grad, parameter.grad = parameter.grad, None
        self._used = grad is not None
        self._row = torch.zeros(parameter.numel() + 1, device=parameter.device)
        if grad is not None:
            self._row[:-1].copy_(entry.flat(grad))
            self._row[-1] = 1.0
        self._work = dist.all_reduce(self._row, group=carrier, async_op=True)

    def received(self) -> Tensor | None:
        assert self._work is not None
        with waiting("sum of gradients", self.entry.name, self._carrier):
            self._work.wait()
        if not self._used and not float(self._row[-1]):
            return None
        return self._row[:-1].as_strided(self.entry.parameter.shape, self.entry.parameter.stride())


def _hook(updates: OptimizerInBackward, entry: LowMemoryParam) -> Callable[[Tensor], None]:
    """Return a hook with weak references, as in parallel/data/reducer.py: torch would keep both alive forever."""
    found, which = weakref.ref(updates), weakref.ref(entry)

    def hook(_: Tensor) -> None:
        living, one = found(), which()
        if living is not None and one is not None:
            living.arrived(one)

    return hook


def updates_in_backward(
    plan: Plan, key: str, optimizer: torch.optim.Optimizer, carrier: dist.ProcessGroup | None
) -> OptimizerInBackward:
    """Return the in-backward updates of one optimizer, in the order of the plan's buckets.

    Raises UsageError for sparse gradients.
    """
    assert isinstance(optimizer, LowMemoryAdam)
    local = [bucket for bucket in plan.buckets if bucket.optimizer == key]
    sparse = next((bucket.parameters[0] for bucket in local if bucket.sparse), None)
    if sparse is not None:
        raise UsageError(f"low_memory: '{sparse}' has a sparse gradient; build its embedding with sparse=False")
    return OptimizerInBackward(optimizer, [name for bucket in local for name in bucket.parameters], carrier)
