"""Signature of a step: shapes, weights and Python values that must be equal for a replay of a captured step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from echelon.fastpath.module_structure import PLAIN, ModuleStructure, place_of, same
from echelon.fastpath.user_hooks import on_gradients

_GONE = object()


class StepSignature:
    """Values that are constants in a captured step; a step that differs in any of them must run eagerly.

    A captured step has no hooks on gradients.
    """

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
    """Return True if a batch consists of tensors and comparable values only."""
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(batch))


def _kind(leaf: Any) -> Any:
    """Return shape, dtype and device of a tensor; type and value of anything else, which is a constant."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _weights(parameters: list[nn.Parameter]) -> tuple[list[int], list[bool]]:
    """Return the addresses of the weights, and which of them are trained."""
    try:
        places = [one.data_ptr() for one in parameters]
    except RuntimeError:  # some have no storage
        places = [place_of(one)[0] for one in parameters]
    return places, [one.requires_grad for one in parameters]


Values = list[tuple[dict[str, Any], str, Any]]


def _are_as_they_were(values: Values) -> bool:
    """Return True if all values are unchanged. Identity is checked first, for speed: there may be thousands."""
    for held, name, value in values:
        now = held.get(name, _GONE)
        if now is not value and not same(now, value):
            return False
    return True


def _python_values(model: nn.Module) -> Values:
    """Return plain attributes of modules, which forward may read: a mode, an annealed rate."""
    return [
        (module.__dict__, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, PLAIN)
    ]


def draws() -> tuple[Any, ...]:
    """Return the states of the host's random generators."""
    import random

    import numpy as np

    legacy: Any = np.random.get_state()
    return random.getstate(), legacy[2], legacy[1].tobytes(), bytes(torch.get_rng_state().numpy())
