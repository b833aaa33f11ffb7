"""Construction of the job description for servers from a model, its optimizer and the strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.optim.layerwise import LayerwiseOptimizer
from echelon.parameter_server.protocol.dense_placement import DenseParameter, place
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.parameter_server.protocol.job_spec import DenseBlock, DenseRule, JobSpec, PersistenceSettings, TableSpec
from echelon.parameter_server.server.dense import KINDS, LAYERWISE
from echelon.strategy import ParameterServer


def table_seed(seed: int, name: str) -> int:
    """Return the seed of a table, derived from the job's seed and the table's name, so that tables of a job differ."""
    return stable_hash(f"{seed}/{name}")


def make_job(
    settings: ParameterServer,
    tables: Sequence[TableSpec],
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    *,
    session: str,
    servers: int,
    trainers: int,
    seed: int,
) -> JobSpec:
    """Return the job description.

    optimizer:  optimizer of the dense parameters that servers hold; None if they hold none
    """
    scored = next((table.name for table in tables if table.score is not None), None)
    if settings.mode == "geo" and scored is not None:
        raise UsageError(
            f"table '{scored}' has a score, and ps='geo' sends changes of rows without their shows and clicks; use "
            "another mode, or expire_passes"
        )
    rule = DenseRule() if optimizer is None else dense_rule(optimizer, parameters)
    blocks: tuple[DenseBlock, ...] = ()
    if optimizer is not None:
        blocks = place(
            _pieces(optimizer, parameters, whole=rule.kind in LAYERWISE),
            servers,
            settings.split_method,
            slice_up=settings.slice_var_up,
            min_block=settings.min_block_size,
        )
    assert settings.mode != "hybrid"
    assert settings.mode != "collective"
    return JobSpec(
        session=session,
        mode=settings.mode,
        trainers=trainers,
        servers=servers,
        seed=seed,
        tables=tuple(tables),
        blocks=blocks,
        dense=rule,
        staleness=settings.staleness,
        compensate=settings.compensate,
        patience=settings.patience,
        keeping=PersistenceSettings(
            journal=settings.journal, replica=settings.replica, snapshot_every=settings.snapshot_every,
            journal_mb=settings.journal_mb
        ),
        device=settings.server_device,
    )  # fmt: skip


def dense_rule(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> DenseRule:
    """Return the name and settings of the optimizer, from which servers build their own."""
    kind = type(optimizer).__name__
    if kind not in KINDS:
        raise UsageError(
            f"servers do not know the optimizer {kind}; they know {', '.join(KINDS)}. Use one of them, or keep dense "
            "parameters with the workers: ParameterServer(dense='allreduce')"
        )
    groups = group_settings(optimizer)
    if isinstance(optimizer, LayerwiseOptimizer):
        for settings, group in zip(groups, optimizer.param_groups, strict=True):
            left_out = {id(p) for p in group["params"] if optimizer.excludes(p)}
            settings["exclude"] = [name for name, p in parameters.items() if id(p) in left_out]
    return DenseRule(kind=kind, groups=tuple(groups))  # type: ignore[arg-type]


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the current settings of the parameter groups as JSON values."""
    return [_plain({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in settings.items() if not callable(v)}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def _pieces(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], whole: bool
) -> list[DenseParameter]:
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [
        DenseParameter(name, tuple(parameter.shape), groups[id(parameter)], whole)
        for name, parameter in parameters.items()
        if id(parameter) in groups and parameter.requires_grad
    ]
