"""``parallelize()``: turns the whole model on every rank into the part of this rank, and creates its trainers.

The order matters and is defined here: trace the forward pass of the whole model, drop other stages, split layers,
synchronize batch norm, recompute activations, make the weights of a deferred model, shard, then replace optimizers and
create gradient reducers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.distributed.collectives import gather_json
from echelon.distributed.local_state import LocalState, grouped_names, local_parameters
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.tensor_layout import Layout
from echelon.distributed.world import World
from echelon.engine.collective_calls import check_same_plan
from echelon.engine.consistency import ConsistencyChecker
from echelon.engine.counted_state import make_census, make_local_state, params_shared_by_stages
from echelon.engine.replace_optimizers import replace_optimizers
from echelon.nn.moe import MoE
from echelon.optim.grad_scaler import LossScaler
from echelon.parallel.activation_checkpoint import apply_recompute
from echelon.parallel.clip import Census
from echelon.parallel.data.dgc import make_dgc_groups
from echelon.parallel.data.gradients import GradientReducer, Gradients, PartialGradientSum
from echelon.parallel.data.host_sums import MOST_RANKS, HostSums
from echelon.parallel.data.local_sgd import LocalSgdAverager
from echelon.parallel.data.reducer import Carriers, Reducer
from echelon.parallel.data.sync_batch_norm import synchronize
from echelon.parallel.objective import Objective
from echelon.parallel.optimizer_check import check_reach
from echelon.parallel.param_norms import add_up_norms
from echelon.parallel.partial_model_guard import guard_parts
from echelon.parallel.pipeline.tied_weights import TiedWeights
from echelon.plan import Plan
from echelon.plan.build import complete, owned_names
from echelon.plan.segments import Segments
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import within

if TYPE_CHECKING:  # a run imports only the modules that its plan needs
    from echelon.engine.planned_run import PlannedRun
    from echelon.parallel.pipeline.pipeline_runner import MicroBatchRunner, PipelineRunner
    from echelon.parallel.zero import Shards
    from echelon.plan.stage_trace import StageTrace

Optimizers = Mapping[str, torch.optim.Optimizer]


@dataclass(frozen=True)
class SplitResult:
    """The layouts of split parameters, and the names of whole parameters with partial gradients."""

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    partial: Collection[str] = ()


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of a model, with the objects that train it."""

    plan: Plan
    local_state: LocalState
    optimizers: dict[str, torch.optim.Optimizer]
    gradients: Gradients
    scaler: LossScaler
    census: Census
    local: LocalSgdAverager | None
    staged: PipelineRunner | MicroBatchRunner | None
    shards: Shards | None
    group: dist.ProcessGroup | None  # ranks that share the loss of a step; None if this rank steps alone
    remarks: list[str] = field(default_factory=list)  # warnings for the user
    cut: Collection[str] = ()  # split parameters of all stages


def parallelize(planned: PlannedRun, batch: Any) -> ParallelModel:
    """Split, stage and shard the model as the plan says.

    batch: batch to trace a pipeline's forward pass with
    """
    run, grid, plan, model, given = planned.run, planned.grid, planned.plan, planned.run.model, planned.run.optimizers
    names, owned = grouped_names(model, given), owned_names(model, given)
    stages = _record(plan, planned.marks, planned.objective, model, batch)
    _drop_remote_stages(stages, model, given, grid)
    applied = _split(plan, model, stages, grid)
    remarks = check_reach(plan, given, model, applied.layouts)
    _cut_state(model, given, applied)
    plan, cut = _completed(plan, run.world, owned, applied, stages)
    _change_modules(run.world, run.checker, plan, model, grid)
    parameters = local_parameters(model)
    carriers = _carriers(plan, grid)
    shards = _fill_and_shard(planned, plan, parameters, applied)
    local_state = make_local_state(plan, model, parameters, names, applied.layouts, shards, grid)
    peers = make_dgc_groups(plan, run.world, run.checker.groups) if plan.dgc else None
    optimizers = replace_optimizers(plan, given, local_state.parameters, peers)
    _add_up_norms(optimizers, local_state, applied, shards, grid)
    scaler = LossScaler(plan.amp)
    local: LocalSgdAverager | None = None
    if plan.local:
        first, sync = carriers[("replicate",)][0], lambda: run.checker.answer_sync(planned.batches)
        local = LocalSgdAverager(plan, model, optimizers, scaler, first, sync)
    census = make_census(plan, local_state, grid, alone=local is not None)
    group = grid.group(*plan.data_axes, *(["stage"] if plan.stages else [])) if local is None else None
    within = peers.within if peers else None
    carriers = {} if local is not None else carriers
    has_tables = run.backend.session is not None
    reducers = _reducers(plan, optimizers, parameters, shards, carriers, grid, within, run.world, has_tables)
    sums = _gradient_sums(plan, local_state, shards, grid)
    gradients = Gradients(plan, parameters, local_state.parameters, optimizers, reducers, scaler, census, sums, group)
    staged = _staged(run.world, plan, model, planned.objective, grid)
    guard_parts(plan, model)
    return ParallelModel(
        plan, local_state, optimizers, gradients, scaler, census, local, staged, shards, group, remarks, cut
    )


