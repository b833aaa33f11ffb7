"""Functions with a backward of their own (``torch.autograd.Function``) between split layers.

Torch does not ask arguments of ``apply`` whether they have ``__torch_function__``: a Spread would reach the function's
forward as a plain object, where its gradient is lost, or ``save_for_backward`` refuses it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import Function

from echelon.parallel.tensor.sharded_activation import ShardedActivation, whole

_plain = Function.__dict__["apply"].__func__


@functools.wraps(_plain)
def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__module__.startswith("echelon."):  # those of ours take a Spread as it is: the loss of split logits
        return _plain(cls, *args, **kwargs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardedActivation | list | tuple | dict):
            args, kwargs = whole((args, kwargs))
            break
    return _plain(cls, *args, **kwargs)


def gather_for_functions() -> None:
    """Give whole tensors to every ``torch.autograd.Function`` of this process from now on."""
    if Function.__dict__["apply"].__func__ is _plain:
        Function.apply = classmethod(_apply)  # type: ignore[assignment]
