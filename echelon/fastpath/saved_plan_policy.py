"""Chooses the fast path of a saved plan.

Its predictions are valid for the plan as stored, so only options that change neither numerics nor predicted time are
added.
"""

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
    """Return the plan with its fast path, in which the units that the saved draft compiles are compiled."""
    plan = choose_fast_path(plan, Strategy(fast=WITHIN), world, model, optimizers)
    units = tuple(name for names in saved.units for name in names) if saved.draft.compile else ()
    return dataclasses.replace(plan, fast=dataclasses.replace(plan.fast, compiled=units))