def _completed(
    plan: Plan,
    world: World,
    owned: Mapping[str, Collection[str]],
    applied: SplitResult,
    stages: StageTrace | None,
) -> tuple[Plan, Collection[str]]:
    """Return the plan with what splitting and tracing have found on all ranks, and the split parameters of all."""
    if not plan.is_model_parallel:
        return plan, ()
    assert world.control is not None
    known = gather_json([sorted(applied.layouts), sorted(applied.partial)], world.control)
    cut, partial = ({name for one in known for name in one[i]} for i in (0, 1))
    plan = complete(plan, owned, cut=cut, partial=partial, stages=stages)
    check_same_plan(plan, world.control)
    return plan, cut


def _fill_and_shard(
    planned: PlannedRun, plan: Plan, parameters: Mapping[str, nn.Parameter], applied: SplitResult
) -> Shards | None:
    """Make this rank's part of the weights of a deferred model, and shard the parameters."""
    run, initial = planned.run, planned.run.initial
    if plan.shard is None or plan.shard.level < 3:  # shards of levels 1 and 2 are views of whole parameters
        initial.fill(applied.layouts)
    shards = _shard(run.world, plan, run.model, parameters, applied, run.optimizers, planned.grid)
    if shards is not None and initial:
        initial.fill_shards(shards.shards, shards.layouts)
        shards.refresh()
    return shards


def _reducers(
    plan: Plan,
    optimizers: Optimizers,
    parameters: Mapping[str, nn.Parameter],
    shards: Shards | None,
    carriers: Carriers,
    grid: MeshGroups,
    within: dist.ProcessGroup | None,
    world: World,
    has_tables: bool,
) -> dict[str, GradientReducer]:
    """Return the reducers of each optimizer's gradients; none if there is nothing to reduce.

    within: ranks of this host, for hierarchical DGC
    """
    if shards is not None:
        return {key: shards.reducer(key) for key in optimizers}
    if plan.low_memory is not None:
        return _updating(plan, optimizers, carriers)
    if not any(carriers.values()):
        return {}
    hosts = _host_sums(plan, carriers, grid, world) if has_tables else {}
    return {key: Reducer(plan, key, parameters, carriers, grid.coords["stage"], within, hosts) for key in optimizers}


def _host_sums(plan: Plan, carriers: Carriers, grid: MeshGroups, world: World) -> dict[tuple[str, ...], HostSums]:
    """Return sums in memory that ranks share, by axes, for gradients on CPUs whose replicas are on one host."""
    if world.device.type != "cpu" or plan.comm_dtype is not None:
        return {}
    memories = {axes: grid.shared_memory(world.timeout, *axes) for axes in carriers if grid.size(*axes) <= MOST_RANKS}
    return {axes: HostSums(memory) for axes, memory in memories.items() if memory is not None}


def _gradient_sums(
    plan: Plan, local_state: LocalState, shards: Shards | None, grid: MeshGroups
) -> list[PartialGradientSum]:
    """Return the sums over ranks that the reducers do not make."""
    sums: list[PartialGradientSum] = [TiedWeights(plan, grid, local_state.parameters)] if plan.stages else []
    if shards is not None and grid.size("split") > 1:
        from echelon.parallel.zero.split_sums import SplitSums

        sums.append(SplitSums(plan, shards, grid))
    return sums


def _add_up_norms(
    optimizers: Optimizers, local_state: LocalState, applied: SplitResult, shards: Shards | None, grid: MeshGroups
) -> None:
    sharded, sharing = (set(shards.layouts), shards.exchange.sharing) if shards else (set(), None)
    add_up_norms(optimizers, local_state, set(applied.layouts), sharded, grid, sharing)


