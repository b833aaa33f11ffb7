"""``LocalState``: the part of the model that this rank holds. Optimizers, checkpoints and norms use it for any plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.distributed.tensor_layout import Layout, Part

Groups = Mapping[str, list[list[str]]]  # by optimizer: the names of the parameters in each of its groups


@dataclass(frozen=True)
class PartialSum:
    """One of ``count`` partial sums. Ranks with the same index hold the same one, or parts of it."""

    index: int = 0
    count: int = 1


@dataclass
class LocalState:
    """One rank's part of the model.

    parameters:   tensors that optimizers update, by name: a parameter, or this rank's shard of it
    layouts:      layouts of the parameters that are parts of a larger tensor
    cuts:         layouts of the model's own split parameters: as ``layouts``, but without ZeRO shards
    groups:       the optimizers' parameter groups as the user made them, including parameters of other ranks
    partial_sums: index and number of the partial sums of each gradient before it is reduced over ranks
    counted:      parameters that this rank counts if every element of the model must be counted once
    contributes:  names of parameters and buffers that this rank contributes to the whole model
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    layouts: dict[str, Layout] = field(default_factory=dict)
    cuts: Mapping[str, Layout] = field(default_factory=dict)
    groups: Groups = field(default_factory=dict)
    partial_sums: Mapping[str, PartialSum] = field(default_factory=dict)
    counted: frozenset[str] = frozenset()
    contributes: frozenset[str] = frozenset()

    @property
    def names(self) -> dict[int, str]:
        return {id(value): name for name, value in self.parameters.items()}

    def part(self, name: str, tensor: Tensor) -> Tensor | Part:
        """Return ``tensor`` (a parameter, gradient or optimizer state) with its layout, if it is a part of a whole."""
        layout = self.layouts.get(name)
        return tensor if layout is None or tuple(tensor.shape) != layout.local_shape else Part(tensor, layout)

    def tensors(self) -> dict[str, Tensor | Part]:
        """Return parameters and persistent buffers under their first name; tied weights appear once."""
        result: dict[str, Tensor | Part] = {}
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                own = self.parameters.get(name, value)
                if not isinstance(own.data, FakeTensor):
                    result[name] = self.part(name, own.detach())
        return result


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that this rank holds: those of other stages are fake tensors."""
    return {name: value for name, value in model.named_parameters() if not isinstance(value.data, FakeTensor)}


def grouped_names(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> Groups:
    """Return the optimizers' parameter groups as lists of parameter names."""
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        key: [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for key, optimizer in optimizers.items()
    }
