"""The tensors of a model as its files name and shape them: without second names, and before conversions."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import CheckpointError, one_line
from echelon.checkpoint.region_tensor import RegionTensor


def is_transformers_model(model: nn.Module) -> bool:
    """Return True for a model of transformers, without importing the library."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


def library_class(model: nn.Module) -> type[Any]:
    """Return the class that the model was built from: a layout may have given it a subclass of its own."""
    kinds = type(model).__mro__
    found: type[Any] = next(k for k in kinds if getattr(sys.modules.get(k.__module__), k.__name__, None) is k)
    return found


def stored_tensors(
    model: nn.Module, tensors: Mapping[str, RegionTensor], aliases: Mapping[str, str]
) -> dict[str, RegionTensor]:
    """Return the tensors under the names, and in the shapes, that a file of this model has.

    model:   model of transformers, or any other, whose names stay as they are
    tensors: tensors of the module, tied ones once
    aliases: second names of tied weights: ``{"head.weight": "embedding.weight"}``
    """
    if not is_transformers_model(model):
        return dict(sorted(tensors.items()))
    named = _under_main_names(model, tensors, aliases)
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    named = {name: value for name, value in named.items() if not any(p.fullmatch(name) for p in ignored)}
    return _reverted(model, named)


def _under_main_names(
    model: Any, tensors: Mapping[str, RegionTensor], aliases: Mapping[str, str]
) -> dict[str, RegionTensor]:
    """Name each tied tensor as the files of its class do: a name that is declared as tied to another is left out."""
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    seconds: dict[str, list[str]] = {}
    for second, first in aliases.items():
        seconds.setdefault(first, []).append(second)

    def main(first: str) -> str:
        names = [first, *seconds.get(first, ())]
        return next((name for name in names if name not in declared), first)

    return {main(name): value for name, value in sorted(tensors.items())}


def _reverted(model: Any, tensors: dict[str, RegionTensor]) -> dict[str, RegionTensor]:
    """Undo the conversions with which transformers reads the files of this class. Region tensors are not read."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # transformers 4 converts nothing
        return tensors
    try:
        found: dict[str, RegionTensor] = loading.revert_weight_conversion(_unsplit(model), dict(tensors))
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot convert the weights of {type(model).__name__} back: {one_line(error, typed=True)}; "
            "save a checkpoint with engine.save() instead"
        ) from error
    return found


def _unsplit(model: Any) -> Any:
    """Return the model as it was built, without memory: conversions ask for the shapes of whole parameters."""
    with torch.device("meta"):
        whole = library_class(model)(model.config)
    if hasattr(model, "_weight_conversions"):
        whole._weight_conversions = model._weight_conversions
    return whole
