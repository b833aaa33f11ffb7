"""Shape rules of fake tensors for operations for which torch has no rule, or one stricter than the kernels."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


def make_mode() -> FakeTensorMode:
    """Return a fake tensor mode that uses the rules below; other fake tensor modes keep torch's rules."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _modes.add(mode)
    _register()
    return mode


_modes: weakref.WeakSet[FakeTensorMode] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    from torch._subclasses.fake_impls import register_op_impl

    for func, rule in _rules().items():
        register_op_impl(func)(functools.partial(_by_rule, rule))


def has_rule(func: Any) -> bool:
    """Return True if a rule below gives the shapes of the result from those of the operands, despite torch's tags."""
    return func in _rules()


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    rules = {aten._ctc_loss.default: _ctc_loss, aten._ctc_loss.Tensor: _ctc_loss}
    return rules | ({aten._grouped_mm.default: _grouped_mm} if hasattr(aten, "_grouped_mm") else {})


def _by_rule(rule: Callable[..., Any], mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    if mode not in _modes:
        return NotImplemented
    with mode:
        return rule(*args, **kwargs)


def _ctc_loss(log_probs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return fake results of ``_ctc_loss``.

    The second result is only for backward. Its last dimension depends on the values of the lengths; an upper bound is
    used.
    """
    steps, *batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty([*batch, steps, 2 * targets.shape[-1] + 1])


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a fake result of ``_grouped_mm``. Torch's rule accepts only bf16; kernels accept fp32 and fp16 too."""
    return torch.empty(_grouped_shape(a, b, offs), dtype=out_dtype or a.dtype, device=a.device)


def _grouped_shape(a: Tensor, b: Tensor, offsets: Tensor | None) -> list[int]:
    if a.dim() == 2 and b.dim() == 2:
        assert offsets is not None
        return [offsets.shape[0], a.shape[0], b.shape[1]]
    if a.dim() == b.dim():
        return [a.shape[0], a.shape[1], b.shape[-1]]
    return [a.shape[-2], b.shape[-1]]
