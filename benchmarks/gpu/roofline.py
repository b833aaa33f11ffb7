"""The least time a training step can take on a device: its arithmetic at the measured rate, its bytes at full speed.

Counted from the operations that one forward and backward pass of the model calls:

    products (convolution, matrix, attention)   max(operations / peak, bytes / bandwidth), each input and output once
    batch and layer norm                        forward reads and writes; backward reads twice and writes, and batch
                                                norm reads both once more, since its sums come first
    the optimizer                               fp32 weight, gradient and state: read, and written where they change;
                                                and each weight cast to 16 bits
    everything else                             nothing: it could be part of the kernel before or after it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

PEAK = 790e12  #: bf16 operations a second of a large matrix product, measured on an H200
BANDWIDTH = 4.8e12  #: bytes a second, by the data sheet

_NORMS = {  # passes over the activation
    "native_batch_norm": 2, "cudnn_batch_norm": 2, "_native_batch_norm_legit": 2, "native_layer_norm": 2,
    "native_batch_norm_backward": 5, "cudnn_batch_norm_backward": 5, "native_layer_norm_backward": 3,
}  # fmt: skip


class Floor(TorchDispatchMode):
    """Adds up floating-point operations and the least seconds of what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.products, self.norms = 0.0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            count = float(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
            self.operations += count
            self.products += max(count / PEAK, _bytes((args, kwargs, out)) / BANDWIDTH)
        elif (passes := _NORMS.get(packet.__name__)) is not None:
            largest = max(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.norms += passes * 2 * largest / BANDWIDTH
        return out


def _bytes(values: Any) -> float:
    return float(sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)))


def floor(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Any, state: int) -> dict[str, float]:
    """Seconds and operations of a step. ``state``: tensors of optimizer state a weight has (SGD 1, Adam 2)."""
    counted = Floor()
    with counted:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(model(batch[0]), batch[1])
        value.backward()
    weights = sum(p.numel() for p in model.parameters())
    update = weights * (4 * (2 + state) + 4 * (1 + state) + 6) / BANDWIDTH
    model.zero_grad()
    return {
        "operations": counted.operations,
        "products_s": counted.products,
        "norms_s": counted.norms,
        "update_s": update,
        "seconds": counted.products + counted.norms + update,
    }
