"""``DeferredWeights``: the parameters of a model built in ``deferred()``, until a rank makes its parts of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.base.errors import UsageError
from echelon.construction.same_construction import same_on_all_ranks
from echelon.construction.source_reading import read_other_tensors
from echelon.construction.weight_recipe import RECIPE, StoredRecipe, WeightRecipe
from echelon.distributed.tensor_layout import Layout


class _Waiting(NamedTuple):
    """A parameter without memory, all of its names, and its recipe."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    recipe: WeightRecipe | StoredRecipe


class DeferredWeights:
    """Parameters whose first values are still to be made.

    Until then each of them is a single NaN, expanded to its shape, on the rank's device: code that would use it gets a
    non-finite loss. One parameter at a time is whole in memory while its part is taken.

    model:  model built in ``deferred()``; its parameters stay the same objects
    device: device of the rank
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_meta and not isinstance(parameter, FakeTensor):
                names.setdefault(id(parameter), []).append(name)
                parameters[id(parameter)] = parameter
        _refuse_meta_buffers(model)
        #: lines for the user on names that only the model, or only its source of weights has
        self.notices: list[str] = []
        self._waiting = {
            key: _Waiting(tuple(names[key]), parameter, _recipe(parameter, names[key][0]))
            for key, parameter in parameters.items()
        }
        sources = {id(each.recipe.source): each.recipe.source for each in self._waiting.values() if each.recipe.source}
        for source in sources.values():
            self.notices += read_other_tensors(model, source)
        with _without_weak_references(model):
            for waiting in self._waiting.values():
                _hollow(waiting.parameter, device)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._waiting

    def agree(self, control: dist.ProcessGroup) -> None:
        """Compare the constructions of all ranks, and give all of them rank 0's random states and constants."""
        tapes = {id(each.recipe.tape): each.recipe.tape for each in self._waiting.values() if each.recipe.tape}
        same_on_all_ranks(list(tapes.values()), control)

    def fill(self, layouts: Mapping[str, Layout] = MappingProxyType({})) -> None:
        """Give each parameter that this rank holds its values, or the part of them that its layout describes.

        layouts: layouts of the split parameters, by first name; others are whole (default: all)
        """
        for names, parameter, recipe in self._here():
            layout = layouts.get(names[0]) or Layout(recipe.shape)
            into = parameter.data
            if not torch.ops.aten.is_non_overlapping_and_dense(into) or into.numel() <= 1:
                into = recipe.empty_part(layout, parameter.dtype, parameter.device)
            recipe.write(names, layout, into)  # memory that it has got since keeps its memory format
            parameter.data = into

    def fill_shards(self, shards: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]) -> None:
        """Give this rank's shards of the parameters their values.

        shards:  this rank's rows, by name of the parameter
        layouts: layouts of the shards
        """
        for names, _, recipe in self._here():
            shard, layout = shards[names[0]], layouts[names[0]]
            recipe.write(names, layout, shard.data)

    def _here(self) -> Iterator[_Waiting]:
        """Yield the waiting parameters, except those of other stages, and forget them all."""
        waiting, self._waiting = self._waiting, {}
        return (each for each in waiting.values() if each.parameter.numel())


def _recipe(parameter: nn.Parameter, name: str) -> WeightRecipe | StoredRecipe:
    recipe: WeightRecipe | StoredRecipe | None = getattr(parameter, RECIPE, None)
    if recipe is None:
        raise UsageError(
            f"'{name}' is on the meta device and has no values; build the model inside of 'with echelon.deferred():' "
            "instead, or give it values before distribute()"
        )
    if parameter._version != recipe.version or parameter.shape != recipe.shape:
        raise UsageError(
            f"'{name}' was changed after 'with echelon.deferred():' or from_pretrained(), where it has no values; "
            "change it inside, or read the model with deferred=False"
        )
    return recipe


def _refuse_meta_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta and not isinstance(buffer, FakeTensor):
            raise UsageError(f"buffer '{name}' is on the meta device and has no values; give it values first")


def _hollow(parameter: nn.Parameter, device: torch.device) -> None:
    """Turn a parameter on ``meta`` into one NaN, expanded to its shape, on ``device``. It stays the same object."""
    kind = parameter.dtype
    nothing = float("nan") if kind.is_floating_point or kind.is_complex else torch.iinfo(kind).min
    value = torch.full((), nothing, dtype=kind, device=device).expand(parameter.shape)
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__class__ = type(parameter)
    other.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != RECIPE})
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_weak_references(model: nn.Module) -> Iterator[None]:
    """Remove the weak references that recurrent modules keep of their weights: torch swaps no tensor that has some."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]
