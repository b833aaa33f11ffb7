"""Merges low-rank adapters into the weights of their layers: ``W + B A * scale``, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.checkpoint.region_tensor import RegionTensor
from echelon.parallel.lora.layer import AdaptedLayer, adapted_layers

#: Prefix of all names in a model of peft.
_PREFIX = "base_model.model."
#: Attributes of peft's layers with something else than two matrices to add to the weight.
_MORE_THAN_PRODUCTS = ("lora_embedding_A", "lora_magnitude_vector", "lora_variant")


class MergedModel(NamedTuple):
    """A model as its files describe it: without adapters.

    model:   module with config and class
    tensors: tensors by the names of that module, unread
    aliases: second names of tied weights
    """

    model: nn.Module
    tensors: dict[str, RegionTensor]
    aliases: dict[str, str]


def merge_model(model: nn.Module, tensors: Mapping[str, RegionTensor], aliases: Mapping[str, str]) -> MergedModel:
    """Return the model without the adapters of ``Strategy(lora=...)`` or of peft, merged into its weights."""
    if hasattr(model, "peft_config"):
        return _merged_peft(model, tensors, aliases)
    return MergedModel(model, merge(tensors, adapted_layers(model)), dict(aliases))


def merge(tensors: Mapping[str, RegionTensor], layers: Iterable[AdaptedLayer]) -> dict[str, RegionTensor]:
    """Return the tensors with the adapters of ``layers`` added to their weights, and without those adapters."""
    result = dict(tensors)
    for layer in layers:
        weight, a, b = (result[name] for name in (layer.base, layer.a, layer.b))
        product = b.float() @ a.float() * layer.scale
        product = product.t() if layer.transposed else product
        with torch.no_grad():
            merged: Tensor = (weight.float() + product).to(weight.dtype)
        assert isinstance(merged, RegionTensor)
        result[layer.base] = merged
        del result[layer.a], result[layer.b]
    return result


def _merged_peft(model: Any, tensors: Mapping[str, RegionTensor], aliases: Mapping[str, str]) -> MergedModel:
    adapter = model.active_adapter
    merged = merge(tensors, _peft_layers(model, adapter))
    saved = f".modules_to_save.{adapter}."
    replaced = {name.partition(saved)[0] for name in merged if saved in name}

    def plain(name: str) -> str | None:
        """Return the name in the base model; None for a tensor that is not part of it."""
        name = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        module, is_saved, rest = name.partition(saved)
        if is_saved:
            return f"{module}.{rest}"
        first, is_original, rest = name.partition(".original_module.")
        if is_original:
            return None if f"{_PREFIX}{first}" in replaced else f"{first}.{rest}"
        return None if ".lora_" in name or ".modules_to_save." in name else name

    renamed = {name: value for old, value in merged.items() if (name := plain(old))}
    tied = {plain(second): plain(first) for second, first in aliases.items()}
    return MergedModel(model.get_base_model(), renamed, {a: b for a, b in tied.items() if a and b})


def _peft_layers(model: nn.Module, adapter: str) -> Iterator[AdaptedLayer]:
    """Yield the layers with peft's adapter of this name. Raise UsageError if it does more than add ``B A``."""
    for name, module in model.named_modules():
        found: Any = module
        if not hasattr(found, "base_layer"):
            continue
        lora = getattr(found, "lora_A", {})
        odd = [each for each in _MORE_THAN_PRODUCTS if adapter in (getattr(found, each, None) or {})]
        if adapter in lora and not odd and _is_product(found, adapter):
            weights = (
                f"{name}.base_layer.weight",
                f"{name}.lora_A.{adapter}.weight",
                f"{name}.lora_B.{adapter}.weight",
            )
            yield AdaptedLayer(name, *weights, found.scaling[adapter], bool(found.fan_in_fan_out))
        elif odd or adapter in lora or not hasattr(found, "lora_A"):
            raise UsageError(
                f"save_pretrained(): '{name}' has an adapter of peft that is more than two matrices beside a linear "
                "layer; write it with save_adapter(), and merge it with merge_and_unload() of peft"
            )


def _is_product(layer: Any, adapter: str) -> bool:
    linear = all(isinstance(each[adapter], nn.Linear) for each in (layer.lora_A, layer.lora_B))
    return linear and layer.lora_B[adapter].bias is None
