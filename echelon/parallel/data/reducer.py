"""Reducing gradients over replicas, in buckets, while backward still runs.

Autograd tells us when each parameter's gradient is complete. When a bucket's last one is, the bucket's
gradients are copied into one flat buffer and the buffer is all-reduced in the background. Afterwards
``parameter.grad`` is a view of the buffer, so nothing is copied back. Buckets leave in the plan's order on every
rank, whatever order backward finishes them in.

Buckets that DGC compresses stay where they are, or are reduced inside the host only.

A parameter that no rank used keeps ``grad = None``, as in one process: a zero instead would let weight decay and
momentum move it. Each bucket therefore carries one flag a parameter behind the gradients: who used me?

On a CPU the last bucket takes a step's loss and number of samples along: a message of their own would cost a small
model more than its gradients do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.activity import span, waiting
from echelon.parallel.data.all_reduce import AllReduce, sum_over
from echelon.parallel.data.sparse_gradients import reduce_sparse
from echelon.plan import Bucket, Plan

Carriers = Mapping[tuple[str, ...], Sequence[dist.ProcessGroup]]
Passes = Callable[[str], int]


SEATS = 5  # numbers that travel behind the flags of the last bucket


def once(name: str) -> int:
    """One backward pass makes every gradient."""
    return 1


def _carrier(plan: Plan, bucket: Bucket, carriers: Carriers) -> dist.ProcessGroup:
    groups = carriers[bucket.axes]
    return groups[plan.buckets.index(bucket) % len(groups)]


class Reducer:
    """Reduces the gradients of the plan's buckets that belong to one optimizer.

    carriers: by axes, the groups that carry buckets; a bucket along axes that are not there is reduced by nobody
    place:    this rank's place along the stage axis
    within:   the ranks of this host, when buckets that are compressed are first reduced among them
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: str,
        parameters: Mapping[str, nn.Parameter],
        carriers: Carriers,
        place: int = 0,
        within: dist.ProcessGroup | None = None,
    ) -> None:
        mine = [
            bucket
            for bucket in plan.buckets
            if bucket.optimizer == optimizer and place in bucket.places and carriers.get(bucket.axes)
        ]
        dense = [bucket for bucket in mine if not bucket.sparse]
        self._buckets = [
            _Bucket(
                *(bucket, parameters, plan, _carrier(plan, bucket, carriers), within), SEATS * (bucket is dense[-1])
            )
            for bucket in dense
        ]
        self._sparse = [(b.parameters[0], parameters[b.parameters[0]], carriers[b.axes][0]) for b in mine if b.sparse]
        self._armed, self._compressing = False, False
        self._next = 0
        for bucket in self._buckets:
            bucket.watch(self._on_complete)

    def arm(self, compressing: bool = False, passes: Passes = once) -> None:
        """From now on a completed bucket is sent; when ``compressing``, those that the plan compresses are not.

        ``passes`` says how many backward passes make up each parameter's gradient.
        """
        self._armed, self._compressing, self._next = True, compressing, 0
        for bucket in self._buckets:
            bucket.reset(passes)

    def can_piggyback(self, group: dist.ProcessGroup) -> bool:
        """Whether numbers can be summed over ``group`` beside the gradients."""
        return bool(self._buckets) and self._buckets[-1].can_piggyback(group)

    def piggyback(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Send ``SEATS`` numbers with the gradients; what is returned gives their sums, once ``finish`` is done."""
        return self._buckets[-1].piggyback(numbers)

    def finish(self) -> None:
        """Send what is left, wait for everything, and leave every parameter with its reduced gradient."""
        if self._next < len(self._buckets):
            with torch.no_grad():  # inside backward it is so
                self._send(everything=True)
        self._armed = False
        for bucket in self._buckets:
            bucket.turn()
        for bucket in self._buckets:
            bucket.collect()
        for name, parameter, group in self._sparse:
            with waiting("sum of sparse gradients", name, group):
                parameter.grad = reduce_sparse(name, parameter, group)

    def _on_complete(self) -> None:
        if self._armed:
            self._send()

    def _send(self, everything: bool = False) -> None:
        while self._next < len(self._buckets) and (everything or self._buckets[self._next].complete):
            self._buckets[self._next].send(self._compressing)
            self._next += 1


class _Bucket:
    """Some parameters, and the flat row in which their gradients travel and live afterwards."""

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        group: dist.ProcessGroup,
        within: dist.ProcessGroup | None,
        seats: int = 0,
    ) -> None:
        self.names, self._compressed = bucket.parameters, bucket.compressed
        self.parameters = [parameters[name] for name in bucket.parameters]
        self._size = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        self._group = group
        exact = plan.wire is None and not bucket.compressed and first.dtype in (torch.float32, torch.float64)
        here = exact and first.device.type == "cpu"
        seats = seats if here else 0
        self._row = torch.zeros(self._size + len(self.parameters) + seats, dtype=first.dtype, device=first.device)
        behind = self._row[self._size :]
        self._flags, self._seats = behind[: len(self.parameters)], seats
        self._behind = behind.numpy() if here else None  # the same memory, without an operation of torch's
        self._front = np.ones(len(behind)) if here else None  # what goes there: flags, and who rides
        self._slots = _views(self._row, self.parameters)
        self._scaled = plan.wire == "fp16"
        number = plan.buckets.index(bucket)
        said = "sum of gradients", f"bucket {number} ({span(bucket.parameters)})"
        self._sum = sum_over(self._row, plan.wire, group, number, *said)
        inside = within if bucket.compressed else None
        self._sum_within = sum_over(self._row, None, inside, 0, *said) if inside else None
        self._on_complete: Callable[[], None] = lambda: None
        self._under_way: AllReduce | None = None
        self._missing: list[int] = []
        self._waiting: dict[int, int] = {}  # passes to come, by parameter

    @property
    def complete(self) -> bool:
        return not self._waiting

    def watch(self, on_complete: Callable[[], None]) -> None:
        """Call ``on_complete`` whenever backward has made the last of these gradients."""
        self._on_complete = on_complete
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(_hook(self, index))  # type: ignore[no-untyped-call]

    def note(self, index: int) -> None:
        """Backward has made this gradient."""
        if self._under_way is not None:
            raise UsageError(
                f"the gradient of '{self.names[index]}' changed after it was sent: one backward finished it "
                "twice; with torch.utils.checkpoint use use_reentrant=False"
            )
        if self._waiting.get(index, 0) > 1:
            self._waiting[index] -= 1
            return
        self._waiting.pop(index, None)
        if not self._waiting:
            self._on_complete()

    def reset(self, passes: Passes) -> None:
        self._under_way = None
        every = range(len(self.names))
        self._waiting = dict.fromkeys(every, 1) if passes is once else {i: passes(self.names[i]) for i in every}

    def send(self, compressing: bool) -> None:
        over = self._sum_within if compressing and self._compressed else self._sum
        slots, made = self._made()
        if over is None:  # every rank keeps its own gradients; DGC takes them from here
            return
        if made:  # else nothing here was used, as where a stage holds a parameter for the sake of an output
            torch._foreach_copy_(slots, made)
        for i in self._missing:
            self._slots[i].zero_()
        if self._behind is not None:
            self._behind[:] = self._front
        else:
            self._flags.fill_(self._flag())
        for i in self._missing:
            self._flags[i] = 0
        for parameter, slot in zip(self.parameters, self._slots, strict=True):
            parameter.grad = slot  # the gradient autograd made is free from here on
        self._under_way = over
        over.start()

    def _made(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that are there, and where they go; notes those that are missing."""
        made = [p.grad for p in self.parameters]
        self._missing = []
        for i, grad in enumerate(made):
            if grad is None:
                self._missing.append(i)
            elif grad.is_sparse:
                raise UsageError(
                    f"'{self.names[i]}' has a sparse gradient, but it is not the weight of an Embedding or "
                    "EmbeddingBag with sparse=True; use one of those, or sparse=False"
                )
        there = [grad for grad in made if grad is not None]
        if not self._missing:
            return self._slots, there
        return [slot for slot, grad in zip(self._slots, made, strict=True) if grad is not None], there

    def _flag(self) -> Tensor | float:
        """What says "used". Beside a 1, gradients under 1e-11 vanish among half floats: there, the largest."""
        if not self._scaled:
            return 1.0
        low, high = torch.aminmax(self._row[: self._size])
        largest = torch.maximum(-low, high)
        return torch.where(largest == 0, torch.ones_like(largest), largest)

    def turn(self) -> None:
        if self._under_way is not None:
            self._under_way.turn()

    def collect(self) -> None:
        if self._under_way is None:
            return
        self._under_way.finish()
        self._under_way = None
        if self._missing:
            used = self._flags.tolist()
            for i in self._missing:
                if not used[i]:
                    self.parameters[i].grad = None

    def can_piggyback(self, group: dist.ProcessGroup) -> bool:
        ours, asked = dist.get_process_group_ranks(self._group), dist.get_process_group_ranks(group)
        return bool(self._seats) and set(ours) == set(asked)

    def piggyback(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        assert self._behind is not None
        assert self._front is not None
        self._front[-self._seats :] = numbers
        return self._behind[-self._seats :].tolist


def _hook(bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
    """Torch holds a hook, and what the hook holds, where Python's garbage collection does not look: hence a weak
    reference, or neither model nor connections would ever be freed."""
    found = weakref.ref(bucket)

    def hook(_: Tensor) -> None:
        living = found()
        if living is not None:
            living.note(index)

    return hook


def _views(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """One view of ``flat`` a parameter, laid out in memory as the parameter is (channels-last stays so)."""
    views, offset = [], 0
    for p in parameters:
        end = offset + p.numel()
        dense = torch.ops.aten.is_non_overlapping_and_dense(p)
        views.append(flat[offset:end].as_strided(p.shape, p.stride()) if dense else flat[offset:end].view(p.shape))
        offset = end
    return views
