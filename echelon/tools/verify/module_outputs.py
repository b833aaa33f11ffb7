"""What each module puts out in the first forward, as sums that add up over samples, whoever computed them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from echelon.parallel.tensor.sharded_activation import ShardedActivation

#: Of one module: how many numbers came out, their sum, and the sum of their squares.
Sums = tuple[float, float, float]


class ModuleOutputSums:
    """Listens to a model's modules. Names are in the order in which modules are done: a layer before what it is in."""

    def __init__(self, model: nn.Module, speaks: bool = True) -> None:
        """speaks: whether what this rank computes is computed by no other; parts of split layers always count"""
        self._model, self._speaks = model, speaks
        self._sums: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        hooks = [module.register_forward_hook(self._hook(name)) for name, module in self._model.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def found(self, rounds: int = 1) -> dict[str, Sums]:
        """By module. rounds: how often it has seen the same batches"""
        kept = {name: (sums / rounds).tolist() for name, sums in self._sums.items()}
        return {name: (count, total, squares) for name, (count, total, squares) in kept.items()}

    def _hook(self, name: str) -> Any:
        def done(module: nn.Module, args: Any, output: Any) -> None:
            leaves = tree_leaves(output, is_leaf=lambda value: isinstance(value, ShardedActivation))
            own = [part for leaf in leaves if (part := self._part(leaf)) is not None]
            if own:
                self._add(name, own)

        return done

    def _part(self, leaf: Any) -> Tensor | None:
        """What this rank has to say of it."""
        if isinstance(leaf, ShardedActivation):
            return leaf.local
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):  # another stage computes it
            return None
        return leaf if self._speaks and leaf.is_floating_point() else None

    @torch.no_grad()
    def _add(self, name: str, leaves: Sequence[Tensor]) -> None:
        sums = torch.zeros(3, dtype=torch.double, device=leaves[0].device)
        for leaf in leaves:
            values = leaf.detach().double()
            sums += torch.stack([values.new_tensor(float(leaf.numel())), values.sum(), values.square().sum()])
        before = self._sums.get(name)
        self._sums[name] = sums if before is None else before.to(sums.device) + sums


def added_up(found: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Sums]:
    """Over the ranks that computed different samples, or different modules."""
    total: dict[str, Sums] = {}
    for one in found:
        for name, (count, linear, squares) in one.items():
            before = total.get(name, (0.0, 0.0, 0.0))
            total[name] = (before[0] + count, before[1] + linear, before[2] + squares)
    return total


def output_difference(mine: Sequence[float], reference: Sequence[float]) -> float | None:
    """Relative, from the two sums; None where they stand for different numbers of values, and say nothing."""
    count, linear, squares = reference
    if mine[0] != count or not count:
        return None
    if not squares:
        return 0.0 if not mine[2] else float("inf")
    by_norm = abs(mine[2] - squares) / squares
    by_mean = abs(mine[1] - linear) / math.sqrt(count * squares)
    return max(by_norm, by_mean)
