"""Output layers of an odd size, such as GPT-2's 50,257 words: their 16-bit products are made with the size rounded up.

A GPU multiplies matrices quickly only where their rows begin at multiples of 16 bytes. On an H200 the three products of
GPT-2-medium's output layer take 41 ms as they are and 6 ms with 7 columns more, of a step of 92. A model that is
compiled as a whole gets that from the compiler; an output layer beside compiled blocks does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.fastpath.module_call import put_in_place
from echelon.fastpath.user_hooks import has_hooks

MULTIPLE = 8  #: 16-bit numbers
LARGE = 1 << 20  #: weights, from which on it pays


def odd_layers(model: nn.Module, blocks: Iterable[str]) -> tuple[str, ...]:
    """Names of large linear layers outside of these blocks with an output of an odd size."""
    inside = tuple(f"{name}." for name in blocks)
    outside = ((name, module) for name, module in model.named_modules() if not f"{name}.".startswith(inside))
    return tuple(name for name, module in outside if _is_odd(module))


def pad(model: nn.Module, names: Iterable[str]) -> None:
    """Have these layers compute so from now on, in place: names and state stay as they are, and a copy is plain."""
    for name in names:
        module = model.get_submodule(name)
        if _is_odd(module):  # still
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
    if weight.dtype == torch.float64:  # autocast leaves it
        return weight.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
