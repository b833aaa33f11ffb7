"""Chooses the linear layers of a model that get an adapter, by the rules of PEFT."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from echelon.base.errors import UsageError, nearest
from echelon.parallel.lora.layer import LoraForward, linear_sizes

ALL_LINEAR = "all-linear"


def find_targets(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """Return the names of the layers that ``targets`` mean; raise UsageError if there are none, or others than linear.

    targets: "all-linear", a regular expression for whole names, or the last parts of names
    """
    refuse_adapted(model)
    modules = dict(model.named_modules())
    if targets == ALL_LINEAR:
        found = [name for name in modules if _why_not(name, modules) is None and name not in _output_layers(model)]
        if not found:
            raise UsageError("lora: the model has no linear layers; give targets=(...) of a model that has some")
        return found
    found = [name for name in modules if matches(name, targets)]
    _check_found(found, targets, modules)
    for name in found:
        if (reason := _why_not(name, modules)) is not None:
            raise UsageError(f"lora: '{name}' {reason}; leave it out of targets")
    return found


def matches(name: str, targets: str | tuple[str, ...]) -> bool:
    """Return True if the targets mean this module: a pattern of the whole name, or the last parts of it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def shortened(names: list[str], model: nn.Module) -> list[str]:
    """Return the last parts of these names if they mean exactly these modules, else the names themselves."""
    ends = tuple(sorted({name.rpartition(".")[2] for name in names}))
    meant = [name for name, _ in model.named_modules() if matches(name, ends)]
    return list(ends) if sorted(meant) == sorted(names) else names


def refuse_adapted(model: nn.Module) -> None:
    """Raise UsageError if the model has adapters already."""
    if hasattr(model, "peft_config"):
        raise UsageError("lora: the model has adapters of peft already; leave lora out to train those")
    if any(isinstance(module, LoraForward) for module in model.modules()):
        raise UsageError("lora: the model has adapters already; leave lora out to go on training them")


def _check_found(found: list[str], targets: str | tuple[str, ...], modules: Iterable[str]) -> None:
    if isinstance(targets, str):
        if not found:
            hint = f"; for a part of names write ({targets!r},)" if re.fullmatch(r"\w+", targets) else ""
            raise UsageError(f"lora: targets={targets!r}: no module's whole name matches this pattern{hint}")
        return
    for target in targets:
        if not any(matches(name, (target,)) for name in found):
            known = sorted({name.rpartition(".")[2] for name in modules if name})
            raise UsageError(f"lora: the model has no module '{target}'{nearest(target, known)}")


def _why_not(name: str, modules: dict[str, nn.Module]) -> str | None:
    """Return the reason why a module cannot have an adapter; None if it can."""
    module, parent = modules[name], modules.get(name.rpartition(".")[0])
    if linear_sizes(module) is None:
        return f"is a {type(module).__name__}; only plain linear layers can have an adapter"
    if isinstance(parent, nn.MultiheadAttention):
        return "belongs to nn.MultiheadAttention, which reads the weight and does not call the layer"
    if "weight" not in module._parameters:
        return "has a parametrized weight; remove the parametrization"
    return None


def _output_layers(model: nn.Module) -> set[str]:
    """Return the names of the output layer of a model of transformers, which "all-linear" leaves out."""
    known = getattr(model, "get_output_embeddings", None)
    head = known() if callable(known) else None
    heads = [head] if isinstance(head, nn.Module) else []
    return {name for name, module in model.named_modules() if any(module is each for each in heads)}
