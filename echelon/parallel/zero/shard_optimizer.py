"""Puts shards in place of parameters in a user's optimizer: same object, groups and order, with sharded state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.parallel.zero.row_partition import RowPartition

# The step of these optimizers needs whole parameters: their rows and columns, or all parameters together. (LARS and
# LAMB need only a parameter's norm, which can be summed over ranks.)
WHOLE = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name))


def refuse_whole(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise UsageError for an optimizer that cannot step each shard of a parameter by itself."""
    for key, optimizer in optimizers.items():
        kind = type(optimizer).__name__
        if isinstance(optimizer, WHOLE):
            raise UsageError(
                f"optimizer '{key}' is {kind}, whose step needs whole parameters, and sharding gives it parts; use "
                "Adam, AdamW or SGD, or train without sharding"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError(f"optimizer '{key}' is {kind}, and shards are dense; use Adam with sparse=False")


def hand_over(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    shards: Mapping[str, nn.Parameter],
    cuts: Mapping[str, RowPartition],
    rank: int,
) -> None:
    """Replace the parameters of ``optimizer`` by their shards, and shard its state."""
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = group["params"]
        for index, parameter in enumerate(params):
            shard = shards[names[parameter]]
            params[index] = shard
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[shard] = _cut_state(state, parameter, shard, cuts[names[parameter]], rank)


def _cut_state(
    state: dict[str, Any], parameter: nn.Parameter, shard: nn.Parameter, cut: RowPartition, rank: int
) -> dict[str, Any]:
    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == parameter.shape:
            value = cut.of(value, rank).clone()
        return value.to(shard.device) if value.device == parameter.device else value

    return {key: part(value) for key, value in state.items()}
