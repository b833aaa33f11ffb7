"""One forward and backward pass captured as a CUDA graph, with static memory for its batch; the checks before it."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from echelon.fastpath.guards import PLAIN, REGISTERS, PythonGuards, StepSignature, is_nan, on_gradients, place_of

Backward = Callable[[Tensor | float], None]
Run = Callable[[Any], tuple[Tensor, Backward]]
Look = dict[tuple[str, str], Any]

_ABSENT = object()
_DEEPEST = 6  # levels of nested containers that are compared


class CapturedStep:
    """A forward and backward pass that is captured as a CUDA graph and replayed.

    merges:  True if gradients of several passes are accumulated before an update
    claimed: as in ``WarmupStep``
    """

    def __init__(
        self, model: nn.Module, batch: Any, readings: PythonGuards, plain: Run, merges: bool, claimed: bool
    ) -> None:
        self._readings, self._plain, self._merges, self._claimed = readings, plain, merges, claimed
        self._signature = StepSignature(model, batch)
        leaves, self._structure = tree_flatten(batch)
        self._leaves = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._parameters = list(model.parameters())
        self._gradients: list[Tensor | None] = []
        self.device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        self._weight, self._loss = torch.ones((), device=self.device), torch.zeros((), device=self.device)
        self.loss = self._loss  #: loss of this step, in new memory for each step, because callers keep losses

    def fits(self, batch: Any) -> bool:
        """Return True if a replay would give the result of running the step."""
        return self._signature.fits(batch) and self._readings.changed() is None

    def run(self, batch: Any) -> tuple[Tensor, Backward]:
        self.take(batch)
        return self.loss, self.replay

    def take(self, batch: Any) -> None:
        for leaf, given in zip(self._leaves, tree_leaves(batch), strict=True):
            if isinstance(leaf, Tensor):
                leaf.copy_(given, non_blocking=True)
        self.loss = torch.empty_like(self._loss)

    def replay(self, weight: Tensor | float) -> None:
        """Replay the pass for the batch given to ``take``, with backward of the loss times ``weight``."""
        self._weight.fill_(weight)
        self._launch()
        self.loss.copy_(self._loss)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            else:  # the next replay overwrites it, so a gradient that is merged must be a copy
                parameter.grad = gradient.clone() if self._merges else gradient

    def capture(self) -> None:
        """Capture a pass, without running it.

        Existing gradients are set aside, because each replay overwrites the gradients of the graph.
        """
        kept = [parameter.grad for parameter in self._parameters]
        self._set([None] * len(kept))
        try:
            self._capture()
            self._gradients = [parameter.grad for parameter in self._parameters]
        finally:
            self._set(kept)

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (the loaders' pinned memory) use the device during the capture.
        capturing = torch.cuda.graph(self._graph, capture_error_mode="thread_local")
        with _put_right(self._graph, self.device), _none_compiled(), _claiming_capture(self._claimed), capturing:
            self._loss = self._pass()

    def _pass(self) -> Tensor:
        loss, backward = self._plain(tree_unflatten(self._leaves, self._structure))
        backward(self._weight)
        return loss.detach()

    def _launch(self) -> None:
        self._graph.replay()

    def _set(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _none_compiled() -> contextlib.AbstractContextManager[None]:
    """Return a context in which recompilation fails: compiling during a capture would invalidate the stream."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


@contextlib.contextmanager
def _put_right(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Restore stream, random generator and allocator after a failed capture, which leaves them in capture state."""
    index = index_of(device)
    generator = generator_of(device)
    before, stream = generator.clone_state(), torch.cuda.current_stream(device)
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(before)
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, graph.pool())
        with contextlib.suppress(Exception):  # reading a pending CUDA error clears it
            torch.cuda.synchronize(device)
        raise


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default random generator of the device."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[index_of(device)]


class WarmupStep:
    """An eager step before capture, which detects synchronization with the device: a graph cannot contain it.

    claimed: value that ``is_current_stream_capturing()`` returns in this step and in the capture after it. Models
             behave differently: with True, models of transformers pass masks that they omit otherwise, which takes
             longer and recompiles compiled blocks; with False, they may check if a mask is needed, which waits for the
             device
    waits:   True if the step waited for the device
    weight:  weight of the loss in the last backward
    """

    def __init__(self, claimed: bool = False) -> None:
        self.claimed, self.waits = claimed, False
        self.weight: Tensor | float = 1.0

    def run(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        self.waits = False  # an earlier step may have waited only because it compiled
        with self._played():
            loss, inner = plain(batch)

        def backward(weight: Tensor | float) -> None:
            self.weight = weight
            with self._played():
                inner(weight)

        return loss, backward

    @contextlib.contextmanager
    def _played(self) -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen, _claiming_capture(self.claimed):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        self.waits |= any("synchronizing CUDA operation" in str(one.message) for one in seen)


@contextlib.contextmanager
def _claiming_capture(captured: bool) -> Iterator[None]:
    """Patch ``torch.cuda.is_current_stream_capturing()`` to return ``captured`` within the context."""
    original = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: captured
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = original


def has_room(device: torch.device) -> bool:
    """Return True if a graph, which never frees its memory, leaves room for another step on the device.

    Such a step is a batch of another size or an evaluation.
    """
    held = torch.cuda.memory_allocated(device)
    needed = torch.cuda.max_memory_allocated(device) - held
    free, _ = torch.cuda.mem_get_info(device)
    return 2.1 * needed < free + torch.cuda.memory_reserved(device) - held


def is_plain(batch: Any) -> bool:
    """Return True if a batch consists of tensors and comparable values only."""
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(batch))


def draws() -> tuple[Any, ...]:
    """Return the states of the host's random generators."""
    legacy: Any = np.random.get_state()
    return random.getstate(), legacy[2], legacy[1].tobytes(), bytes(torch.get_rng_state().numpy())


def has_gradient_hooks(model: nn.Module) -> bool:
    """Return True if user code has hooks on gradients, which a graph would not run."""
    of_modules = any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
    return of_modules or on_gradients(model.parameters())


def snapshot_attributes(model: nn.Module) -> Look:
    """Return all attributes of all modules in comparable form: values, and addresses and shapes of tensors.

    Attributes that forward sets are side effects, which a graph would not replay.
    """
    return {
        (name, attribute): _guard_key(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }


def find_side_effect(before: Look, after: Look) -> str | None:
    """Return the full name of the first attribute that differs, or None."""
    for at in [*after, *before]:
        if before.get(at, _ABSENT) != after.get(at, _ABSENT):
            module, attribute = at
            both = before.get(at, {}), after.get(at, {})
            changed = _entry(*both) if attribute in REGISTERS else attribute
            return f"{module}.{changed}" if module else str(changed)
    return None


def _guard_key(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return "tensor", place_of(value), tuple(value.shape)
    if isinstance(value, PLAIN):
        return "not a number" if is_nan(value) else value
    if depth == _DEEPEST:
        return id(value)
    if isinstance(value, dict):
        return {key: _guard_key(each, depth + 1) for key, each in dict.items(value)}
    if isinstance(value, list | tuple | deque):
        return [_guard_key(each, depth + 1) for each in value]
    return id(value)


def _entry(before: dict[str, Any], after: dict[str, Any]) -> str:
    return next(name for name in [*after, *before] if before.get(name, _ABSENT) != after.get(name, _ABSENT))
