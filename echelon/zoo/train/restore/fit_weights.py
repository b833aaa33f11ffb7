"""Load weights into a model whose head may differ from the head of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.base.errors import CheckpointError

_NAMED = 3  # largest number of names in a line


@dataclass(frozen=True)
class RestoreReport:
    """The result of loading weights, by name.

    taken:   weights loaded from the file
    remade:  weights of a head of another size, with the reason; they are initialized at random
    missing: weights that the file lacks; they are initialized at random
    unused:  weights of the file that the model lacks, usually heads of another task
    """

    taken: list[str]
    remade: dict[str, str]
    missing: list[str]
    unused: list[str]

    def lines(self) -> list[str]:
        """Return the report as lines for the console."""
        result = [f"weights: {len(self.taken)} taken from the checkpoint"]
        result += [f"{name}: {why}" for name, why in self.remade.items()]
        if self.missing:
            result.append(f"weights: {len(self.missing)} not in the checkpoint and initialized: {_some(self.missing)}")
        if self.unused:
            result.append(f"weights: {len(self.unused)} of the checkpoint are not used: {_some(self.unused)}")
        return result


@torch.no_grad()
def restore(model: nn.Module, weights: Mapping[str, Tensor]) -> RestoreReport:
    """Load the weights into the model, before ``distribute``.

    Raises CheckpointError, before the model is changed, if sizes outside of a head differ or the checkpoint is of
    another model.
    """
    places: dict[str, Tensor] = model.state_dict(keep_vars=True)
    remade = _remade(places, weights)
    taken = [name for name in places if name in weights and name not in remade]
    for name in taken:
        if places[name].shape != weights[name].shape:
            raise CheckpointError(_misfit(name, places[name], weights[name]))
    filled = {id(places[name]) for name in taken}  # the file may have a tied weight under only one of its names
    missing = [name for name in places if name not in weights and id(places[name]) not in filled]
    unused = [name for name in weights if name not in places]
    _refuse_other_model(places, weights, taken, missing)
    for name in taken:
        places[name].copy_(weights[name])
    return RestoreReport(taken, remade, missing, unused)


def _remade(places: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return all tensors of heads of another size, with the reason; a head is never loaded in part."""
    differing = {
        name
        for name, value in places.items()
        if _is_of_head(name) and name in weights and weights[name].shape != value.shape
    }
    heads = {_module(name) for name in differing}
    return {
        name: _why(value, weights[name])
        for name, value in places.items()
        if name in weights and _is_of_head(name) and _module(name) in heads
    }


def _is_of_head(name: str) -> bool:
    return any(part == "head" or part.endswith("_head") for part in name.split("."))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _why(here: Tensor, there: Tensor) -> str:
    if here.shape == there.shape:
        return "the rest of its head has another size; it is initialized"
    if here.shape[1:] == there.shape[1:]:
        return f"the checkpoint has {there.shape[0]} classes, this run {here.shape[0]}; it is initialized"
    return f"the checkpoint has {list(there.shape)}, this run {list(here.shape)}; it is initialized"


def _misfit(name: str, here: Tensor, there: Tensor) -> str:
    return (
        f"'{name}' is {list(there.shape)} in the checkpoint and {list(here.shape)} in this model, and only a head may "
        "differ; give the sizes of the checkpoint (--model_config_file_name, or a flag), or another checkpoint"
    )


def _refuse_other_model(
    places: Mapping[str, Tensor], weights: Mapping[str, Tensor], taken: list[str], missing: list[str]
) -> None:
    """Raise CheckpointError if the checkpoint is of another model, which would only train badly otherwise."""
    if not taken:
        raise CheckpointError(
            f"the checkpoint is of another model: it has {_some(weights)}, and the model {_some(places)}; "
            "give the --model_name it was trained with"
        )
    body = [name for name in places if not _is_of_head(name)]
    lacking = [name for name in missing if not _is_of_head(name)]
    if 2 * len(lacking) > len(body):
        raise CheckpointError(
            f"the checkpoint lacks {len(lacking)} of the model's {len(body)} weights: {_some(lacking)}; it is of "
            "another model, give the --model_name and sizes it was trained with"
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:_NAMED])
    return f"{shown} and {len(listed) - _NAMED} more" if len(listed) > _NAMED else shown
