"""Whether a step would do what an earlier one did: the same shapes, weights and Python values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from echelon.fastpath.module_structure import PLAIN, ModuleStructure, place_of, same
from echelon.fastpath.user_hooks import on_gradients

_GONE = object()


class StepSignature:
    """What a captured step has written into it; a step that differs in any of it must run as it is written. None has
    hooks on gradients."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        leaves, self._structure = tree_flatten(batch)
        self._leaves = [_kind(leaf) for leaf in leaves]
        self._parameters = list(model.parameters())
        self._weights = _weights(self._parameters)
        self._values = _python_values(model)
        self._structure_of_model = ModuleStructure(model, next(model.parameters()).device)

    def fits(self, batch: Any) -> bool:
        leaves, structure = tree_flatten(batch)
        return (
            structure == self._structure
            and [_kind(leaf) for leaf in leaves] == self._leaves
            and self._weights == _weights(self._parameters)
            and not on_gradients(self._parameters)
            and _are_as_they_were(self._values)
            and self._structure_of_model.is_as_it_was()
        )


def is_plain(batch: Any) -> bool:
    """Whether all of a batch is tensors and values that can be compared."""
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(batch))


def _kind(leaf: Any) -> Any:
    """Of a tensor all but its numbers; anything else is a constant."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _weights(parameters: list[nn.Parameter]) -> tuple[list[int], list[bool]]:
    """Where weights lie, and which are trained."""
    try:
        places = [one.data_ptr() for one in parameters]
    except RuntimeError:  # some have no memory of their own
        places = [place_of(one)[0] for one in parameters]
    return places, [one.requires_grad for one in parameters]


Values = list[tuple[dict[str, Any], str, Any]]


def _are_as_they_were(values: Values) -> bool:
    """Before every step, of thousands: most are the very same objects."""
    for held, name, value in values:
        now = held.get(name, _GONE)
        if now is not value and not same(now, value):
            return False
    return True


def _python_values(model: nn.Module) -> Values:
    """Plain values that modules hold, which forward may read: a mode, a rate that is annealed."""
    return [
        (module.__dict__, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, PLAIN)
    ]


def draws() -> tuple[Any, ...]:
    """Where the host's random generators are."""
    import random

    import numpy as np

    legacy: Any = np.random.get_state()
    return random.getstate(), legacy[2], legacy[1].tobytes(), bytes(torch.get_rng_state().numpy())
