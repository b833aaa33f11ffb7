"""``deferred()``: a model built inside has its parameters on ``meta``; ``distribute()`` makes each rank's part."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from echelon.construction.recorder import ConstructionRecorder
from echelon.construction.tape import Tape
from echelon.construction.value_access import ValueAccess
from echelon.construction.weight_recipe import RECIPE, WeightRecipe

if TYPE_CHECKING:
    from echelon.checkpoint.weight_source import WeightSource


@contextlib.contextmanager
def deferred(weights: WeightSource | None = None) -> Iterator[None]:
    """Build a model inside of this context without memory for its weights.

    Parameters are made on ``meta``. ``echelon.distribute`` makes the part of each rank, one parameter at a time, with
    the values that a plain construction gives with the same seed, bit by bit. Buffers and all other tensors are real.

    weights: source to read the parts from instead of drawing them, such as the files of a pretrained model; default:
             the initial weights of the constructor

    >>> with echelon.deferred():
    ...     model = nn.Linear(8, 3)
    >>> engine = echelon.distribute(model, torch.optim.AdamW(model.parameters()), loss=F.cross_entropy)
    """
    tape = Tape()
    recorder = ConstructionRecorder(tape, draws=weights is None)
    with ValueAccess(recorder), recorder:
        yield
    _finish(tape, weights)


def _finish(tape: Tape, weights: WeightSource | None) -> None:
    """Give parameters their recipes, and the other recorded tensors that are still in use their values."""
    alive = [each for each in gc.get_objects() if _is_plain(each) and each in tape]
    parameters = [each for each in alive if isinstance(each, nn.Parameter)]
    held = {tape.ref(each).storage for each in parameters}
    others = [each for each in alive if tape.ref(each).storage not in held]
    for tensor, value in zip(others, tape.values([tape.ref(each) for each in others]), strict=True):
        _become(tensor, value)
    tape.keep(held)
    for parameter in parameters:
        setattr(parameter, RECIPE, WeightRecipe(tape, tape.ref(parameter), parameter._version, weights))


def _is_plain(value: object) -> bool:
    kind = type(value)  # isinstance() would ask proxies for their class
    return issubclass(kind, Tensor) and not issubclass(kind, UninitializedParameter | UninitializedBuffer)


def _become(tensor: Tensor, value: Tensor) -> None:
    value.requires_grad_(tensor.requires_grad)
    value.__class__ = type(tensor)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
