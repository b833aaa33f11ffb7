"""Replaces the user's optimizers by those that the plan requires; both share their parameter groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from echelon.optim.from_torch import lamb_from, lars_from
from echelon.parallel.data.dgc import DgcGroups, SparseMomentum
from echelon.plan import Plan


def replaced_decay(plan: Plan, given: Mapping[str, torch.optim.Optimizer]) -> list[str]:
    """Return a log line for each optimizer whose weight decay is replaced by that of the strategy."""
    name, settings = ("lars", plan.lars) if plan.lars else ("lamb", plan.lamb)
    if settings is None:
        return []
    own = {key: o.param_groups[0].get("weight_decay", 0) for key, o in given.items()}
    return [
        f"{name}: weight decay {settings.weight_decay:g}, in place of {decay:g} of the optimizer '{key}'"
        for key, decay in own.items()
        if decay not in (0, settings.weight_decay)
    ]


def replace_optimizers(
    plan: Plan, given: Mapping[str, torch.optim.Optimizer], named: Mapping[str, nn.Parameter], peers: DgcGroups | None
) -> dict[str, torch.optim.Optimizer]:
    """Return, by name, the optimizers that take the steps of the ``given`` ones.

    named: parameters or shards that this rank holds
    peers: process groups of DGC; None without DGC
    """
    return {key: _successor(plan, key, optimizer, named, peers) for key, optimizer in given.items()}


def _successor(
    plan: Plan,
    key: str,
    given: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    peers: DgcGroups | None,
) -> torch.optim.Optimizer:
    owned = {id(p) for group in given.param_groups for p in group["params"]}
    without_decay = [named[name] for name in plan.no_weight_decay if name in named and id(named[name]) in owned]
    if plan.lars is not None:
        s = plan.lars
        return lars_from(given, coeff=s.coeff, weight_decay=s.weight_decay, eps=s.eps, exclude=without_decay)
    if plan.lamb is not None:
        return lamb_from(given, weight_decay=plan.lamb.weight_decay, eps=plan.lamb.eps, exclude=without_decay)
    if plan.low_memory is not None:
        from echelon.parallel.low_memory.adam import LowMemoryAdam

        return LowMemoryAdam(given, plan.low_memory, named)
    if peers is not None:
        return SparseMomentum(given, plan, key, named, peers)
    return given
