"""Find the exact bytes that each rank of a plan holds between two steps, parameter by parameter.

Nothing is estimated here: stages come from the recorded trace, shapes of split layers from the runtime's own split (on
a fake copy of the model), shards from its own row partition, and optimizer state from a step on such tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.process_groups import ProcessGroups
from echelon.engine.counted_state import params_shared_by_stages
from echelon.engine.parallelize import hosted_stages
from echelon.engine.replace_optimizers import replace_optimizers
from echelon.parallel.low_memory.state_placement import tensor_bytes
from echelon.parallel.zero.row_partition import RowPartition, cut_all
from echelon.plan import Plan
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_split import fake_process_group, split_first
from echelon.planner.profiling.optimizer_state import Known, Owners, owners, state_bytes

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter on one rank.

    parameters: the parameter, or this rank's shard of it
    gradients:  the gradient that stays until the next backward
    optimizer:  optimizer state
    """

    parameters: int
    gradients: int
    optimizer: int


@dataclasses.dataclass(frozen=True)
class ResidentMemory:
    """Resident memory of a rank: bytes of each parameter and of each buffer, by name."""

    parameters: dict[str, ParameterBytes]
    buffers: dict[str, int]

    def total(self, kind: str) -> int:
        return sum(getattr(held, kind) for held in self.parameters.values())


class ResidentEstimator:
    """Finds the resident memory of all ranks, for plans of one model."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._known: Known = {}
        self._successors: dict[Any, Owners] = {}
        self._part = functools.cache(self._part_of)

    def of(self, plan: Plan) -> Iterator[tuple[list[MeshGroups], ResidentMemory]]:
        """Yield the groups of ranks with equal resident memory, and that memory, for each stage and split position."""
        stepping = self._stepping(plan)
        places: dict[tuple[int, int], list[MeshGroups]] = {}
        for rank in range(plan.ranks):
            grid = MeshGroups(plan.mesh, plan.order, rank, ProcessGroups("gloo"))  # no process group is created
            places.setdefault((grid.coords["stage"], grid.coords["split"]), []).append(grid)
        for (_, split), replicas in places.items():
            size = plan.mesh.get("split", 1)
            shapes, buffers = self._part(tuple(plan.splits.items()), split, size, plan.batch_per_split_rank)
            yield from self._replicas(plan, replicas, shapes, buffers, stepping)

    def _replicas(
        self, plan: Plan, replicas: list[MeshGroups], shapes: Shapes, buffers: Mapping[str, int], stepping: Owners
    ) -> Iterator[tuple[list[MeshGroups], ResidentMemory]]:
        here = _names_here(plan, replicas[0])
        own = {name: shape for name, shape in shapes.items() if here is None or name in here}
        own_buffers = {name: size for name, size in buffers.items() if here is None or name in here}
        cuts = self._cuts(plan, replicas[0], own)
        alike: dict[Any, list[MeshGroups]] = {}
        for grid in replicas:
            parts = {name: cut.part_shape(grid.index("replicate") % plan.sharing) for name, cut in cuts.items()}
            alike.setdefault(tuple(parts.items()), []).append(grid)
        for parts, grids in alike.items():
            given = dict(self._model.named_parameters())
            of_parts = dict(parts)
            held = {
                name: self._held(plan, given[name], shape, of_parts.get(name, shape), stepping)
                for name, shape in own.items()
            }
            yield grids, ResidentMemory(held, own_buffers)

    def _cuts(self, plan: Plan, grid: MeshGroups, own: Shapes) -> dict[str, RowPartition]:
        if plan.shard is None:
            return {}
        owned, given = owners(self._optimizers), dict(self._model.named_parameters())
        chosen = {name: shape for name, shape in own.items() if plan.shard.level == 3 or id(given[name]) in owned}
        return cut_all(chosen, plan.sharing, params_shared_by_stages(plan, grid))

    def _held(
        self, plan: Plan, parameter: nn.Parameter, shape: tuple[int, ...], part: tuple[int, ...], stepping: Owners
    ) -> ParameterBytes:
        entries, size = math.prod(shape), parameter.element_size()
        trained = parameter.requires_grad
        if plan.low_memory is not None and trained:  # each gradient is freed as soon as it has been applied
            return ParameterBytes(2 * entries, 0, sum(tensor_bytes(entries)))
        here = math.prod(part) * size
        kept = here if plan.shard is not None and plan.shard.level == 3 else entries * size
        state = state_bytes(stepping, parameter, part, self._known)
        return ParameterBytes(kept, here * trained, state)

    def _stepping(self, plan: Plan) -> Owners:
        """Return the optimizers that take the steps; LARS or LAMB may replace the given ones."""
        key = (plan.lars, plan.lamb)
        if key not in self._successors:
            named = dict(self._model.named_parameters())
            given = replace_optimizers(plan, self._optimizers, named, None) if any(key) else self._optimizers
            self._successors[key] = owners(given)
        return self._successors[key]

    def _part_of(
        self, splits: tuple[tuple[str, Any], ...], rank: int, size: int, spread: bool
    ) -> tuple[Shapes, Mapping[str, int]]:
        """Return the shapes of the parameters and the bytes of the buffers of one rank along the split axis."""
        model = self._model
        if splits and size > 1:
            shadow = FakeModel(model, [])
            with fake_process_group(size) as group:
                split_first(shadow, dict(splits), group, spread, rank)
            model = shadow.model
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        return shapes, {name: value.nbytes for name, value in model.named_buffers()}


def _names_here(plan: Plan, grid: MeshGroups) -> set[str] | None:
    """Return the names of the parameters and buffers that the stages of a rank need; None means all."""
    if plan.stages is None:
        return None
    own = hosted_stages(plan.stages, grid)
    return {name for name, stages in plan.stages.holders.items() if not set(stages).isdisjoint(own)}
