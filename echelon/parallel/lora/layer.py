"""``LoraForward``: the forward pass of a linear layer with a low-rank adapter.

An adapted layer keeps its name, its weight and its class as a base class; the matrices A and B are submodules of it.
So the names of the base model do not change, and marks, pipelines and checkpoints find them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Names of the submodules, as in PEFT's files.
A, B = "lora_A", "lora_B"


class LoraForward(nn.Module):
    """Mixin that adds the output of the adapter to that of the layer."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Module
    lora_scale: float
    lora_fused = True  #: False in split layers, whose products have collectives before or behind them

    def forward(self, x: Any) -> Any:
        result = super().forward(x)
        low = self.lora_A(self.lora_dropout(_as_adapter(x, self.lora_A.weight.dtype)))
        if self.lora_fused and type(result) is Tensor and _is_one_dtype(result, self.lora_B.weight):
            return _fused(result, low, self.lora_B.weight, self.lora_scale)
        return (result + self.lora_B(low * self.lora_scale)).to(result.dtype)


def _as_adapter(x: Any, dtype: torch.dtype) -> Any:
    """Cast the input to the dtype of the adapter, unless autocast chooses the dtype."""
    return x if x.dtype == dtype or torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def _is_one_dtype(result: Tensor, weight: Tensor) -> bool:
    kind = result.device.type
    if torch.is_autocast_enabled(kind):
        return result.dtype == torch.get_autocast_dtype(kind)
    return result.dtype == weight.dtype


def _fused(result: Tensor, low: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return ``result + low @ weight.T * scale`` in one matrix product: the output is read and written once less."""
    rows = torch.addmm(result.flatten(0, -2), low.flatten(0, -2), weight.t(), alpha=scale)
    return rows.view(result.shape)


@functools.cache
def adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of adapted layers of ``kind``; equal blocks share it, so that one program serves them."""
    return type(f"Lora{kind.__name__}", (LoraForward, kind), {})


def forward_beneath(module: nn.Module) -> Any:
    """Return the function that computes the output of a module, without that of its adapter."""
    kind = type(module)
    return super(LoraForward, kind).forward if issubclass(kind, LoraForward) else kind.forward


class LinearSizes(NamedTuple):
    """The sizes of a linear layer; ``transposed`` if its weight is (inputs, outputs), as in GPT-2's Conv1D."""

    inputs: int
    outputs: int
    transposed: bool


def linear_sizes(module: nn.Module) -> LinearSizes | None:
    """Return the sizes of a module that computes ``x W (+ b)``; None for other modules.

    Subclasses of Linear with a forward of their own are others: it may do more, such as unpack quantized weights.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LinearSizes(module.in_features, module.out_features, transposed=False)
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        weight: Any = module.weight
        return LinearSizes(int(weight.shape[0]), int(weight.shape[1]), transposed=True)
    return None


class AdaptedLayer(NamedTuple):
    """One adapted layer of a model.

    name:       name of the layer
    base:       name of its frozen weight
    a, b:       names of the matrices of the adapter
    scale:      factor of ``B A``
    transposed: True if the weight is (inputs, outputs)
    """

    name: str
    base: str
    a: str
    b: str
    scale: float
    transposed: bool


def adapted_layers(model: nn.Module) -> Iterator[AdaptedLayer]:
    """Yield the layers with an adapter of ``Strategy(lora=...)``."""
    for name, module in model.named_modules():
        if isinstance(module, LoraForward):
            path = f"{name}." if name else ""
            transposed = not isinstance(module, nn.Linear)
            weights = (f"{path}weight", f"{path}{A}.weight", f"{path}{B}.weight")
            yield AdaptedLayer(name, *weights, module.lora_scale, transposed)
