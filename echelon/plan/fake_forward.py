"""What a module would return, without computing it: the same structure, with placeholders for tensors.

A placeholder is torch's FakeTensor: shape, type and device without contents. Operations on placeholders cost no memory
and no arithmetic, and mix with real tensors. All placeholders of a process belong to one mode, because torch does not
mix those of several.
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
    """The one mode that all placeholders of this process belong to."""
    return make_mode()


def is_placeholder(value: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def placeholder(like: Tensor) -> Tensor:
    """A placeholder for such a tensor, with a storage of its own."""
    with _disable_current_modes(), placeholder_mode() as mode, torch.no_grad():
        if like.layout is not torch.strided:
            return mode.from_tensor(like)
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)


def as_module_output(leaf: Tensor) -> Tensor:
    """``leaf`` as a module would return it: with a gradient where it can have one, and free to be changed in place."""
    if not torch.is_grad_enabled() or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    with _disable_current_modes():
        made: Tensor = _Enter.apply(leaf.requires_grad_())  # type: ignore[no-untyped-call]
    return made


class _Enter(torch.autograd.Function):
    """The identity. What comes out is no leaf and no view, which torch would not let user code change in place."""

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
    """What ``module(*args, **kwargs)`` returns, with placeholders for what it would compute. Leaves it as it was.

    watch: a context that each attempt runs in. A module that looks at values or runs operations torch has no shape rule
    for is computed after all, on zeros in place of placeholders; ``stands_in`` is told of each such pair.
    """
    with undisturbed(module), _disable_current_modes():
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.training = False  # the same shapes, also for a single row, whose statistics torch refuses
        try:
            with placeholder_mode(), watch():
                return call_unintercepted(module, args, kwargs)
        except Exception:  # its own mistakes it makes again, in the words its author knows
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
    """Afterwards every module's attributes, parameters and buffers are the objects they were before."""
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
    """Placeholders meet real tensors in here. Torch then reads ``.grad`` of each, and hides the warning it gets for it,
    but not from those who make warnings errors."""
    if not any(action == "error" for action, *_ in warnings.filters):
        yield  # as it is: with new filters, Python would show warnings again that it had shown once
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Afterwards the random numbers of torch and Python go on as if nothing had been drawn."""
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
    """Within it, a forward pass leaves nothing behind: no attribute, buffer or random number, and the batch (this one's
    copy is given) as it was. Gradients are on, as in training."""
    with undisturbed(model), preserve_rng_state(), allow_real_tensors(), torch.enable_grad():
        copies: dict[int, Tensor] = {}  # one for each buffer, also of one that has several names
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        try:
            yield tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        finally:
            torch.clear_autocast_cache()  # of weights as placeholders
