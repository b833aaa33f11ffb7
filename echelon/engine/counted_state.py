"""This rank's part of the model, and which of it the rank counts, so that every element of the model counts once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from echelon.base.mesh import AXES
from echelon.distributed.local_state import Groups, LocalState, PartialSum
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.tensor_layout import Layout
from echelon.parallel.clip import Census
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.parallel.zero import Shards


def make_local_state(
    plan: Plan,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    names: Groups,
    cuts: Mapping[str, Layout],
    shards: Shards | None,
    grid: MeshGroups,
) -> LocalState:
    """Return this rank's part of the model.

    parameters: parameters of the model on this rank
    names:      names of the parameters in the optimizers' groups
    cuts:       layouts of the split parameters
    """
    held = dict(parameters) | (shards.shards if shards else {})
    counted = {name for name in held if _counts(plan, name, grid, cuts, shards)}
    return LocalState(
        model=model,
        parameters=held,
        layouts={**cuts, **(shards.layouts if shards else {})},
        cuts=cuts,
        groups=names,
        partial_sums=_partial_sums(plan, grid),
        counted=frozenset(counted),
        contributes=frozenset(counted | _spoken_buffers(plan, model, grid)),
    )


def make_census(plan: Plan, local_state: LocalState, grid: MeshGroups, alone: bool) -> Census:
    """Return the counter of norms over the whole model.

    alone: True if this rank steps alone
    """
    is_sharded = plan.is_model_parallel or plan.shard is not None
    everyone = grid.group(*AXES)
    counted = {id(local_state.parameters[name]) for name in local_state.counted}
    return Census(
        counted, everyone if is_sharded else None, everyone if (is_sharded or plan.dgc) and not alone else None
    )


def params_shared_by_stages(plan: Plan, grid: MeshGroups) -> set[str]:
    """Return the parameters that several places along the stage axis hold."""
    holders = plan.stages.holders if plan.stages else {}
    return {name for name, stages in holders.items() if len({stage % grid.size("stage") for stage in stages}) > 1}


def _leads(plan: Plan, name: str, grid: MeshGroups) -> bool:
    """Return True if this rank's place is the first along the stage axis that holds this parameter."""
    if plan.stages is None:
        return True
    return min(stage % grid.size("stage") for stage in plan.stages.holders[name]) == grid.coords["stage"]


def _partial_sums(plan: Plan, grid: MeshGroups) -> dict[str, PartialSum]:
    """Return the addend of each gradient sum that this rank's backward computes.

    With shard levels 2 and 3 every pass is summed over replicas, so the replicate axis does not count.
    """
    summed = plan.shard is not None and plan.shard.level > 1
    result: dict[str, PartialSum] = {}
    for bucket in plan.buckets:
        if grid.coords["stage"] not in bucket.stages:
            continue
        axes = [axis for axis in bucket.axes if not (summed and axis == "replicate")]
        ranks, place = grid.size(*axes), bucket.stages.index(grid.coords["stage"])
        one = PartialSum(place * ranks + grid.index(*axes), len(bucket.stages) * ranks)
        result |= dict.fromkeys(bucket.parameters, one)
    return result


def _counts(plan: Plan, name: str, grid: MeshGroups, cuts: Mapping[str, Layout], shards: Shards | None) -> bool:
    replica = grid.coords["replicate"]
    first_or_own = replica == 0
    if shards is not None and name in shards.counts:
        first_or_own = replica < plan.sharing and shards.counts[name]
    return _leads(plan, name, grid) and first_or_own and (grid.coords["split"] == 0 or name in cuts)


def _spoken_buffers(plan: Plan, model: nn.Module, grid: MeshGroups) -> set[str]:
    if grid.coords["replicate"] or grid.coords["split"]:
        return set()
    return {name for name, _ in model.named_buffers() if plan.stages is None or _leads(plan, name, grid)}
