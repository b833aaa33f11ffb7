"""Holdings: what of the model this rank has. Optimizers, checkpoints and norms go by it, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.distributed.tensor_layout import Layout, Part

Groups = Mapping[str, list[list[str]]]  # by optimizer, the parameters' names in each of its groups


@dataclass(frozen=True)
class Addend:
    """One of ``count`` that make up a sum. Ranks with the same index hold the same, or parts of the same."""

    index: int = 0
    count: int = 1


@dataclass
class LocalState:
    """One rank's part.

    parameters: what optimizers step on, by name: a parameter, or this rank's shard of it
    layouts:    of those that are parts of a larger whole
    cuts:       layouts of the model's own parameters, where they are split: the same, but for shards
    groups:     the optimizers' parameter groups as the user made them, parameters of other ranks included
    addends:    gradients are sums over ranks in the end: until then, which addend of how many this rank has of each
    counted:    parameters that this rank counts where every entry of the model must be counted once
    speaks:     the same, and buffers: what this rank contributes to the whole
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    layouts: dict[str, Layout] = field(default_factory=dict)
    cuts: Mapping[str, Layout] = field(default_factory=dict)
    groups: Groups = field(default_factory=dict)
    addends: Mapping[str, Addend] = field(default_factory=dict)
    counted: frozenset[str] = frozenset()
    speaks: frozenset[str] = frozenset()

    @property
    def names(self) -> dict[int, str]:
        return {id(value): name for name, value in self.parameters.items()}

    def part(self, name: str, tensor: Tensor) -> Tensor | Part:
        """``tensor`` (a parameter, its gradient, its optimizer state) with its place in the whole, if it has one."""
        layout = self.layouts.get(name)
        return tensor if layout is None or tuple(tensor.shape) != layout.local_shape else Part(tensor, layout)

    def tensors(self) -> dict[str, Tensor | Part]:
        """Parameters and persistent buffers under their first name; tied weights appear once."""
        found: dict[str, Tensor | Part] = {}
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                own = self.parameters.get(name, value)
                if not isinstance(own.data, FakeTensor):
                    found[name] = self.part(name, own.detach())
        return found


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are here: those of other stages are stand-ins without memory."""
    return {name: value for name, value in model.named_parameters() if not isinstance(value.data, FakeTensor)}


def grouped_names(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> Groups:
    """The optimizers' parameter groups, by name."""
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        key: [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for key, optimizer in optimizers.items()
    }
