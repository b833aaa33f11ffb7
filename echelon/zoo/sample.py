"""Build a model of the zoo with a batch and a loss, for ``zoo show``, plans and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data import Loader
from echelon.zoo.tasks import loss_of
from echelon.zoo.train.resolve import TrainConfig, resolve
from echelon.zoo.train.train_arguments import TrainArguments


@dataclass(frozen=True)
class Sample:
    """A model, a batch and a loss, where ``loss(model(*batch[:-1]), batch[-1])`` is the loss of the batch."""

    model: nn.Module
    batch: tuple[Any, ...]
    loss: Callable[[Any, Any], Tensor]
    resolved: TrainConfig


def sample(name: str, values: Mapping[str, Any] | None = None, *, batch: int = 2, device: str | None = None) -> Sample:
    """Build the model with its defaults, overridden by ``values``, and a batch of synthetic data or ``dataset_name``.

    batch:  number of samples of the batch, default 2
    device: device of the model; "meta" builds it without memory, to inspect sizes only
    """
    given = {"model_name": name, "num_sample_per_epoch": max(batch, 8), **(values or {})}
    resolved = resolve(
        TrainArguments(run={key: value if value is True else str(value) for key, value in given.items()})
    )
    data = resolved.dataset.open(resolved.request)
    resolved = resolved.with_data(data)
    with torch.device(device) if device else contextlib.nullcontext():
        model = resolved.model.build(resolved.request)
    *inputs, target = next(iter(Loader(data.train, batch_size=batch, shuffle=False, **data.loader)))
    arrived = data.arrive(tuple(inputs)) if data.arrive else tuple(inputs)
    loss = loss_of(resolved.request.task, resolved["loss_name"], resolved.model.loss)
    return Sample(model, (*arrived, target), loss, resolved)
