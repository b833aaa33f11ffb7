"""Gather sharded activations that are passed to a ``torch.autograd.Function`` between split layers.

Torch does not check the arguments of ``apply`` for ``__torch_function__``: a ShardedActivation would reach the
function's forward as a plain object, and its gradient would be lost, or ``save_for_backward`` would reject it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import Function

from echelon.parallel.tensor.sharded_activation import ShardedActivation, whole

_plain = Function.__dict__["apply"].__func__


@functools.wraps(_plain)
def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__module__.startswith("echelon."):  # these accept a ShardedActivation, as the loss of split logits does
        return _plain(cls, *args, **kwargs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardedActivation | list | tuple | dict):
            args, kwargs = whole((args, kwargs))
            break
    return _plain(cls, *args, **kwargs)


def gather_for_functions() -> None:
    """Patch ``torch.autograd.Function.apply`` in this process, so that it receives whole tensors."""
    if Function.__dict__["apply"].__func__ is _plain:
        Function.apply = classmethod(_apply)  # type: ignore[assignment]
