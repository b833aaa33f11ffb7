"""Dispatch of fake tensors as on a GPU, on machines where torch may have no GPU.

Fake tensors are on the CPU, because torch without CUDA crashes on fake CUDA tensors. Only a few operations then save or
compute something else than on a GPU; they are replaced before torch sees the call:

- dropout saves a mask of one byte per entry, not a factor;
- RMS norm is one kernel;
- attention has fused kernels with dropout too, which save nothing more;
- autocast computes norms, softmax, powers and losses in 32 bits; of cross entropy, all but the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from echelon.parallel.tensor.lazy_activation import LazyActivation

#: Functions that autocast runs in 32 bits on a GPU, but not on a CPU.
IN_FLOAT32 = frozenset((
    "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "exp", "expm1", "log", "log2", "log10", "log1p",
    "cosh", "sinh", "tan", "acos", "asin", "softplus", "softmax", "softmin", "log_softmax", "layer_norm",
    "group_norm", "norm", "normalize", "cumsum", "cumprod", "prod", "sum", "renorm", "dist", "cdist",
    "cosine_similarity", "nll_loss", "l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss",
    "kl_div", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss",
    "margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss",
))  # fmt: skip


class GpuDispatchMode(TorchFunctionMode):
    """A mode within which torch functions do what they would do on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = next((each for each in types if isinstance(each, type) and issubclass(each, LazyActivation)), None)
        if lazy is not None:
            with self:  # the rules of a LazyActivation call func again, on its parts
                return lazy.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "dropout":
            return _dropout(func, args, kwargs)
        if name == "cross_entropy" and torch.is_autocast_enabled("cpu"):
            return _cross_entropy(func, args, kwargs)
        if name == "rms_norm":
            return _rms_norm(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], *[0.0] * (len(args) > 4), *args[5:]), {**kwargs, **_without_dropout(kwargs)}
        if name == "multi_head_attention_forward":
            args, kwargs = _attention_without_dropout(args, kwargs)
        if name in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    given["training"] = given.get("training", given.pop("train", True))
    if given.get("inplace") or not given["training"] or not given.get("p", 0.5):
        return func(*args, **kwargs)
    return torch.native_dropout(given["input"], given.get("p", 0.5), True)[0]


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute the softmax in the input's own dtype and the rest in 32 bits, as autocast does on a GPU."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.pop("label_smoothing", 0.0) or given["target"].is_floating_point():
        return func(*args, **kwargs)
    scores = given.pop("input")
    with torch.autocast("cpu", enabled=False):
        chances = torch.log_softmax(scores, 1 if scores.dim() > 1 else 0)
    return torch.nn.functional.nll_loss(chances.float(), **given)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    result: Tensor = torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return result


def _without_dropout(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"dropout_p": 0.0} if "dropout_p" in kwargs else {}


def _attention_without_dropout(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove dropout from the arguments if a fused kernel is used; with ``need_weights``, torch has none."""
    if kwargs.get("need_weights", True):
        return args, kwargs
    return (*args[:10], 0.0, *args[11:]) if len(args) > 10 else args, {**kwargs, **_without_dropout(kwargs)}


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf
