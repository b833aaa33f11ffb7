"""FakeModel: a copy of a model with fake tensors, in which equal units share tensors."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError, first_line
from echelon.plan.fake_forward import placeholder_mode
from echelon.plan.module_calls import install_call_hooks
from echelon.strategy.annotations.marks import within


class FakeModel:
    """A copy of a model with fake tensors.

    model:      the copy
    stands_for: by id of a tensor of the original, the fake tensor of the copy
    like:       for each unit that equals an earlier one, the name of that one
    splits:     names of modules that will be split; a unit inside such a module shares nothing with other units
    """

    def __init__(self, original: nn.Module, units: Sequence[str], splits: Iterable[str] = ()) -> None:
        self._modules = dict(original.named_modules(remove_duplicate=False))
        cut = tuple(splits)
        apart = {name for name in units if any(name != each and within(name, each) for each in cut)}
        self._keys = {name: _structure(self._modules[name]) for name in units if name not in apart}
        self.like = _first_alike(self._modules, self._keys)
        self._places = {name: _places(self._modules[name]) for name in {*self.like, *self.like.values()}}
        self.stands_for: dict[int, Tensor] = {}
        memo: dict[int, Any] = {}
        with placeholder_mode(), torch.no_grad():
            try:
                self._copy_units(memo)
                self._copy_tensors(original, memo)
                self.model: nn.Module = copy.deepcopy(original, memo)
            except (TypeError, RuntimeError) as error:
                raise UsageError(
                    f"the model cannot be copied ({first_line(error)}), so that it cannot be profiled; "
                    "move objects that cannot be copied out of its modules"
                ) from None
        self._copies = dict(self.model.named_modules(remove_duplicate=False))
        if not self.model.training:
            self.model.train()

    def _copy_units(self, memo: dict[int, Any]) -> None:
        for name, first in self.like.items():
            module, example = self._modules[name], self._modules[first]
            self._copy_tensors(example, memo)
            clone = memo[id(module)] = copy.copy(copy.deepcopy(example, memo))
            clone.__dict__ = dict(clone.__dict__)
            for own, other in zip(_tensors(module), _tensors(example), strict=True):
                self.stands_for[id(own)] = memo[id(other)]

    def _copy_tensors(self, module: nn.Module, memo: dict[int, Any]) -> None:
        for value in _tensors(module):
            if id(value) not in memo and id(value) not in self.stands_for:
                memo[id(value)] = self.stands_for[id(value)] = _stand_in(value)

    @contextlib.contextmanager
    def without_clones(self) -> Iterator[None]:
        """Remove the parameters of equal units but the first within the context, so that only the first is split."""
        clones = [self._copies[name] for name in self.like]
        kept = [clone.__dict__["_parameters"] for clone in clones]
        for clone in clones:
            clone.__dict__["_parameters"] = {}
        try:
            yield
        finally:
            for clone, parameters in zip(clones, kept, strict=True):
                clone.__dict__["_parameters"] = parameters

    def track_units(self, units: Sequence[str]) -> None:
        for name, first in self.like.items():  # the first unit may have been split since the copy was made
            clone, example = self._copies[name], self._copies[first]
            clone.__class__ = type(example)
            clone.__dict__ = dict(example.__dict__)
        install_call_hooks(self.model, units)

    def apply_unit_places(self, name: str, module: nn.Module) -> None:
        """Set the position attributes of this unit on the modules that equal units share.

        A key-value cache uses these attributes as indices.
        """
        for inside, places in self._places.get(name, {}).items():
            module.get_submodule(inside).__dict__.update(places)

    def key(self, name: str) -> Any:
        """Return a key that is equal for units that do the same to equal inputs."""
        return self.like.get(name, name)


def _stand_in(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
    return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _first_alike(modules: dict[str, nn.Module], keys: dict[str, Any]) -> dict[str, str]:
    """Return, by name of a unit, the first unit that equals it; units that share modules or tensors are left out."""
    uses = Counter(id(value) for module in set(modules.values()) for value in _own(module))
    places = Counter(map(id, modules.values()))
    first: dict[Any, str] = {}
    found = {}
    for name, key in keys.items():
        inside = list(modules[name].modules())
        alone = all(places[id(part)] == 1 and all(uses[id(value)] == 1 for value in _own(part)) for part in inside)
        if alone and first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def _own(module: nn.Module) -> list[Tensor]:
    return [value for value in (*module._parameters.values(), *module._buffers.values()) if value is not None]


#: Attributes with a module's position in the model, which does not affect its computation.
_PLACES = frozenset(("layer_idx", "layer_index", "layer_id", "layer_number"))


def _places(unit: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the position attributes of the modules inside the unit, by module name."""
    found = {
        inside: {name: value for name, value in part.__dict__.items() if name in _PLACES}
        for inside, part in unit.named_modules()
    }
    return {inside: places for inside, places in found.items() if places}


def _structure(module: nn.Module) -> Any:
    return tuple(
        (type(part), part.training, part.extra_repr(), _settings(part), _shapes(part)) for part in module.modules()
    )


def _settings(part: nn.Module) -> tuple[Any, ...]:
    plain = (int, float, str, bool, tuple, list)
    return tuple(
        (name, _frozen(value))
        for name, value in part.__dict__.items()
        if isinstance(value, plain) and not name.startswith("_") and name not in _PLACES
    )


def _frozen(value: Any) -> Any:
    """Return a setting in a hashable form; for a value that is not a plain one, its type."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_frozen, value))
    return value if isinstance(value, int | float | str | None) else type(value)


def _shapes(part: nn.Module) -> tuple[Any, ...]:
    tensors = (*part._parameters.values(), *part._buffers.values())
    return tuple(None if value is None else describe_leaf(value) for value in tensors)


def describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    return repr(leaf)
