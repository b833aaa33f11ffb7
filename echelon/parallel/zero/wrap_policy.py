"""Groups parameters into units that are unsharded together; a pure function of the model, without devices or groups.

A unit is a module and the parameters that are unsharded while it runs: a repeated block, or else the outermost module
that holds parameters directly. Shared parameters belong to the innermost module around all of their owners. Small units
are not worth a separate message and are merged into the unit of the whole model, unless the model is a ModuleDict or
ModuleList, which never runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from echelon.base.errors import UsageError
from echelon.plan.called_modules import is_called
from echelon.plan.segments import find_segments
from echelon.strategy.annotations.marks import within

SMALL = 2**12  # in numbers; sending so many takes less time than the latency of a message


def find_units(model: nn.Module, parameters: Mapping[str, nn.Parameter], small: int = SMALL) -> dict[str, list[str]]:
    """Return the parameter names of each unit by the name of its module, both in model order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = _blocks(model)
    given = {id(parameter): name for name, parameter in parameters.items()}
    homes: dict[str, set[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in given:
            homes.setdefault(given[id(parameter)], set()).add(_home(path, modules, blocks))
    first = {id(module): name for name, module in reversed(modules.items())}
    units: dict[str, list[str]] = {}
    for name, found in homes.items():
        same = {first[id(modules[home])] for home in found}  # one module may have several names
        units.setdefault(_around(same, modules), []).append(name)
    return _ordered(_merged(units, parameters, small) if is_called(model) else units, modules)


def _blocks(model: nn.Module) -> set[str]:
    try:
        return {name for names in find_segments(model, "auto") for name in names}
    except UsageError:  # there are none
        return set()


def _home(path: str, modules: Mapping[str, nn.Module], blocks: set[str]) -> str:
    """Return the unit of a parameter: the block around it, or the outermost module around it with direct parameters.

    A module that contains blocks is never a unit for parameters of its submodules: it would be large, and would keep
    the blocks unsharded all the time.
    """
    around = [name for name in _inwards(path.rpartition(".")[0]) if name and is_called(modules[name])]
    within_block = [name for name in around if name in blocks]
    holding = [name for name in around if _holds(modules[name]) and not _contains(name, blocks)]
    return next(iter([*within_block, *holding, *reversed(around)]), "")


def _contains(name: str, blocks: set[str]) -> bool:
    return any(within(block, name) for block in blocks)


def _inwards(name: str) -> Iterable[str]:
    keys = name.split(".") if name else []
    return (".".join(keys[:length]) for length in range(len(keys) + 1))


def _holds(module: nn.Module) -> bool:
    """Return True if the module has direct parameters, or parameters in a ParameterList or ParameterDict."""
    held = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    return any(any(True for _ in place.parameters(recurse=False)) for place in (module, *held))


def _around(homes: set[str], modules: Mapping[str, nn.Module]) -> str:
    """Return the innermost module around all ``homes`` that is called in forward."""
    common = min(homes)
    while not (all(within(home, common) for home in homes) and (not common or is_called(modules[common]))):
        common = common.rpartition(".")[0]
    return common


def _merged(units: dict[str, list[str]], parameters: Mapping[str, nn.Parameter], small: int) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for unit, names in units.items():
        size = sum(parameters[name].numel() for name in names)
        merged.setdefault(unit if size >= small else "", []).extend(names)
    return merged


def _ordered(units: dict[str, list[str]], modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    return {name: units[name] for name in modules if name in units}
