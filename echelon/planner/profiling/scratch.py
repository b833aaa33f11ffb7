"""Temporary memory of operations: libraries copy tensors into other layouts for convolutions.

Measured with torch 2.13 on a CPU: forward holds blocked copies of input, weight and output at once, and then the output
twice; backward does the same for the input's gradient, and then for the weight's. On a GPU, cuDNN converts to channels
last for its matrix units: backward holds copies of its arguments. Additional workspaces of an algorithm are not
predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

BLOCK = 16  # channels per block
FEW = 4  # up to this many channels, the input is read without a blocked copy


def scratch_bytes(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[float, float]:
    """Return the temporary bytes of an operation on a CPU, before and after its results are allocated."""
    packet = func.overloadpacket
    if packet is aten.convolution:
        x, weight = _blocked(args[0]), _bytes(args[1])
        y = _blocked(results[0])
        return (x if args[0].shape[1] > FEW else 0.0) + weight + y, y
    if packet is aten.convolution_backward:
        return _backward(args, results)
    return 0.0, 0.0


def scratch_bytes_on_gpu(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[float, float]:
    """Return the temporary bytes of an operation on a GPU, before and after its results are allocated."""
    if func.overloadpacket is aten.convolution_backward and not _channels_last(args[1]):
        return 0.0, _bytes(args[0]) + (_bytes(args[1]) if args[-1][1] else 0.0)
    return 0.0, 0.0


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _backward(args: Sequence[Any], results: Sequence[Tensor]) -> tuple[float, float]:
    gradient, x, weight = _blocked(args[0]), _blocked(args[1]), _bytes(args[2])
    for_input, for_weight = args[-1][0], args[-1][1]
    before = gradient + weight + x if for_input else gradient + weight
    kept = x if args[1].shape[1] > FEW else 0.0
    after = max(x if for_input else 0.0, kept + gradient if for_weight else 0.0)
    made = sum(_bytes(result) for result in results[-2 if args[-1][2] else -1 :]) if for_weight else 0.0
    return before, max(0.0, after + weight - made)


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def _blocked(tensor: Tensor) -> float:
    channels = tensor.shape[1]
    return _bytes(tensor) / max(channels, 1) * (-(-channels // BLOCK) * BLOCK)
