"""Construction of a ``Plan`` from a model, its optimizers and a ``Strategy``; uses no process group and no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.optim.exclusion import excluded_names
from echelon.plan.axes import find_axes, requested_slice
from echelon.plan.batch_norms import batch_norm_names
from echelon.plan.plan import Bucket, Parameter, Plan, numel
from echelon.plan.segments import find_chains, find_segments
from echelon.plan.shard_groups import resolve_groups
from echelon.plan.stage_trace import StageTrace
from echelon.strategy import (
    AdaptiveLocalSgd,
    Amp,
    Dgc,
    Lamb,
    Lars,
    LocalSgd,
    Lora,
    LowMemory,
    LrScaling,
    Recompute,
    Shard,
    Strategy,
)
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Replicate, Split
from echelon.strategy.combine import refuse_conflicts

if TYPE_CHECKING:
    from echelon.strategy.annotations.slices import Slices

MEGABYTE = 2**20

UNMARKED = ModelMarks(units={}, splits={}, replicates=(), pipeline=None, default=None)


def make_plan(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    strategy: Strategy,
    ranks: int,
    ranks_per_host: int = 1,
    marks: ModelMarks | None = None,
    cluster: Slices | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Plan:
    """Make the plan for training a marked model on ``ranks`` with a strategy.

    If the model is split or staged, the plan has no buckets yet: ``complete`` adds them once the parts are known.

    model:          torch module
    optimizers:     optimizers by name
    strategy:       options of the run
    ranks:          number of ranks
    ranks_per_host: number of ranks per host, default 1
    marks:          marks on the model's modules; default None: unmarked
    cluster:        rule that groups ranks into slices
    mesh:           sizes of the axes; default None: marks and cluster decide

    >>> plan = echelon.plan.make_plan(model, {"0": optimizer}, echelon.Strategy(shard=1), ranks=4)
    """
    marks = _with_default(model, marks or UNMARKED)
    refuse_conflicts(strategy, _implied(marks))
    size = requested_slice(strategy.split, marks.stages, marks.pipeline)
    size = size or (cluster.slice_size(ranks_per_host) if cluster else None)
    mesh = mesh or find_axes(marks.stages, marks.pipeline, bool(marks.splits), size, ranks)
    order = _order(cluster, mesh, ranks, ranks_per_host)
    plan = _plan(model, strategy, marks, dict(mesh), order, ranks, ranks_per_host)
    return plan if plan.is_model_parallel else complete(plan, owned_names(model, optimizers))


def _plan(
    model: nn.Module,
    strategy: Strategy,
    marks: ModelMarks,
    mesh: dict[str, int],
    order: tuple[int, ...],
    ranks: int,
    ranks_per_host: int,
) -> Plan:
    """Return the plan without its buckets."""
    sparse = sparse_names(model)
    named = dict(model.named_parameters())
    dgc, recompute = strategy.part(Dgc), strategy.part(Recompute)
    lars, lamb = strategy.part(Lars), strategy.part(Lamb)
    alone = strategy.part(LocalSgd) or strategy.part(AdaptiveLocalSgd)
    hierarchical = dgc is not None and dgc.hierarchical
    is_split = mesh.get("split", 1) > 1
    return Plan(
        mesh=mesh,
        order=order,
        model=tuple(_parameter(name, value, name in sparse) for name, value in named.items()),
        buckets=(),
        splits=marks.splits if is_split else {},
        batch_per_split_rank=(bool(marks.replicates) or isinstance(marks.default, Replicate)) and is_split,
        pipeline=marks.pipeline,
        shard=resolve_groups(strategy.part(Shard), mesh, order, ranks_per_host),
        ranks_per_host=_uniform(ranks, ranks_per_host) if hierarchical else 1,
        communicators=strategy.reduction.communicators,
        reduce_op=strategy.reduction.op,
        comm_dtype=strategy.fp16_allreduce if isinstance(strategy.fp16_allreduce, str) else None,
        gradient_merge=strategy.gradient_merge,
        clip=strategy.clip,
        amp=strategy.part(Amp) or (Amp() if strategy.low_memory else None),
        recompute=find_segments(model, recompute.checkpoints) if recompute else (),
        recompute_chains=find_chains(model) if recompute and recompute.checkpoints == "auto" else (),
        offload=recompute is not None and recompute.offload,
        lars=lars,
        lamb=lamb,
        no_weight_decay=_without_decay(model, lars or lamb),
        dgc=dgc,
        local=alone if ranks > 1 else None,
        low_memory=strategy.part(LowMemory),
        lora=strategy.part(Lora),
        lr_scaling=strategy.part(LrScaling),
        sync_batch_norm=_shared_batch_norm(model, strategy.sync_batch_norm, ranks, alone is not None),
        bucket_mb=(strategy.reduction.first_bucket_mb, strategy.reduction.bucket_mb),
    )


def complete(
    plan: Plan,
    owned: Mapping[str, Collection[str]],
    *,
    cut: Collection[str] = (),
    partial: Collection[str] = (),
    stages: StageTrace | None = None,
) -> Plan:
    """Return the plan with its buckets.

    owned:   names of the parameters of each optimizer
    cut:     parameters of which each rank of the split axis holds a shard
    partial: full parameters whose gradients are also reduced over the split axis
    stages:  recorded stages of a pipeline; default None
    """
    depth = plan.mesh.get("stage", 1)

    def home(name: str) -> Home:
        held = stages.holders[name] if stages else (0,)
        over_split = name in partial or (plan.batch_per_split_rank and name not in cut)
        axes = ("replicate", "split") if over_split else ("replicate",)
        return tuple(sorted({stage % depth for stage in held})), axes

    buckets = tuple(_all_buckets(plan, owned, home))
    return dataclasses.replace(plan, buckets=buckets, stages=stages)


def owned_names(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, list[str]]:
    """Return the parameter names of each optimizer. Raises ``UsageError`` for a parameter outside of the model."""
    names = {id(value): name for name, value in model.named_parameters()}
    return {key: _owned_names(key, optimizer, names) for key, optimizer in optimizers.items()}


def _implied(marks: ModelMarks) -> list[str]:
    return [name for name, there in (("split", marks.splits), ("pipeline", marks.pipeline)) if there]


def _with_default(model: nn.Module, marks: ModelMarks) -> ModelMarks:
    """Return marks that split the outermost splittable modules among the unmarked ones, if the default is ``Split``."""
    if not isinstance(marks.default, Split):
        return marks
    from echelon.parallel.tensor import why_not

    kept = set(marks.splits) | set(marks.replicates)
    result = dict(marks.splits)

    def walk(name: str, module: nn.Module) -> None:
        if name in kept:
            return
        if name and why_not(module) is None:
            result[name] = marks.default  # type: ignore[assignment]
            return
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", model)
    return dataclasses.replace(marks, splits=result)


def _order(cluster: Slices | None, mesh: Mapping[str, int], ranks: int, ranks_per_host: int) -> tuple[int, ...]:
    if cluster is None or ranks == 1:  # one process runs everything
        return ()
    order = cluster.arrange(mesh.get("stage", 1) * mesh.get("split", 1), ranks, ranks_per_host)
    return () if order == tuple(range(ranks)) else order


def _uniform(ranks: int, ranks_per_host: int) -> int:
    if ranks % ranks_per_host:
        raise UsageError(
            f"Dgc(hierarchical=True) needs equally many ranks on every host; {ranks} ranks are not a multiple of the "
            f"{ranks_per_host} here"
        )
    return ranks_per_host


def _without_decay(model: nn.Module, settings: Lars | Lamb | None) -> tuple[str, ...]:
    if settings is None or not settings.exclude_from_weight_decay:
        return ()
    return tuple(excluded_names(model, settings.exclude_from_weight_decay))


def _shared_batch_norm(model: nn.Module, requested: bool | None, ranks: int, alone: bool) -> tuple[str, ...]:
    share = not alone if requested is None else requested
    return tuple(batch_norm_names(model)) if share and ranks > 1 else ()


def sparse_names(model: nn.Module) -> set[str]:
    """Return the names of parameters with sparse gradients."""
    weights = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return {name for name, value in model.named_parameters() if id(value) in weights}


def _parameter(name: str, value: nn.Parameter, sparse: bool) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        trainable=value.requires_grad,
        sparse=sparse,
    )


Home = tuple[tuple[int, ...], tuple[str, ...]]  # positions along the stage axis, and axes to reduce over


def _all_buckets(plan: Plan, owned: Mapping[str, Collection[str]], home: Callable[[str], Home]) -> Iterable[Bucket]:
    specs = {spec.name: spec for spec in plan.model}
    for key, names in owned.items():
        trained = [name for name in specs if name in names and specs[name].trainable]
        dense = [name for name in reversed(trained) if not specs[name].sparse]  # approximately the order of backward
        for (places, axes), members in _grouped(dense, home).items():
            compressed = [name for name in members if plan.dgc and numel(specs[name]) >= plan.dgc.min_size]
            plain = [name for name in members if name not in compressed]
            for order in (plain, compressed):
                for parameters in _fill(order, specs, plan.bucket_mb):
                    yield Bucket(
                        optimizer=key,
                        parameters=tuple(parameters),
                        stages=places,
                        axes=axes,
                        compressed=order is compressed,
                    )
        for name in reversed(trained):
            if specs[name].sparse:
                places, axes = home(name)
                yield Bucket(optimizer=key, parameters=(name,), stages=places, axes=axes, sparse=True)


def _grouped(names: Iterable[str], home: Callable[[str], Home]) -> dict[Home, list[str]]:
    groups: dict[Home, list[str]] = {}
    for name in names:
        groups.setdefault(home(name), []).append(name)
    return groups


def _owned_names(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    values = [value for group in optimizer.param_groups for value in group["params"]]
    outside = [tuple(value.shape) for value in values if id(value) not in names]
    if outside:
        raise UsageError(
            f"optimizer '{key}' holds {len(outside)} parameters that are not in the model (the first has shape "
            f"{outside[0]}); build it from the parameters of the model given to distribute()"
        )
    return [names[id(value)] for value in values]


def _fill(order: list[str], specs: Mapping[str, Parameter], sizes: tuple[float, float]) -> Iterable[list[str]]:
    """Cut ``order`` into buckets of one dtype and about the given sizes; the first is small, to start early.

    sizes: MB of the first bucket, and of the others
    """
    limit = sizes[0] * MEGABYTE
    bucket: list[str] = []
    filled = 0
    for name in order:
        spec = specs[name]
        if bucket and (filled >= limit or specs[bucket[-1]].dtype != spec.dtype):
            yield bucket
            bucket, filled, limit = [], 0, sizes[1] * MEGABYTE
        bucket.append(name)
        filled += numel(spec) * getattr(torch, spec.dtype).itemsize
    if bucket:
        yield bucket
