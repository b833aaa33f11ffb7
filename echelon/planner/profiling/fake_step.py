"""One training step on a fake copy of the model, traced unit by unit; of equal units, only the first runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from echelon.plan.fake_forward import placeholder_mode, preserve_rng_state
from echelon.plan.module_calls import call_unintercepted, intercept_module_calls
from echelon.plan.pytree import FlattenedTree, take_apart
from echelon.planner.profiling.fake_copy import FakeModel, describe_leaf
from echelon.planner.profiling.gpu_dispatch import GpuDispatchMode
from echelon.planner.profiling.kernel_costs import tensor_bytes
from echelon.planner.profiling.op_tracer import OpSpan, OpTracer
from echelon.planner.profiling.scratch import scratch_bytes, scratch_bytes_on_gpu

Leaf = tuple[int, float]  # the number that OpTracer gives to a tensor's storage, and the tensor's bytes


@dataclass(eq=False)
class UnitCall:
    """A call of a unit: the spans of the user code before it (``outer``) and of the unit itself.

    like: earlier call with equal unit and inputs, which has the unit's spans; None if this call really ran
    """

    name: str
    outer: OpSpan
    inputs: list[Leaf]
    unit: OpSpan = field(default_factory=OpSpan)
    outputs: list[Leaf] = field(default_factory=list)
    unit_back: OpSpan = field(default_factory=OpSpan)
    outer_back: OpSpan = field(default_factory=OpSpan)
    like: UnitCall | None = None
    shapes: list[Tensor | Any] = field(default_factory=list)
    parts: FlattenedTree | None = None

    @property
    def measured(self) -> UnitCall:
        return self.like or self

    def saved_at(self, leaves: Sequence[Leaf]) -> list[int]:
        """Return the indices of the inputs or outputs that the call saves for backward."""
        return [at for at, (number, _) in enumerate(leaves) if number in self.unit.saved]


@dataclass(eq=False)
class FakePass:
    """A whole pass: the calls in order, and the spans after the last call."""

    calls: list[UnitCall]
    tail: OpSpan
    tail_back: OpSpan
    gradients: set[int]
    batch: set[int]
    weights: dict[int, Tensor]  # storage -> the copy's parameter or buffer


# ---- the pass ----


def run_fake_step(
    shadow: FakeModel,
    batch: Any,
    step: Callable[[nn.Module, Any], Tensor],
    amp: torch.dtype | None,
    gpu: bool,
    backward: bool = True,
) -> FakePass:
    """Trace forward (and backward) of ``step(model, batch)``, which returns a loss, on fake tensors.

    amp:      dtype of autocast, or None
    gpu:      True to trace the operations of a GPU, False for those of a CPU
    backward: True to run backward too; default True
    """
    trace = OpTracer(scratch=scratch_bytes_on_gpu if gpu else scratch_bytes)
    weights: dict[int, Tensor] = {
        trace.number(each): each for each in (*shadow.model.parameters(), *shadow.model.buffers())
    }
    on_batch = batch_placeholders(batch)
    leaves = {trace.number(leaf) for leaf in take_apart(on_batch).leaves if isinstance(leaf, Tensor)}
    listener = _Listener(trace, shadow)
    handles = trace.watch_gradients(shadow.model)
    try:
        with placeholder_mode(), preserve_rng_state(), torch.enable_grad(), _no_collection(), trace:
            loss = _forward(shadow, on_batch, step, amp, gpu, trace, listener)
            tail = trace.span
            tail_back = listener.begin_backward()
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        torch.clear_autocast_cache()
        for handle in handles:
            handle.remove()
    return FakePass(listener.calls, tail, tail_back, trace.gradients, leaves, weights)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection within the context.

    A collection would free tensors in reference cycles in one of the two passes and not in the other.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _forward(
    shadow: FakeModel, batch: Any, step: Any, amp: torch.dtype | None, gpu: bool, trace: OpTracer, listener: _Listener
) -> Tensor:
    with contextlib.ExitStack() as within:
        within.enter_context(trace.saving())
        within.enter_context(intercept_module_calls(listener.unit_called))
        if gpu:
            within.enter_context(GpuDispatchMode())
        if amp is not None:
            within.enter_context(torch.autocast("cpu", dtype=amp))
        loss: Tensor = step(shadow.model, batch)
    return loss


def batch_placeholders(batch: Any) -> Any:
    """Return the batch as fake tensors on the CPU."""
    return tree_map(_placed, batch)


def _placed(leaf: Any) -> Any:
    """Return a leaf of the batch; a tensor becomes a fake tensor on the CPU."""
    if not isinstance(leaf, Tensor):
        return leaf
    with placeholder_mode(), torch.no_grad():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")


class _Listener:
    """Switches the tracer's span from unit to unit, in forward and backward."""

    def __init__(self, trace: OpTracer, shadow: FakeModel) -> None:
        self._trace, self._shadow = trace, shadow
        self.calls: list[UnitCall] = []
        self._known: dict[Any, UnitCall] = {}
        self._start: Tensor | None = None  # an input that makes the outputs of replayed units require gradients
        self._back: list[OpSpan] = []
        self._at = 0

    def unit_called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            given = take_apart((args, kwargs))
            tensors = [leaf for leaf in given.leaves if isinstance(leaf, Tensor)]
            call = self._entered(name, tensors)
            key = (self._shadow.key(name), given.pattern, tuple(map(describe_leaf, given.leaves)), _same(call.inputs))
            call.like = self._known.get(key)
            if call.like is not None:
                output = self._as_before(call.like, tensors)
        if call.like is None:
            self._known[key] = call
            self._shadow.apply_unit_places(name, module)
            output = call_unintercepted(module, args, kwargs)
        with torch._C.DisableTorchFunction():
            self._left(call, output)
        return output

    def _entered(self, name: str, tensors: list[Tensor]) -> UnitCall:
        call = UnitCall(name, self._trace.span, [self._leaf(leaf) for leaf in tensors])
        self._on_way_back(tensors, 2 * len(self.calls))
        self.calls.append(call)
        self._trace.span = call.unit
        return call

    def _left(self, call: UnitCall, output: Any) -> None:
        parts = take_apart(output)
        if call.like is None:
            # Empty tensors are stored, because the real ones would live as long as the call.
            call.parts = take_apart(parts.together(map(_husk, parts.leaves)))
            call.shapes = [_Spec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in parts.leaves]
        made = [leaf for leaf in parts.leaves if isinstance(leaf, Tensor)]
        call.outputs = [self._leaf(leaf) for leaf in made]
        self._on_way_back(made, 2 * len(self.calls) - 1)
        self._trace.span = OpSpan()

    def _leaf(self, tensor: Tensor) -> Leaf:
        return self._trace.number(tensor), float(tensor_bytes(tensor))

    def _as_before(self, like: UnitCall, tensors: list[Tensor]) -> Any:
        assert like.parts is not None
        specs = [spec for spec in like.shapes if isinstance(spec, _Spec)]
        with self._silence():
            if self._start is None:
                self._start = torch.empty((), requires_grad=True)
            kept = [tensors[at].untyped_storage() for at in like.saved_at(like.inputs)]
            made = iter(_ReplayedUnit.apply(self, specs, kept, self._start, *tensors))  # type: ignore[no-untyped-call]
        return like.parts.together(next(made) if isinstance(leaf, _Spec) else leaf for leaf in like.shapes)

    @contextlib.contextmanager
    def _silence(self) -> Iterator[None]:
        self._trace.silent = True
        try:
            yield
        finally:
            self._trace.silent = False

    # ---- backward ----

    def begin_backward(self) -> OpSpan:
        self._trace.backward = True
        self._back = [span for call in self.calls for span in (call.outer_back, call.unit_back)] + [OpSpan()]
        self._at = len(self._back) - 1
        self._trace.span = self._back[-1]
        return self._back[-1]

    def _on_way_back(self, tensors: Sequence[Tensor], place: int) -> None:
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self._reach(place))

    def _reach(self, place: int) -> None:
        if place < self._at:  # the tensor of a skip connection has hooks of later units too, which fire late
            self._at = place
            self._trace.span = self._back[place]


