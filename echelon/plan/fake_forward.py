"""Forward passes with fake tensors: the structure of a module's output without computing it.

A placeholder is torch's ``FakeTensor``: shape, dtype and device without data. Operations on fake tensors cost no memory
and no arithmetic, and accept real tensors too. All fake tensors of a process belong to one mode, because torch does not
mix those of several modes.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from echelon.plan.fake_tensor_rules import make_mode
from echelon.plan.module_calls import call_unintercepted, intercept_module_calls
from echelon.plan.pytree import replace_tensors

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

Context = contextlib.AbstractContextManager[Any]


@functools.cache
def placeholder_mode() -> FakeTensorMode:
    """Return the one mode that all fake tensors of this process belong to."""
    return make_mode()


def is_placeholder(value: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def placeholder(like: Tensor) -> Tensor:
    """Return a fake tensor like the given one, with its own storage."""
    with _disable_current_modes(), placeholder_mode() as mode, torch.no_grad():
        if like.layout is not torch.strided:
            return mode.from_tensor(like)
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)


def as_module_output(leaf: Tensor) -> Tensor:
    """Return ``leaf`` like a module's output: it requires grad if its dtype allows, and may be changed in place."""
    if not torch.is_grad_enabled() or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    with _disable_current_modes():
        made: Tensor = _Enter.apply(leaf.requires_grad_())  # type: ignore[no-untyped-call]
    return made


class _Enter(torch.autograd.Function):
    """The identity. Its result is neither a leaf nor a view, because torch forbids in-place changes of these."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def fake_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watch: Callable[[], Context] = contextlib.nullcontext,
    stands_in: Callable[[Tensor, Tensor], None] = lambda original, stand_in: None,
) -> Any:
    """Return the result of ``module(*args, **kwargs)`` with fake tensors. The module is left unchanged.

    A module that reads values or runs operations without a shape rule is computed with zeros in place of fake tensors.

    watch:     returns a context for each attempt
    stands_in: called with each fake tensor and the zeros that replace it
    """
    with undisturbed(module), _disable_current_modes():
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.training = False  # shapes are the same, and torch refuses statistics of a single row in training
        try:
            with placeholder_mode(), watch():
                return call_unintercepted(module, args, kwargs)
        except Exception:  # an error of the module itself is raised again on zeros, with its usual message
            pass
        return _on_zeros(module, args, kwargs, watch, stands_in)


def _on_zeros(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watch: Callable[[], Context],
    stands_in: Callable[[Tensor, Tensor], None],
) -> Any:
    def real(tensor: Tensor) -> Tensor:
        if not is_placeholder(tensor):
            return tensor
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        stands_in(tensor, made)
        return made

    weights = {name: real(value.detach()) for name, value in module.named_parameters()}
    buffers = {name: real(value).clone() for name, value in module.named_buffers()}
    args, kwargs = replace_tensors((args, kwargs), real)
    with preserve_rng_state(), torch.no_grad(), intercept_module_calls(None), watch():
        return functional_call(module, weights | buffers, args, kwargs)


@contextlib.contextmanager
def undisturbed(root: nn.Module) -> Iterator[None]:
    """Restore every module's attributes, parameters and buffers to the same objects after the context."""
    kept = [
        (space, dict(space))
        for module in root.modules()
        for space in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]
    try:
        yield
    finally:
        for space, before in kept:
            for name in [name for name in space if name not in before]:
                del space[name]
            space.update(before)


@contextlib.contextmanager
def allow_real_tensors() -> Iterator[None]:
    """Suppress the warning about ``.grad`` of non-leaf tensors when fake tensors meet real tensors.

    Torch reads ``.grad`` of each tensor and hides the warning, but not if a filter turns warnings into errors.
    """
    if not any(action == "error" for action, *_ in warnings.filters):
        yield  # filters stay unchanged: with new ones, Python would repeat warnings that it has already shown
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the random number state of torch and Python after the context."""
    state = random.getstate()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def side_effect_free(model: nn.Module, batch: Any) -> Iterator[Any]:
    """Yield a copy of ``batch`` for a forward pass without side effects, with gradients enabled as in training.

    Attributes, buffers and random number state are restored after the context.
    """
    with undisturbed(model), preserve_rng_state(), allow_real_tensors(), torch.enable_grad():
        copies: dict[int, Tensor] = {}  # one copy per buffer, also if the buffer has several names
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        try:
            yield tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        finally:
            torch.clear_autocast_cache()  # it may hold fake copies of weights