def _record(plan: Plan, marks: ModelMarks, objective: Objective, model: nn.Module, batch: Any) -> StageTrace | None:
    if plan.mesh.get("stage", 1) == 1:
        return None
    from echelon.parallel.pipeline.pipeline_runner import micro_batches
    from echelon.plan.called_modules import refuse_scripted
    from echelon.plan.partition import balance_stages
    from echelon.plan.stage_trace import record

    assert plan.pipeline is not None
    refuse_scripted(model)
    sample = micro_batches(batch, plan.pipeline.micro_batches)[0].batch
    units = marks.units or (plan.stages.units if plan.stages else {})
    if not units:
        count = plan.pipeline.stages or plan.mesh["stage"]
        units = balance_stages(model, count, objective, sample, plan.pipeline.weights)
    return record(objective, model, sample, units)


def _split(plan: Plan, model: nn.Module, stages: StageTrace | None, grid: MeshGroups) -> SplitResult:
    if not plan.splits:
        return SplitResult()
    from echelon.parallel.tensor import SplitAxis, apply_split

    group = grid.group("split")
    assert group is not None
    axis = SplitAxis(
        group, dist.get_rank(group), grid.size("split"), plan.batch_per_split_rank
    )  # torch sorts a group's ranks
    here = _here(model, stages, grid)
    applied = apply_split(model, {name: mark for name, mark in plan.splits.items() if here(name)}, axis)
    return SplitResult(applied.layouts, applied.partial)


def _cut_state(model: nn.Module, given: Optimizers, applied: SplitResult) -> None:
    """Cut existing optimizer state to the parts of the split parameters that this rank keeps."""
    layouts: dict[torch.Tensor, Layout] = {
        p: applied.layouts[name] for name, p in model.named_parameters() if name in applied.layouts
    }
    for optimizer in given.values():
        for parameter, state in optimizer.state.items():
            for field_name, value in state.items():
                layout = layouts.get(parameter)
                if layout and isinstance(value, torch.Tensor) and tuple(value.shape) == layout.shape:
                    state[field_name] = layout.take(value)


def _here(model: nn.Module, stages: StageTrace | None, grid: MeshGroups) -> Callable[[str], bool]:
    """Return a function that returns True if a module runs on this rank.

    A module of another rank must not communicate, because here it only computes shapes.
    """
    if stages is None:
        return lambda name: True
    from echelon.parallel.pipeline.placeholder_pool import holds

    hosted = hosted_stages(stages, grid)
    foreign = [unit for unit, stage in stages.units.items() if stage not in hosted]

    def here(name: str) -> bool:
        inside = any(within(name, unit) for unit in foreign)
        return not inside and holds(model.get_submodule(name))

    return here


def _drop_remote_stages(stages: StageTrace | None, model: nn.Module, given: Optimizers, grid: MeshGroups) -> None:
    """Remove the weights of other ranks' stages from the model and from the optimizers."""
    if stages is None:
        return
    from echelon.parallel.pipeline.placeholder_pool import keep_only

    foreign = set(map(id, model.parameters()))
    keep_only(model, stages, hosted_stages(stages, grid))
    foreign -= set(map(id, local_parameters(model).values()))
    for optimizer in given.values():
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in foreign]
        for parameter in [p for p in optimizer.state if id(p) in foreign]:
            del optimizer.state[parameter]


def hosted_stages(stages: StageTrace, grid: MeshGroups) -> list[int]:
    """Return the stages that run on this rank."""
    return list(range(grid.coords["stage"], 1 + max(stages.units.values()), grid.size("stage")))


def _change_modules(world: World, checker: ConsistencyChecker, plan: Plan, model: nn.Module, grid: MeshGroups) -> None:
    here = _here(model, plan.stages, grid)
    _count_experts_together(plan, model, grid, here)
    shared = grid.new_group(*plan.data_axes)
    if plan.sync_batch_norm and shared is not None:
        checker.remarks.extend(_norms_between_stages(plan))
        synchronize(model, filter(here, plan.sync_batch_norm), shared, checker.check_norm, checker.remarks.append)
    if plan.recompute or plan.recompute_chains:
        together = grid.control("replicate", "split") if plan.is_model_parallel else world.control
        segments, chains = local_segments(plan, grid)
        apply_recompute(model, segments, chains, offload=plan.offload, group=together)


