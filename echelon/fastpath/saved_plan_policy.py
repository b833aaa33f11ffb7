"""The fast path of a plan that was found: what it foretells holds for what it says, so that nothing is added to it but
what changes no number and no figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.distributed.world import World
from echelon.fastpath.inspect import choose_fast_path
from echelon.plan import Plan
from echelon.strategy import Fast, Strategy

if TYPE_CHECKING:
    from echelon.plan.saved_plan import SavedPlan

WITHIN = Fast(compile=False, bf16=False, channels_last=False, graphs=False, pad=False)


def with_units(
    plan: Plan,
    saved: SavedPlan,
    world: World,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> Plan:
    """With the units that the draft has compiled."""
    plan = choose_fast_path(plan, Strategy(fast=WITHIN), world, model, optimizers)
    units = tuple(name for names in saved.units for name in names) if saved.draft.compile else ()
    return dataclasses.replace(plan, fast=dataclasses.replace(plan.fast, compiled=units))
