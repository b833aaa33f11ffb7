"""Adapts a model: freezes its weights, adds adapters, and gives these to the optimizers."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.parallel.lora.adapter_files import AdapterFile, read_adapter
from echelon.parallel.lora.layer import A, B, LoraForward, adapted_class, adapted_layers, linear_sizes
from echelon.parallel.lora.targets import ALL_LINEAR, find_targets, matches
from echelon.strategy import Lora

Optimizers = Mapping[str, torch.optim.Optimizer]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANK = 16


def adapt(model: nn.Module, lora: Lora, optimizers: Optimizers, seed: int) -> tuple[Lora, list[str]]:
    """Adapt ``model`` in place; return the settings with all values known, and lines for the log.

    Initial weights depend on the seed and on the names of the layers only, so they are the same for any layout.
    The optimizers hold what is trained afterwards: an adapter is in the group of the weight that it belongs to.
    """
    saved = None if lora.weights is None else read_adapter(lora.weights)
    lora = _resolved(lora, saved)
    targets = find_targets(model, lora.targets or ALL_LINEAR)
    whole = _trained_modules(model, lora.modules_to_save)
    owners = {id(p): place for place in _places(optimizers) for p in place.params}
    weights = {name: model.get_submodule(name).get_parameter("weight") for name in targets}
    _freeze(model, whole, lora)
    for name in targets:
        _add_adapter(model.get_submodule(name), name, lora, seed)
    _disable_shortcuts(model)
    if saved is not None:
        saved.fill(model)
    lines = _give_to_optimizers(model, optimizers, weights, owners)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    what = f"lora: adapters of rank {lora.rank} in {things(len(targets), 'layer')}"
    return lora, [f"{what}, {count:,} of {total:,} parameters are trained", *lines]


def adapted_copy(model: nn.Module, lora: Lora) -> nn.Module:
    """Return an adapted copy of ``model``, whose frozen weights share the memory of the model's."""
    own = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    copied = copy.deepcopy(model, own)
    adapt(copied, lora, {}, seed=0)
    return copied


def _resolved(lora: Lora, saved: AdapterFile | None) -> Lora:
    """Return the settings with the values of a saved adapter, or the defaults, in place of None."""
    if saved is not None:
        saved.check(lora)
        return dataclasses.replace(
            lora,
            rank=saved.rank,
            alpha=saved.alpha,
            targets=saved.targets,
            rank_scaling=saved.rank_scaling,
            modules_to_save=saved.modules_to_save,
        )
    rank = lora.rank or RANK
    return dataclasses.replace(lora, rank=rank, alpha=lora.alpha or 2.0 * rank, targets=lora.targets or ALL_LINEAR)


def _trained_modules(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return the names of the modules that are trained as they are."""
    found = [name for name, _ in model.named_modules() if matches(name, names)]
    for target in names:
        if not any(matches(name, (target,)) for name in found):
            raise UsageError(f"lora: the model has no module '{target}' to save")
    return found


def _freeze(model: nn.Module, whole: list[str], lora: Lora) -> None:
    trained = {id(p) for name in whole for p in model.get_submodule(name).parameters()}
    for parameter in model.parameters():
        if id(parameter) in trained:
            continue
        parameter.requires_grad_(False)
        parameter.grad = None
        if lora.base_dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[lora.base_dtype])


def _add_adapter(module: nn.Module, name: str, lora: Lora, seed: int) -> None:
    sizes, rank = linear_sizes(module), lora.rank or RANK
    assert sizes is not None
    weight = module.get_parameter("weight")
    low = nn.Linear(sizes.inputs, rank, bias=False, device="meta")  # draws nothing from the generators of the run
    high = nn.Linear(rank, sizes.outputs, bias=False, device="meta")
    device = torch.device("cpu") if weight.is_meta else weight.device
    dtype = DTYPES[lora.dtype]
    low.weight = nn.Parameter(_first_a(rank, sizes.inputs, seed, name).to(device, dtype))
    high.weight = nn.Parameter(torch.zeros(sizes.outputs, rank, device=device, dtype=dtype))
    module.add_module(A, low)
    module.add_module(B, high)
    module.add_module("lora_dropout", nn.Dropout(lora.dropout) if lora.dropout else nn.Identity())
    divisor = math.sqrt(rank) if lora.rank_scaling else rank
    module.__class__ = adapted_class(type(module))  # type: ignore[arg-type]
    assert isinstance(module, LoraForward)
    module.lora_scale = (lora.alpha or 2.0 * rank) / divisor
    module.train(module.training)


def _first_a(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """Return PEFT's distribution of A, uniform within 1 / sqrt(inputs), from a stream of this layer's own."""
    stream = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=torch.Generator().manual_seed(stream))


# ---- optimizers ----


@dataclasses.dataclass(frozen=True, eq=False)
class _GroupPlace:
    """One parameter group of an optimizer, with the parameters that it was given."""

    key: str
    number: int
    optimizer: torch.optim.Optimizer
    params: tuple[nn.Parameter, ...]


def _places(optimizers: Optimizers) -> list[_GroupPlace]:
    return [
        _GroupPlace(key, number, optimizer, tuple(group["params"]))
        for key, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
    ]


def _give_to_optimizers(
    model: nn.Module, optimizers: Optimizers, weights: Mapping[str, nn.Parameter], owners: Mapping[int, _GroupPlace]
) -> list[str]:
    """Replace the frozen parameters of the optimizers by the adapters; return lines on what is not as requested.

    weights: frozen weight of each adapted layer, by name of the layer
    owners:  group that held a parameter, by its identity
    """
    places = _places(optimizers)
    if not places:
        return []
    given: dict[tuple[str, int], list[nn.Parameter]] = {
        (place.key, place.number): [p for p in place.params if p.requires_grad] for place in places
    }
    strays = []
    for layer in adapted_layers(model):
        place = owners.get(id(weights[layer.name]))
        if place is None:
            strays.append(layer.name)
            place = places[0]
        module = model.get_submodule(layer.name)
        given[place.key, place.number] += [module.get_parameter(f"{each}.weight") for each in (A, B)]
    lines = _stray_lines(strays, places)
    for place in places:
        group = place.optimizer.param_groups[place.number]
        group["params"] = given[place.key, place.number]
        if place.params and not group["params"]:
            lines.append(
                f"lora: group {place.number} of optimizer '{place.key}' has nothing left to train: all of its "
                "parameters are frozen"
            )
        for parameter in place.params:
            if not parameter.requires_grad:
                place.optimizer.state.pop(parameter, None)
    return lines


def _stray_lines(strays: list[str], places: list[_GroupPlace]) -> list[str]:
    if not strays or (len(places) == 1 and not places[0].params):
        return []
    return [
        f"lora: the weights of {things(len(strays), 'layer')} are in no optimizer ('{strays[0]}' first); their "
        f"adapters are in group {places[0].number} of optimizer '{places[0].key}'"
    ]


def _disable_shortcuts(model: nn.Module) -> None:
    """Disable torch's fast path of transformer layers, which reads the weights of adapted layers past the adapters."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_adapter(module):
            module.activation_relu_or_gelu = 0


def _has_adapter(module: nn.Module) -> bool:
    return any(isinstance(child, LoraForward) for child in module.modules())