def _norms_between_stages(plan: Plan) -> Iterator[str]:
    """Yield a warning for each module that calls batch norm outside the stages within it: no rank runs it whole."""
    units = plan.stages.units if plan.stages else {}
    for name in plan.sync_batch_norm:
        if any(unit != name and within(unit, name) for unit in units):
            where = f"'{name}'" if name else "the model"
            yield (
                f"batch norm: forward of {where} calls F.batch_norm outside of any stage; "
                "its statistics stay those of each replica: move the call into a module with a stage"
            )


def local_segments(plan: Plan, grid: MeshGroups) -> tuple[Segments, tuple[str, ...]]:
    """Return the recompute segments and chains of this rank.

    In a pipeline these are the ones inside this rank's units. If any segment reaches beyond a unit, each unit becomes
    one segment.
    """
    if plan.stages is None:
        return plan.recompute, plan.recompute_chains
    hosted = hosted_stages(plan.stages, grid)
    units = [unit for unit, stage in plan.stages.units.items() if stage in hosted]

    everywhere = list(plan.stages.units)

    def lies_in(units: list[str], name: str) -> bool:
        return any(within(name, unit) for unit in units)

    spans = [names[0] if len(names) == 1 else names[0].rpartition(".")[0] for names in plan.recompute]
    if not all(lies_in(everywhere, name) for name in [*spans, *plan.recompute_chains]):
        return tuple((unit,) for unit in units), ()
    segments = tuple(names for names, span in zip(plan.recompute, spans, strict=True) if lies_in(units, span))
    return segments, tuple(name for name in plan.recompute_chains if lies_in(units, name))


def _count_experts_together(plan: Plan, model: nn.Module, grid: MeshGroups, here: Callable[[str], bool]) -> None:
    """Compute the capacity of experts from the tokens of the global batch, over all ranks that route them."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]
    if not layers or not plan.ranks > 1:
        return
    from echelon.parallel.expert.split_moe import SplitMoE, count_together

    routing, sharing = grid.group("replicate", "split"), grid.group(*plan.data_axes)
    for name, layer in layers:
        everyone = routing if isinstance(layer, SplitMoE) else sharing
        if here(name) and everyone is not None:
            count_together(layer, everyone)


def _carriers(plan: Plan, grid: MeshGroups) -> dict[tuple[str, ...], list[dist.ProcessGroup]]:
    """Return the process groups for gradient buckets, by mesh axes."""
    axes = sorted({bucket.axes for bucket in plan.buckets} | {("replicate",)})
    made = {along: [grid.new_group(*along) for _ in range(plan.communicators)] for along in axes}
    return {along: [group for group in groups if group is not None] for along, groups in made.items()}


def _shard(
    world: World,
    plan: Plan,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    applied: SplitResult,
    given: Optimizers,
    grid: MeshGroups,
) -> Shards | None:
    if plan.shard is None:
        return None
    from echelon.parallel.zero import Shards

    here = [b for b in plan.buckets if grid.coords["stage"] in b.stages]
    buckets = {key: [b.parameters for b in here if b.optimizer == key] for key in given}
    size, is_grouped = plan.sharing, plan.sharing < grid.size("replicate")
    sharing = grid.inside("replicate", size) if is_grouped else grid.group("replicate")
    return Shards(
        model,
        parameters,
        {name: applied.layouts.get(name) or Layout(tuple(p.shape)) for name, p in parameters.items()},
        given,
        sharing,
        buckets,
        plan.shard.level,
        plan.shard.offload,
        world.device,
        gathering=grid.inside("replicate", size) if world.backend == "nccl" else None,
        across=grid.across("replicate", size),
        everyone=grid.group("replicate"),
        shared=params_shared_by_stages(plan, grid),
    )


def _updating(plan: Plan, optimizers: Optimizers, carriers: Carriers) -> dict[str, GradientReducer]:
    """Return reducers that sum gradients over replicas and update the weights during backward."""
    from echelon.parallel.low_memory.backward_updates import updates_in_backward

    carrier = next(iter(carriers[("replicate",)]), None)
    return {key: updates_in_backward(plan, key, optimizer, carrier) for key, optimizer in optimizers.items()}


def _staged(
    world: World, plan: Plan, model: nn.Module, objective: Objective, grid: MeshGroups
) -> PipelineRunner | MicroBatchRunner | None:
    if plan.pipeline is None:
        return None
    from echelon.parallel.pipeline.pipeline_runner import MicroBatchRunner, PipelineRunner

    if plan.stages is None:
        return MicroBatchRunner(objective, plan.pipeline.micro_batches)
    return PipelineRunner(plan, model, objective, grid, hosted_stages(plan.stages, grid), world)
