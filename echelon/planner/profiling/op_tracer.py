"""Tracer of a training pass on fake tensors: records kernels, collectives, allocations and frees."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echelon.plan.operations import OperationMode, _draw, _written, tensors_in
from echelon.planner.model_costs import MessageKind
from echelon.planner.profiling.kernel_costs import KernelLaunch, TracedOperation, launches_of, tensor_bytes

aten = torch.ops.aten

#: Takes an operation, its arguments and results; returns its temporary bytes before and after results are allocated.
Scratch = Callable[[Any, Any, list[Tensor]], tuple[float, float]]


@dataclass(slots=True)
class MemoryEvent:
    """An allocation (bytes above 0) or a free of a storage.

    late: True if the bytes count only from the next event on, because a real run adds in place where a run on fake
          tensors allocates a result
    """

    storage: int
    bytes: float
    late: bool = False


@dataclass(slots=True)
class OpSpan:
    """The operations and memory events between two points of a pass, in order."""

    launches: list[KernelLaunch] = field(default_factory=list)
    messages: list[tuple[MessageKind, float]] = field(default_factory=list)
    events: list[MemoryEvent] = field(default_factory=list)
    saved: dict[int, float] = field(default_factory=dict)  # bytes of storages saved for backward in this span
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)  # existing storages that are modified in place
    draws: set[int] = field(default_factory=set)  # storages filled with random numbers
    sizes: dict[int, float] = field(default_factory=dict)  # bytes of the largest tensor seen of each storage

    @property
    def is_quiet(self) -> bool:
        """True if the span does nothing but free memory."""
        return not (self.launches or self.messages or self.saved) and all(event.bytes <= 0 for event in self.events)


class OpTracer(OperationMode):  # type: ignore[no-untyped-call]
    """Records every operation in ``span``, which the caller replaces as the pass proceeds."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__()
        self.scratch = scratch  # temporary memory of operations
        self.span = OpSpan()
        self.backward = False
        self.silent = False
        self.gradients: set[int] = set()  #: storages that became gradients of weights
        self._count = 0
        self._alive: dict[int, tuple[int, Any]] = {}  # a storage's address -> its number, and a weak reference
        self._kept = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    # ---- storages ----

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; an unknown storage is assumed to have existed before the pass."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found[0] if found else self._register(tensor)

    def _register(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._count += 1
        number, address = self._count, storage._cdata
        self._alive[address] = (number, weakref.ref(storage, lambda _: self._alive.pop(address, None)))
        return number

    def _born(self, tensor: Tensor, late: bool) -> int:
        storage = tensor.untyped_storage()
        self._count += 1
        number, address, size = self._count, storage._cdata, float(storage.nbytes())

        def note_free(_: object) -> None:
            self._alive.pop(address, None)
            self.span.events.append(MemoryEvent(number, -size))

        self._alive[address] = (number, weakref.ref(storage, note_free))
        self.span.events.append(MemoryEvent(number, size, late))
        return number

    def saving(self) -> Any:
        """Return a context within which tensors saved for backward are recorded."""
        return self._kept

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            number = self.number(tensor)
            self.span.saved[number] = float(tensor.untyped_storage().nbytes())
        return tensor.detach()  # the tensor itself would keep its own graph alive

    def watch_gradients(self, model: nn.Module) -> list[Any]:
        """Register hooks that record and free the gradients of weights, and return the hooks' handles."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hook: Any = Tensor.register_post_accumulate_grad_hook
        return [hook(parameter, self._accumulated) for parameter in trained]

    def _accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            self.gradients.add(self.number(gradient))
        parameter.grad = None

    # ---- operations ----

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._message(func, args)
        if func is aten._local_scalar_dense.default:  # nothing is computed, so there is no value to read
            return _nothing(args[0].dtype)
        result = func(*args, **kwargs)
        results = [tensor for tensor in tensors_in(result) if tensor.layout is torch.strided]
        before, after = self.scratch(func, args, results) if self.scratch else (0.0, 0.0)
        self._pass_through(before)
        made = [self._noticed(func, tensor) for tensor in results]
        self._pass_through(after)
        if not self.silent and not _is_view(func):
            self._note(func, args, kwargs, results, made)
        return result

    def _pass_through(self, size: float) -> None:
        """Record temporary memory of an operation."""
        if size:
            self._count += 1
            self.span.events += [MemoryEvent(self._count, size), MemoryEvent(self._count, -size)]

    def _noticed(self, func: Any, tensor: Tensor) -> tuple[int, bool]:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        if found is not None:
            return found[0], False
        return self._born(tensor, self.backward and func is aten.add.Tensor), True

    def _note(self, func: Any, args: Any, kwargs: Any, results: list[Tensor], made: list[tuple[int, bool]]) -> None:
        operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided]
        read = tuple(self.number(tensor) for tensor in operands)
        written = _written(func, args, kwargs)
        if not written and not any(new for _, new in made):
            return  # the operation returns views or nothing
        span = self.span
        span.reads.update(read)
        for number, tensor in itertools.chain(
            zip(read, operands, strict=True), zip((one for one, _ in made), results, strict=True)
        ):
            span.sizes[number] = max(span.sizes.get(number, 0.0), float(tensor_bytes(tensor)))
        span.writes.update(self.number(tensor) for tensor in written)
        if _draw(func):
            span.draws.update(number for number, _ in made)
        if _makes_nothing(func):
            return
        for places, launch in launches_of(TracedOperation(func, args, operands, results)):
            launch.made, launch.read = tuple(made[at][0] for at in places), read
            span.launches.append(launch)

    def _message(self, func: Any, args: Any) -> Any:
        from torch._C._distributed_c10d import FakeWork

        name = func._schema.name.removeprefix("c10d::")
        kind = _MESSAGES[name]
        tensors = [tensors_in(args[0]), tensors_in(args[1])]
        size = float(max(sum(tensor_bytes(tensor) for tensor in side) for side in tensors))
        self.span.messages.append((kind if kind != "all_gather" or size > SMALL else "gather_small", size))
        self.span.reads.update(self.number(tensor) for side in tensors for tensor in side)
        return (args[0], FakeWork().boxed())


#: Up to this many bytes, an all-gather exchanges only a few numbers: shapes, statistics, the best candidates.
SMALL = 1024

_MESSAGES: dict[str, MessageKind] = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}


def _nothing(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


@functools.cache
def _is_view(func: Any) -> bool:
    return bool(func.is_view)


@functools.cache
def _makes_nothing(func: Any) -> bool:
    """Return True if the operation only allocates memory."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.startswith(("empty", "new_empty", "resize", "set_", "_efficientzerotensor"))
