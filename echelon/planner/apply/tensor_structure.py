"""Marks of tensor parallelism from the structure of a model: its forward runs on fake tensors, as one of the ranks.

Layers are split in pairs in which a column-parallel layer passes its parts to a row-parallel one, through any code in
between; only pairs that need no gather are marked. Names of modules and of models play no part.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from echelon.base.errors import EchelonError, UsageError, first_line
from echelon.checkpoint.training_state import random_state, restore_random_state
from echelon.parallel.tensor.lazy_activation import LazyActivation, whole
from echelon.plan.partition import find_units
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_split import fake_process_group, split_first
from echelon.planner.profiling.fake_step import FakePass, run_fake_step
from echelon.planner.profiling.layer_probe import LayerProbe
from echelon.planner.profiling.splits import Marks, find_marks

#: Errors of fake tensors where a shape or a branch depends on values.
_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
ROWS, WORDS = 2, 8  # samples and tokens of a batch that is made up


class _Given(NamedTuple):
    """A batch, and the loss that belongs to it; None if the model's output will do."""

    batch: Any
    loss: Any


def marks_by_structure(model: nn.Module, size: int, sample: Any = None, loss: Any = None) -> Marks:
    """Return the marks of the layers to split over ``size`` ranks.

    sample: batch as in ``Engine.step``; None makes one up from the configuration of a Hugging Face model
    loss:   loss as in ``distribute``
    """
    given = _Given(made_up_batch(model), None) if sample is None else _Given(sample, loss)
    units = find_units(model) or [""]
    like = FakeModel(model, units).like

    def attempt(marks: Marks, probe: LayerProbe | None = None) -> FakePass:
        shadow = FakeModel(model, units, marks)
        with fake_process_group(size) as group:
            split_first(shadow, marks, group)
            if probe is not None:
                probe.attach(shadow.model)
            shadow.track_units(units)
            batch, loss = given
            return run_fake_step(shadow, batch, lambda copy, inputs: _result(copy, inputs, loss), None, False, False)

    state = random_state(0, torch.device("cpu"))
    try:
        try:
            attempt({})  # a model that does not run on this batch is an error, not a model without layers to split
        except _VALUES:  # such as the losses of transformers that select labels
            if _input_maker(model) is None:
                raise
            given = _Given(made_up_batch(model), None)
            attempt({})
        return find_marks(model, like, attempt)
    except EchelonError:
        raise
    except Exception as error:
        raise UsageError(
            f"split: the forward of {type(model).__name__} does not run on fake tensors ({type(error).__name__}: "
            f"{first_line(error)}); give another sample=, or mark layers by name with echelon.annotate()"
        ) from error
    finally:
        restore_random_state(0, torch.device("cpu"), state)


def _result(model: nn.Module, batch: Any, loss: Any) -> Tensor:
    """Return one number that depends on the model's output: the loss, if the batch has what it needs."""
    from echelon.parallel.objective import Objective

    if loss is not None:
        return Objective(model, loss, None, torch.device("cpu"))(batch)[1]
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    tensors: list[Tensor] = [whole(leaf) for leaf in _leaves(output) if isinstance(leaf, Tensor | LazyActivation)]
    return next(each for each in tensors if each.is_floating_point()).float().sum()


def _leaves(output: Any) -> list[Any]:
    with contextlib.suppress(AttributeError, TypeError):
        output = dict(output.items())  # outputs of transformers are mappings
    return tree_leaves(output)


def made_up_batch(model: nn.Module) -> dict[str, Tensor]:
    """Return inputs for a model of transformers, of the shapes that its configuration names."""
    maker = _input_maker(model)
    if maker is None:
        raise UsageError(
            f"split: {type(model).__name__} brings no tensor-parallel plan, and its structure shows with a batch only; "
            "give one as sample= to annotate() or distribute(), or mark layers by name"
        )
    config: Any = model.config
    batch = {str(model.main_input_name): maker(config)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.ones(ROWS, WORDS, dtype=torch.long)
    return batch


def _input_maker(model: nn.Module) -> Any:
    """Return what makes the main input of a model of transformers from its configuration; None for others."""
    name = getattr(model, "main_input_name", None)
    return _INPUTS.get(name) if isinstance(name, str) and getattr(model, "config", None) is not None else None


def _words(config: Any) -> Tensor:
    return torch.ones(ROWS, WORDS, dtype=torch.long)


def _picture(config: Any) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return torch.zeros(ROWS, getattr(config, "num_channels", 3), height, width)


def _spectrogram(config: Any) -> Tensor:
    frames = 2 * getattr(config, "max_source_positions", 64)  # an encoder's convolutions halve them
    return torch.zeros(ROWS, getattr(config, "num_mel_bins", 80), frames)


def _waves(config: Any) -> Tensor:
    return torch.zeros(ROWS, 16_000)


#: Name of a model's main input -> what makes it from the configuration.
_INPUTS: dict[Any, Any] = {
    "input_ids": _words,
    "pixel_values": _picture,
    "input_features": _spectrogram,
    "input_values": _waves,
}
