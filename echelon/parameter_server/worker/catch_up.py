"""Hooks on a worker's model, such as those that put the last update into it before it is saved or evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class CatchUpHook:
    """A hook that calls ``catch_up``; in a copy of the model (deepcopy or pickle) the hook does nothing.

    in_training: call it also while the module is in training mode; default True
    """

    def __init__(self, catch_up: Callable[[], None] | None = None, in_training: bool = True) -> None:
        self._catch_up, self._in_training = catch_up, in_training

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._catch_up is not None and (self._in_training or not module.training):
            self._catch_up()

    def __deepcopy__(self, memo: dict[int, Any]) -> CatchUpHook:
        return CatchUpHook()

    def __reduce__(self) -> tuple[type[CatchUpHook], tuple[()]]:
        return CatchUpHook, ()


def attach(model: nn.Module, catch_up: Callable[[], None]) -> list[RemovableHandle]:
    """Call ``catch_up`` before each ``state_dict`` of the model, and before each forward in evaluation mode."""
    return [
        model.register_state_dict_pre_hook(CatchUpHook(catch_up)),  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(CatchUpHook(catch_up, in_training=False)),
    ]
