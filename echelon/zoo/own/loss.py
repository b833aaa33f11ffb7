"""Find a user's loss: ``--loss_name file.py:name``, or the static method ``loss`` of the model's class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from echelon.base.errors import UsageError
from echelon.zoo.own.own_object import found_at

Loss = Callable[[Any, Any], Tensor]


def own_loss(place: str) -> Loss:
    """Return the function of (output, target) at ``place``."""
    result = found_at(place, "--loss_name")
    return _checked(result() if isinstance(result, type) else result, place)  # torch's losses are classes


def loss_of_class(make: Any, place: str) -> Loss | None:
    """Return ``make.loss`` if ``make`` is a class that has it, else None."""
    own = getattr(make, "loss", None) if isinstance(make, type) else None
    return None if own is None else _checked(own, f"{place}.loss")


def _checked(loss: Any, place: str) -> Loss:
    if not callable(loss):
        raise UsageError(f"{place}: a loss is a function of (output, target), and this is {type(loss).__name__}")
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        raise UsageError(
            f"{place}: a loss is called with (output, target), and this takes other arguments; in a class it is a "
            "@staticmethod"
        ) from None
    except ValueError:
        pass  # a function without a signature
    return loss  # type: ignore[no-any-return]