def _husk(leaf: Any) -> Any:
    """Return an empty tensor with as many dimensions as the leaf; other leaves are unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    with _disable_current_modes():
        return torch.empty((0,) * leaf.dim())


def _same(leaves: Sequence[Leaf]) -> tuple[int, ...]:
    """Return, for each leaf, the index of the first leaf with the same storage."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(number, at) for at, (number, _) in enumerate(leaves))


@dataclass(frozen=True)
class _Spec:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @staticmethod
    def of(tensor: Tensor) -> _Spec:
        return _Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def make(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")


class _ReplayedUnit(torch.autograd.Function):
    """Replaces a unit that equals one that already ran: makes equal outputs and gradients, saves the same inputs."""

    @staticmethod
    def forward(ctx: Any, listener: Any, specs: list[_Spec], kept: list[Any], start: Tensor, *inputs: Tensor) -> Any:
        ctx.listener, ctx.inputs, ctx.kept = listener, [_Spec.of(each) for each in inputs], kept
        made = [spec.make() for spec in specs]
        ctx.mark_non_differentiable(*[one for one, spec in zip(made, specs, strict=True) if not spec.differentiable])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.kept = None
        needed = ctx.needs_input_grad[4:]
        with ctx.listener._silence():
            made = [spec.make() if wanted else None for spec, wanted in zip(ctx.inputs, needed, strict=True)]
        return (None, None, None, None, *made)
