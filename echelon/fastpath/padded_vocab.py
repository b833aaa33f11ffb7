"""Pads 16-bit matrix products of output layers of unaligned size, such as GPT-2's vocabulary of 50,257.

A GPU multiplies matrices fast only if their rows begin at multiples of 16 bytes. On an H200 the three products of
GPT-2-medium's output layer take 41 ms unpadded and 6 ms with 7 more columns, in a step of 92 ms. If a model is compiled
as a whole, the compiler pads them; it does not pad an output layer outside of compiled blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.fastpath.compile import has_hooks, put_in_place

MULTIPLE = 8  #: alignment in 16-bit numbers
LARGE = 1 << 20  #: number of weights from which padding pays off


def odd_layers(model: nn.Module, blocks: Iterable[str]) -> tuple[str, ...]:
    """Return the names of large linear layers outside of these blocks whose output size is not a multiple of 8."""
    inside = tuple(f"{name}." for name in blocks)
    outside = ((name, module) for name, module in model.named_modules() if not f"{name}.".startswith(inside))
    return tuple(name for name, module in outside if _is_odd(module))


def pad(model: nn.Module, names: Iterable[str]) -> None:
    """Make these layers compute with padding, in place: names and state do not change, and copies are not padded."""
    for name in names:
        module = model.get_submodule(name)
        if _is_odd(module):  # it may have changed since the plan was made
            put_in_place(module, _padded(module))


def _is_odd(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.out_features % MULTIPLE > 0 and module.weight.numel() >= LARGE


def _padded(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or has_hooks(module) or "forward" in vars(module):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        dtype = _computed_in(weight)
        if dtype.itemsize != 2:
            return module._call_impl(*args)  # type: ignore[no-untyped-call]
        missing = -weight.shape[0] % MULTIPLE
        wide = F.pad(weight.to(dtype), (0, 0, 0, missing))
        added = F.pad(bias.to(dtype), (0, missing)) if isinstance(bias, Tensor) else None
        return F.linear(args[0], wide, added)[..., : weight.shape[0]].contiguous()

    return call


def _computed_in(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    if weight.dtype == torch.float64:  # autocast does not cast it
        return weight.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
