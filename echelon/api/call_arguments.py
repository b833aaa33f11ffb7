"""Checks the arguments of ``distribute()`` and assigns positional ones by type; a wrong type raises ``UsageError``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon.base.errors import UsageError
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.data import Loader
from echelon.engine.elastic import Elastic
from echelon.engine.lr_schedules import PerEpoch
from echelon.engine.on_nonfinite import OnNonfinite
from echelon.observability.metrics import Log
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan
from echelon.strategy import Strategy
from echelon.strategy.annotations.slices import Slices

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]

#: Types that ``distribute()`` takes by keyword only, or not at all, and the remedy that the error names.
_BY_NAME: tuple[tuple[tuple[type, ...], str], ...] = (
    ((torch.optim.lr_scheduler.LRScheduler, PerEpoch), "give it by name: scheduler=..."),
    ((DataLoader, Dataset, Loader), "leave it out, and ask the engine for its loader: engine.loader(...)"),
    ((Checkpoint,), "give it by name: checkpoint=..."),
    ((Log,), "give it by name: log=..."),
    ((Plan, SavedPlan), "give it by name: plan=..."),
    ((Slices,), "give it by name: cluster=..."),
    ((Elastic,), "give it by name: elastic=..."),
    ((OnNonfinite,), "give it by name: on_nonfinite=..."),
    ((torch.Tensor,), "give a batch by name: sample=..."),
    ((str, os.PathLike), "give a path by name: checkpoint=... or plan=..."),
)


def sort_given(given: Sequence[Any], **named: Any) -> tuple[Any, Any, Any]:
    """Return optimizer, loss and strategy; the positional arguments in ``given`` may come in any order."""
    for value in given:
        if value is None:
            continue
        name = _name_of(value)
        if named[name] is not None:
            several = "several go into a list: optimizer=[a, b]" if name == "optimizer" else "give one"
            first, second = _kind(named[name]), _kind(value)
            raise UsageError(f"distribute() was given two values for {name}=, {first} and {second}; {several}")
        named[name] = value
    return named["optimizer"], named["loss"], named["strategy"]


def _name_of(value: Any) -> str:
    if isinstance(value, Strategy):
        return "strategy"
    if _are_optimizers(value):
        return "optimizer"
    unnamed = f"distribute() was given {_kind(value)} without a name"
    for kinds, remedy in _BY_NAME:
        if isinstance(value, kinds):
            raise UsageError(f"{unnamed}; {remedy}")
    if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
        raise UsageError(
            f"{unnamed}, and it has parameters; if it is the loss, write loss=..., and if it is a second model, put "
            "both into one nn.ModuleDict"
        )
    if isinstance(value, type):
        raise UsageError(f"{unnamed}; {_make_one(value)}")
    if callable(value):
        return "loss"
    raise UsageError(f"{unnamed}; without names it takes the model, an optimizer, a loss and a Strategy")


def check_types(
    model: Any, optimizer: Any, loss: Any, strategy: Any, plan: Any, cluster: Any, elastic: Any, log: Any
) -> None:
    """Raise ``UsageError`` if an argument has a wrong type."""
    if not isinstance(model, nn.Module):
        several = "put several into an nn.ModuleDict" if isinstance(model, list | tuple | dict) else "pass the model"
        remedy = _make_one(model) if isinstance(model, type) else several
        raise UsageError(f"distribute() takes one torch.nn.Module, got {_kind(model)}; {remedy}")
    if optimizer is None:
        raise UsageError("distribute() needs an optimizer; give optimizer=torch.optim.AdamW(model.parameters())")
    if not _are_optimizers(optimizer):
        wrong = _not_optimizer(optimizer)
        remedy = f"; {_make_one(wrong)}" if isinstance(wrong, type) else ""
        raise UsageError(f"optimizer= takes torch optimizers, got {_kind(wrong)}{remedy}")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        remedy = _make_one(loss) if isinstance(loss, type) else "pass one, such as torch.nn.functional.cross_entropy"
        raise UsageError(f"loss= takes a function of output and target, got {_kind(loss)}; {remedy}")
    _check_kind("strategy", strategy, (Strategy,), _of_strategy(strategy))
    _check_kind("plan", plan, (Plan, SavedPlan, str, Path), "'plan.json', as 'echelon plan --save' wrote it")
    _check_kind("cluster", cluster, (Slices,), "echelon.cluster(average=2)")
    _check_kind("elastic", elastic, (Elastic,), "echelon.Elastic(...)")
    of_log = "dir=..." if isinstance(log, str | Path) else "console=False" if log is False else "every=10"
    _check_kind("log", log, (Log,), f"echelon.Log({of_log})")


def _check_kind(name: str, value: Any, kinds: tuple[type, ...], remedy: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise UsageError(f"{name}= does not take {_kind(value)}; write {name}={remedy}")


def _of_strategy(given: Any) -> str:
    """Return the remedy for a name, a dict or a path that was passed as strategy."""
    if isinstance(given, Mapping):
        return "Strategy.from_dict(...)"
    if isinstance(given, str | Path) and Path(given).suffix in (".yaml", ".yml", ".json"):
        return f"Strategy.load('{given}')"
    return "Strategy(...) with the options that you want, such as Strategy(shard=3)"


def as_checkpoint(given: Any) -> Checkpoint | None:
    """Return the checkpoint settings; a path becomes ``Checkpoint(dir=path)``."""
    if isinstance(given, str | os.PathLike):
        return Checkpoint(dir=os.fspath(given))
    _check_kind("checkpoint", given, (Checkpoint,), "Checkpoint(dir=...), or the directory's path")
    return given  # type: ignore[no-any-return]


def name_optimizers(given: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name: ``main`` for a single one, else the key or the index."""
    if isinstance(given, torch.optim.Optimizer):
        return {"main": given}
    return dict(given) if isinstance(given, Mapping) else {str(i): item for i, item in enumerate(given)}


def _are_optimizers(given: Any) -> bool:
    several = isinstance(given, list | tuple | Mapping) and len(given) > 0
    return isinstance(given, torch.optim.Optimizer) or (several and _not_optimizer(given) is given)


def _not_optimizer(given: Any) -> Any:
    """Return the first item of a collection that is not an optimizer, else ``given`` itself."""
    items = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    return next((item for item in items if not isinstance(item, torch.optim.Optimizer)), given)


def _kind(value: Any) -> str:
    """Return a short description of the value or of its type, for error messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | bool | int | float):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"


def _make_one(kind: type) -> str:
    inside = "model.parameters(), ..." if issubclass(kind, torch.optim.Optimizer) else "..."
    inside = "" if issubclass(kind, nn.modules.loss._Loss) else inside
    return f"make one: {kind.__name__}({inside})"


def as_nonfinite(given: Any) -> OnNonfinite:
    """Return the settings for steps that are not finite; a name becomes ``OnNonfinite(action=name)``."""
    if isinstance(given, str):
        return OnNonfinite(action=given)  # type: ignore[arg-type]
    _check_kind("on_nonfinite", given, (OnNonfinite,), "'stop', 'skip', 'rollback' or OnNonfinite(...)")
    return OnNonfinite() if given is None else given
