"""Raises an error if the user's optimizer is stepped outside of the engine.

``loss.backward(); optimizer.step()`` left in a loop after ``distribute()`` would make each replica train by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from echelon.base.errors import UsageError

_INSTEAD = "call engine.step(batch), or engine.backward(loss) and engine.update()"

#: The guard hook of each optimizer. After another distribute() the hook of the newer engine replaces it.
_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


class StepGuard:
    """One engine's guard on the optimizers that it was given. A copy of an optimizer is not guarded.

    alone: True if no other process trains this model; then a step from outside is only reported
    say:   callback for one line about such a step
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], alone: bool, say: Callable[[str], None]) -> None:
        self._alone, self._say = alone, say
        self._is_open = self._has_stepped = False
        self._said: set[bool] = set()  # values of _has_stepped that were reported already
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            if optimizer in _hooks:
                _hooks[optimizer].remove()
            _hooks[optimizer] = handle = optimizer.register_step_pre_hook(self._hook(weakref.ref(optimizer)))
            self._handles.append(handle)

    def __enter__(self) -> None:
        """Allow steps within the context, which the engine enters for its own."""
        self._is_open = self._has_stepped = True

    def __exit__(self, *exception: object) -> None:
        self._is_open = False

    def close(self) -> None:
        """Remove the hooks when the engine has stopped training, so that the user may step the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, guarded: weakref.ref[torch.optim.Optimizer]) -> Callable[..., None]:
        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not self._is_open and optimizer is guarded():  # a copy made from its attributes has the same hooks
                self._from_outside()

        return before_step

    def _from_outside(self) -> None:
        if not self._alone:
            raise UsageError(
                "optimizer.step() outside of the engine: gradients of other ranks are not in it, and replicas would "
                f"drift apart; {_INSTEAD}"
            )
        if self._has_stepped not in self._said:
            self._said.add(self._has_stepped)
            twice = "; gradients of engine.step() that are still there are applied twice" if self._has_stepped else ""
            self._say(
                "optimizer.step() was called outside of the engine: one process may do so, several may not, and the "
                f"engine neither counts nor saves such steps{twice}; {_INSTEAD}"
            )
