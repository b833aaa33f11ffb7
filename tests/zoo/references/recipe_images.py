"""Weights and images by formula: the same in the package's models and in those that the references come from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 10
FC_SIZE = 128  #: width of AlexNet's and VGG's hidden layers here; with 4096 they take seconds to fill

#: a prime number of values, so that rows of a matrix differ; cutting from it is quicker than drawing all
PATTERN = np.random.RandomState(7).standard_normal(4099)


def values(index: int, shape: Iterable[int]) -> Tensor:
    """Standard normal ones, others for each index."""
    return torch.from_numpy(np.resize(np.roll(PATTERN, 31 * index), tuple(shape)))


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Every parameter by its place in the order: matrices by fan-in, norms about 1, the rest about 0."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        drawn = values(index, parameter.shape)
        if parameter.dim() > 1 and name.endswith("weight"):
            parameter.copy_(drawn * (2 / parameter[0].numel()) ** 0.5)
        else:
            parameter.copy_(drawn * 0.1 + float(name.endswith("weight")))
    for index, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith("running_mean"):
            buffer.copy_(values(1000 + index, buffer.shape) * 0.1)
        if name.endswith("running_var"):
            buffer.copy_(1 + values(1000 + index, buffer.shape).abs() * 0.1)


def summary(model: nn.Module, image_size: int, training: bool = False) -> dict[str, list[float]]:
    """Logits of two images; in training also the norm of each parameter's gradient, in order, for a sum of squares."""
    model.train(training)
    with torch.set_grad_enabled(training):
        logits = model(values(5000, (2, 3, image_size, image_size)))
    found = {"logits": logits.detach().flatten().tolist()}
    if training:
        logits.square().sum().backward()
        found["gradients"] = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
    return found
