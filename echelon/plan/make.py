"""Making a Plan from a model, its optimizers and a Strategy. Pure: no process group, no device is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from echelon.errors import UsageError
from echelon.optim.exclusion import excluded_names
from echelon.plan.plan import Bucket, Parameter, Plan
from echelon.plan.segments import find_chains, find_segments
from echelon.strategy import (
    AdaptiveLocalSgd,
    Amp,
    Dgc,
    Lamb,
    Lars,
    LocalSgd,
    LrScaling,
    Recompute,
    Reduction,
    Strategy,
)

MEGABYTE = 2**20


def make_plan(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    strategy: Strategy,
    ranks: int,
    ranks_per_host: int = 1,
) -> Plan:
    """Replicate the model on every rank and train it as the strategy says."""
    sparse = sparse_names(model)
    named = dict(model.named_parameters())
    dgc, recompute = strategy.part(Dgc), strategy.part(Recompute)
    lars, lamb = strategy.part(Lars), strategy.part(Lamb)
    alone = strategy.part(LocalSgd) or strategy.part(AdaptiveLocalSgd)
    hierarchical = dgc is not None and dgc.hierarchical
    return Plan(
        mesh={"replicate": ranks},
        model=tuple(_parameter(name, value, name in sparse) for name, value in named.items()),
        buckets=tuple(_all_buckets(named, sparse, optimizers, strategy.reduction, dgc)),
        ranks_per_host=_uniform(ranks, ranks_per_host) if hierarchical else 1,
        communicators=strategy.reduction.communicators,
        reduce_op=strategy.reduction.op,
        wire=strategy.fp16_allreduce if isinstance(strategy.fp16_allreduce, str) else None,
        gradient_merge=strategy.gradient_merge,
        clip=strategy.clip,
        amp=strategy.part(Amp),
        recompute=find_segments(model, recompute.checkpoints) if recompute else (),
        chains=find_chains(model) if recompute and recompute.checkpoints == "auto" else (),
        offload=recompute is not None and recompute.offload,
        lars=lars,
        lamb=lamb,
        undecayed=_undecayed(model, lars or lamb),
        dgc=dgc,
        local=alone if ranks > 1 else None,
        lr_scaling=strategy.part(LrScaling),
        sync_batch_norm=_shared_batch_norm(model, strategy.sync_batch_norm, ranks, alone is not None),
    )


def _uniform(ranks: int, ranks_per_host: int) -> int:
    if ranks % ranks_per_host:
        raise UsageError(
            f"Dgc(hierarchical=True) needs equally many ranks on every host; {ranks} ranks are not a multiple of the "
            f"{ranks_per_host} here"
        )
    return ranks_per_host


def _undecayed(model: nn.Module, settings: Lars | Lamb | None) -> tuple[str, ...]:
    if settings is None or not settings.exclude_from_weight_decay:
        return ()
    return tuple(excluded_names(model, settings.exclude_from_weight_decay))


def _shared_batch_norm(model: nn.Module, asked: bool | None, ranks: int, alone: bool) -> tuple[str, ...]:
    share = not alone if asked is None else asked
    return tuple(batch_norm_names(model)) if share and ranks > 1 else ()


def sparse_names(model: nn.Module) -> set[str]:
    """Parameters whose gradients arrive as sparse rows."""
    weights = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return {name for name, value in model.named_parameters() if id(value) in weights}


def batch_norm_names(model: nn.Module) -> list[str]:
    """Modules that keep statistics over the batch."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def _parameter(name: str, value: nn.Parameter, sparse: bool) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        trainable=value.requires_grad,
        sparse=sparse,
    )


def _all_buckets(
    named: Mapping[str, nn.Parameter],
    sparse: set[str],
    optimizers: Mapping[str, torch.optim.Optimizer],
    reduction: Reduction,
    dgc: Dgc | None,
) -> Iterable[Bucket]:
    names = {id(value): name for name, value in named.items()}
    for key, optimizer in optimizers.items():
        owned = _owned_names(key, optimizer, names)
        trained = [name for name in named if name in owned and named[name].requires_grad]
        dense = [name for name in reversed(trained) if name not in sparse]  # backward's order, nearly
        large = [name for name in dense if dgc is not None and named[name].numel() >= dgc.min_size]
        for parameters in _fill([name for name in dense if name not in large], named, reduction):
            yield Bucket(optimizer=key, parameters=tuple(parameters))
        for parameters in _fill(large, named, reduction):
            yield Bucket(optimizer=key, parameters=tuple(parameters), compressed=True)
        for name in reversed(trained):
            if name in sparse:
                yield Bucket(optimizer=key, parameters=(name,), sparse=True)


def _owned_names(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> set[str]:
    values = [value for group in optimizer.param_groups for value in group["params"]]
    strangers = [tuple(value.shape) for value in values if id(value) not in names]
    if strangers:
        raise UsageError(
            f"optimizer '{key}' holds {len(strangers)} parameters that are not in the model (the first has shape "
            f"{strangers[0]}); build it from the parameters of the model given to distribute()"
        )
    return {names[id(value)] for value in values}


def _fill(order: list[str], named: Mapping[str, nn.Parameter], reduction: Reduction) -> Iterable[list[str]]:
    """Cut ``order`` into buckets of one dtype and about the asked size; the first is small, to start early."""
    limit = reduction.first_bucket_mb * MEGABYTE
    bucket: list[str] = []
    filled = 0
    for name in order:
        value = named[name]
        if bucket and (filled >= limit or named[bucket[-1]].dtype != value.dtype):
            yield bucket
            bucket, filled, limit = [], 0, reduction.bucket_mb * MEGABYTE
        bucket.append(name)
        filled += value.numel() * value.element_size()
    if bucket:
        yield bucket
