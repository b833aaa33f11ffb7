"""Rejects optimizers, of any library, whose step needs more than the parts of parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.optim.step_reach import StepReach, find_reach
from echelon.plan import Plan

Optimizers = Mapping[str, torch.optim.Optimizer]

_NEEDS = {StepReach.PARAMETER: "whole parameters", StepReach.ALL: "all parameters together"}
_OURS = {"lamb": "Strategy(lamb=True)", "lars": "Strategy(lars=True)"}


def check_reach(plan: Plan, optimizers: Optimizers, model: nn.Module, cut: Collection[str]) -> list[str]:
    """Raise UsageError for an optimizer that cannot step this rank's parts; return warnings on undecidable ones.

    cut: names of parameters of which this rank holds only a part
    """
    sharded = plan.shard is not None and plan.mesh["replicate"] > 1
    if not (sharded or plan.is_model_parallel):
        return []
    parted = {id(value) for name, value in model.named_parameters() if name in cut}
    known: dict[Any, StepReach | str] = {}
    lines: dict[str, None] = {}
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            found = _reach(optimizer, group, known)
            in_parts = sharded or any(id(parameter) in parted for parameter in group["params"])
            if isinstance(found, str):
                lines[_doubt(key, optimizer, found)] = None
            elif found is StepReach.ALL or (found is StepReach.PARAMETER and in_parts):
                raise UsageError(_refusal(key, optimizer, found, plan, sharded, in_parts))
    return list(lines)


def _reach(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], known: dict[Any, StepReach | str]
) -> StepReach | str:
    """Return the reach of a group's step, cached for groups that differ in their learning rate only."""
    settings = sorted((name, repr(value)) for name, value in group.items() if name not in ("params", "lr"))
    key = id(optimizer), tuple(each for each in settings if each[0] != "initial_lr")
    if key not in known:
        known[key] = find_reach(optimizer, group)
    return known[key]


def _refusal(
    key: str, optimizer: torch.optim.Optimizer, reach: StepReach, plan: Plan, sharded: bool, in_parts: bool
) -> str:
    kind = type(optimizer).__name__
    ours = next((f" (with {ours} for {name.upper()})" for name, ours in _OURS.items() if name in kind.lower()), "")
    use = f"use Adam, AdamW or SGD{ours}"
    needs = f"optimizer '{key}' is {kind}, whose step needs {_NEEDS[reach]}"
    if sharded:
        return f"{needs}, and sharding gives it parts; {use}, or train without sharding"
    if in_parts or plan.mesh.get("stage", 1) == 1:
        return f"{needs}, and split() gives it parts; {use}, or train without split()"
    return f"{needs}, and a pipeline gives it those of its own stages; {use}, or train without stages"


def _doubt(key: str, optimizer: torch.optim.Optimizer, why: str) -> str:
    return (
        f"optimizer '{key}' is {type(optimizer).__name__}, whose step may need whole parameters ({why}); ranks hold "
        "parts here, and the result matches one process only if each entry is updated by itself, as in Adam"
    )
