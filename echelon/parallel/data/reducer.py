"""All-reduces gradients over replicas in buckets, overlapped with backward.

An autograd hook reports when each parameter's gradient is complete. When the last gradient of a bucket is complete, the
bucket's gradients are copied into one flat buffer and the buffer is all-reduced in the background. Afterwards
``parameter.grad`` is a view of the buffer, so nothing is copied back. Buckets are sent in the plan's order on every
rank, whatever order backward finishes them in.

Buckets that DGC compresses are not reduced here, or are reduced only within the host.

A parameter that no rank used keeps ``grad = None``, as in one process: with a zero gradient, weight decay and momentum
would change it. Each bucket therefore has one flag per parameter behind the gradients, which says if a rank used it.

On a CPU the step's loss and number of samples piggyback on the last bucket: for a small model a separate message would
cost more than the gradients do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.activity import span, waiting
from echelon.distributed.collectives import all_gather
from echelon.parallel.data.all_reduce import AllReduce, sum_over
from echelon.parallel.data.host_sums import HostSums
from echelon.plan import Bucket, Plan

Carriers = Mapping[tuple[str, ...], Sequence[dist.ProcessGroup]]
Passes = Callable[[str], int]


PIGGYBACK_SLOTS = 8  # piggybacked numbers behind the flags of the last bucket


def once(name: str) -> int:
    """Return 1: a single backward pass completes every gradient."""
    return 1


def _carrier(plan: Plan, bucket: Bucket, carriers: Carriers) -> dist.ProcessGroup:
    groups = carriers[bucket.axes]
    return groups[plan.buckets.index(bucket) % len(groups)]


class Reducer:
    """Reduces the gradients of the plan's buckets that belong to one optimizer.

    carriers: process groups that reduce buckets, by axes; a bucket whose axes are missing is not reduced
    place:    this rank's coordinate on the stage axis, default 0
    within:   group of this host's ranks, if compressed buckets are first reduced among them; default None
    hosts:    sums of ranks that share memory, by axes; default none
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: str,
        parameters: Mapping[str, nn.Parameter],
        carriers: Carriers,
        place: int = 0,
        within: dist.ProcessGroup | None = None,
        hosts: Mapping[tuple[str, ...], HostSums] = MappingProxyType({}),
    ) -> None:
        local = [
            bucket
            for bucket in plan.buckets
            if bucket.optimizer == optimizer and place in bucket.stages and carriers.get(bucket.axes)
        ]
        dense = [bucket for bucket in local if not bucket.sparse]
        self._buckets = [
            _Bucket(
                bucket,
                parameters,
                plan,
                group=_carrier(plan, bucket, carriers),
                within=within,
                piggyback_slots=PIGGYBACK_SLOTS * (bucket is dense[-1]),
                host=hosts.get(bucket.axes),
            )
            for bucket in dense
        ]
        self._sparse = [(b.parameters[0], parameters[b.parameters[0]], carriers[b.axes][0]) for b in local if b.sparse]
        self._armed, self._compressing = False, False
        self._next = 0
        for bucket in self._buckets:
            bucket.watch(self._on_complete)

    def arm(self, compressing: bool = False, passes: Passes = once) -> None:
        """Start sending completed buckets; with ``compressing``, not those that the plan compresses.

        passes: function from a parameter's name to the number of backward passes that make up its gradient
        """
        self._armed, self._compressing, self._next = True, compressing, 0
        for bucket in self._buckets:
            bucket.reset(passes)

    def can_piggyback(self, group: dist.ProcessGroup) -> bool:
        """Return True if numbers can be summed over ``group`` along with the gradients."""
        return bool(self._buckets) and self._buckets[-1].can_piggyback(group)

    def piggyback(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Send ``PIGGYBACK_SLOTS`` numbers with the gradients; return a function for their sums, after ``finish``."""
        return self._buckets[-1].piggyback(numbers)

    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them, and set every ``parameter.grad`` to its reduced value."""
        if self._next < len(self._buckets):
            with torch.no_grad():  # autograd hooks already run without grad
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


class _Entry(NamedTuple):
    """The memory of a bucket's gradients.

    slots:  view of each gradient
    flags:  one number for each parameter behind them, not 0 if this rank used it
    behind: the flags and piggybacked numbers, written without a torch operation; None if that is not possible
    """

    slots: list[Tensor]
    flags: Tensor
    behind: NDArray[Any] | None


class _Bucket:
    """Some parameters, and the flat buffer in which their gradients are sent and then stay."""

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        group: dist.ProcessGroup,
        within: dist.ProcessGroup | None,
        piggyback_slots: int = 0,
        host: HostSums | None = None,
    ) -> None:
        self.names, self._compressed = bucket.parameters, bucket.compressed
        self.parameters = [parameters[name] for name in bucket.parameters]
        self._size = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        self._group = group
        exact = plan.comm_dtype is None and not bucket.compressed and first.dtype in (torch.float32, torch.float64)
        here = exact and first.device.type == "cpu"
        self._piggyback_slots = piggyback_slots if here else 0
        columns = self._size + len(self.parameters) + self._piggyback_slots
        self._row = torch.zeros(columns, dtype=first.dtype, device=first.device)
        self._own = self._entry(self._row, here)
        self._entries = {self._row.data_ptr(): self._own}  # by address: a sum may have memory of its own for them
        behind = columns - self._size
        self._front = np.ones(behind) if here else None  # values to write there: flags and piggybacked numbers
        self._scaled = plan.comm_dtype == "fp16"
        number = plan.buckets.index(bucket)
        call, what = "sum of gradients", f"bucket {number} ({span(bucket.parameters)})"
        shared = host if here else None
        self._sum = sum_over(self._row, plan.comm_dtype, group, number=number, call=call, what=what, host=shared)
        inside = within if bucket.compressed else None
        self._sum_within = sum_over(self._row, None, inside, call=call, what=what) if inside else None
        self._on_complete: Callable[[], None] = lambda: None
        self._under_way: AllReduce | None = None
        self._missing: list[int] = []
        self._waiting: dict[int, int] = {}  # number of outstanding passes, by parameter

    @property
    def complete(self) -> bool:
        return not self._waiting

    def watch(self, on_complete: Callable[[], None]) -> None:
        """Call ``on_complete`` whenever backward has computed the last of these gradients."""
        self._on_complete = on_complete
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(_hook(self, index))  # type: ignore[no-untyped-call]

    def note(self, index: int) -> None:
        """Record that backward has computed this gradient."""
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
        made = self._made()
        if over is None:  # every rank keeps its own gradients, which DGC reads from ``parameter.grad``
            return
        entry = self._entry_of(over)
        if made:  # empty if nothing here was used, e.g. a stage that holds a parameter only to return it
            every = zip(entry.slots, self.parameters, strict=True)
            slots = entry.slots if not self._missing else [slot for slot, p in every if p.grad is not None]
            torch._foreach_copy_(slots, made)
        for i in self._missing:
            entry.slots[i].zero_()
        if entry.behind is not None:
            entry.behind[:] = self._front
        else:
            entry.flags.fill_(self._flag())
        for i in self._missing:
            entry.flags[i] = 0
        for parameter, slot in zip(self.parameters, self._own.slots, strict=True):
            parameter.grad = slot  # frees the gradient that autograd allocated
        self._under_way = over
        over.start()

    def _entry_of(self, over: AllReduce) -> _Entry:
        row = over.entry()
        found = self._entries.get(row.data_ptr())
        if found is None:
            found = self._entries[row.data_ptr()] = self._entry(row, True)
        return found

    def _entry(self, row: Tensor, here: bool) -> _Entry:
        behind = row[self._size :]
        return _Entry(_views(row, self.parameters), behind[: len(self.parameters)], behind.numpy() if here else None)

    def _made(self) -> list[Tensor]:
        """Return the gradients of the parameters that have one; record the missing ones."""
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
        return [grad for grad in made if grad is not None]

    def _flag(self) -> Tensor | float:
        """Return the flag that means "used": 1, or the largest gradient if sent in fp16.

        A 1 would set the fp16 scale of its chunk, and gradients under 1e-11 would underflow.
        """
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
            used = self._own.flags.tolist()
            for i in self._missing:
                if not used[i]:
                    self.parameters[i].grad = None

    def can_piggyback(self, group: dist.ProcessGroup) -> bool:
        ours, theirs = dist.get_process_group_ranks(self._group), dist.get_process_group_ranks(group)
        return bool(self._piggyback_slots) and set(ours) == set(theirs)

    def piggyback(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        assert self._own.behind is not None
        assert self._front is not None
        self._front[-self._piggyback_slots :] = numbers
        return self._own.behind[-self._piggyback_slots :].tolist


def _hook(bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
    """Return a gradient hook that holds the bucket by a weak reference.

    Torch keeps a hook and its references where Python's garbage collector does not look: with a strong reference,
    neither the model nor the process groups would ever be freed.
    """
    found = weakref.ref(bucket)

    def hook(_: Tensor) -> None:
        living = found()
        if living is not None:
            living.note(index)

    return hook


def _views(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return one view of ``flat`` per parameter, with the memory layout of the parameter (channels-last stays so)."""
    views, offset = [], 0
    for p in parameters:
        end = offset + p.numel()
        dense = torch.ops.aten.is_non_overlapping_and_dense(p)
        views.append(flat[offset:end].as_strided(p.shape, p.stride()) if dense else flat[offset:end].view(p.shape))
        offset = end
    return views


def reduce_sparse(name: str, parameter: nn.Parameter, group: dist.ProcessGroup) -> Tensor | None:
    """Return the coalesced sum over ranks of ``parameter.grad``; ``None`` if no rank used the parameter."""
    rows, values = _local_rows(name, parameter)
    counts = all_gather(torch.tensor([-1 if rows is None else rows.numel()], device=parameter.device), group)
    sizes = [int(count) for count in counts.flatten().tolist()]
    longest = max(sizes)
    if longest < 0:
        return None
    padded_rows = parameter.new_zeros(longest, dtype=torch.int64)
    padded_values = parameter.new_zeros(longest, *parameter.shape[1:])
    if rows is not None and values is not None:
        padded_rows[: rows.numel()] = rows
        padded_values[: rows.numel()] = values
    all_rows, all_values = all_gather(padded_rows, group), all_gather(padded_values, group)
    rows = torch.cat([row[: max(size, 0)] for row, size in zip(all_rows, sizes, strict=True)])
    values = torch.cat([value[: max(size, 0)] for value, size in zip(all_values, sizes, strict=True)])
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False).coalesce()


def _local_rows(name: str, parameter: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    grad = parameter.grad
    if grad is None:
        return None, None
    if not grad.is_sparse:
        raise UsageError(
            f"'{name}' belongs to an embedding with sparse=True but got a dense gradient (is the weight tied to "
            "another layer?); set sparse=False there"
        )
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
