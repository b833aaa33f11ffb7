"""Linear layers with an adapter, split as the layer beneath.

              layer      A                      B
columns       outputs    whole                  outputs
rows          inputs     inputs, then the sum   whole

So the adapter sends activations of its rank only: with columns their gradients are summed, with rows they are.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from echelon.parallel.lora.layer import LoraForward
from echelon.parallel.tensor.linear import linear_pieces
from echelon.parallel.tensor.split_axis import SplitAxis, SplitInputCache
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError
from echelon.strategy.annotations.marks import Split


def lora_pieces(module: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    """Return the specs of an adapted layer: of the layer itself, and of the matrix that is split with it."""
    assert isinstance(module, LoraForward)
    if not isinstance(module, nn.Linear):
        raise UnsplittableError("is an adapted layer of another kind than nn.Linear, which cannot be split")
    (layer,) = linear_pieces(module, mark, axis)
    kind = type(f"Lora{layer.kind.__name__}", (LoraForward, layer.kind), {"lora_fused": False})
    if mark.how == "row":
        matrix = linear_pieces(module.lora_A, dataclasses.replace(mark, sequence=False), axis)
    else:  # the input of the layer stays in the axis's cache, for the layers that share it
        matrix = linear_pieces(module.lora_B, mark, dataclasses.replace(axis, memory=SplitInputCache()))
    return [dataclasses.replace(layer, kind=kind), *matrix]
