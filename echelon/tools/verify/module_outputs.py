"""Checksums of each module's outputs in the first forward, as sums that can be added over samples and ranks."""

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

#: Checksums of one module's outputs: number of elements, sum, and sum of squares.
Sums = tuple[float, float, float]


class ModuleOutputSums:
    """Sums the outputs of a model's modules by forward hooks.

    Names are in the order in which forwards end: a layer comes before the module that contains it.
    """

    def __init__(self, model: nn.Module, contributes: bool = True) -> None:
        """speaks: True if no other rank computes the same outputs; shards of split layers count in any case"""
        self._model, self._contributes = model, contributes
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
        """Return the checksums by module name.

        rounds: number of times that the model has seen the same batches
        """
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
        """Return the part of an output that this rank counts; None if it counts nothing."""
        if isinstance(leaf, ShardedActivation):
            return leaf.local
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):  # another stage computes it
            return None
        return leaf if self._contributes and leaf.is_floating_point() else None

    @torch.no_grad()
    def _add(self, name: str, leaves: Sequence[Tensor]) -> None:
        sums = torch.zeros(3, dtype=torch.double, device=leaves[0].device)
        for leaf in leaves:
            values = leaf.detach().double()
            sums += torch.stack([values.new_tensor(float(leaf.numel())), values.sum(), values.square().sum()])
        before = self._sums.get(name)
        self._sums[name] = sums if before is None else before.to(sums.device) + sums


def added_up(found: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Sums]:
    """Add the checksums of ranks that computed different samples or different modules."""
    total: dict[str, Sums] = {}
    for one in found:
        for name, (count, linear, squares) in one.items():
            before = total.get(name, (0.0, 0.0, 0.0))
            total[name] = (before[0] + count, before[1] + linear, before[2] + squares)
    return total


def output_difference(measured: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the relative difference from two checksums; None if they cover different numbers of elements."""
    count, linear, squares = reference
    if measured[0] != count or not count:
        return None
    if not squares:
        return 0.0 if not measured[2] else float("inf")
    by_norm = abs(measured[2] - squares) / squares
    by_mean = abs(measured[1] - linear) / math.sqrt(count * squares)
    return max(by_norm, by_mean)
