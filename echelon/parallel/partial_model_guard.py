"""Raises an error if user code treats this rank's parts of a model as the whole model.

There are two cases: ``model.state_dict()``, which ``torch.save`` and ``save_pretrained`` use, and weight averages that
a script keeps with a class of another library.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.plan import Plan

#: Weight averages in other libraries: module, class, and the method that takes a model or its parameters.
AVERAGES = (
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    ("timm.utils.model_ema", "ModelEma", "update"),
    ("timm.utils.model_ema", "ModelEmaV2", "update"),
    ("timm.utils.model_ema", "ModelEmaV3", "update"),
    ("diffusers.training_utils", "EMAModel", "step"),
)

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_guarded: set[tuple[str, str, str]] = set()


def guard_parts(plan: Plan, model: nn.Module) -> None:
    """Guard ``model`` if this rank holds only parts of it under the plan."""
    what = _held(plan)
    if what is None or model in _models:
        return
    _models.add(model)
    guard = StateGuard(what)
    for module in model.modules():  # submodules have their own state_dict() and save_pretrained()
        module.register_state_dict_pre_hook(guard)  # type: ignore[no-untyped-call]
    for entry in AVERAGES:
        if entry not in _guarded and hasattr(sys.modules.get(entry[0]), entry[1]):
            _guarded.add(entry)
            _guard_average(getattr(sys.modules[entry[0]], entry[1]), entry[2])


def _held(plan: Plan) -> str | None:
    if plan.mesh.get("stage", 1) > 1:
        return "this rank holds the layers of its own stages only"
    if plan.mesh.get("split", 1) > 1:
        return "this rank holds its parts of split layers only"
    if plan.shard is not None and plan.shard.level == 3:
        return "shard=3 has whole parameters only while their layer computes"
    return None


class StateGuard:
    """A hook that raises UsageError in ``state_dict()``, except with ``keep_vars=True``, which the engine itself uses.

    what: description of the parts that this rank holds
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            return
        raise UsageError(
            f"state_dict(): {self._what}; use engine.whole_state() on all ranks: "
            "torch.save(state, ...), or save_pretrained(dir, state_dict=state)"
        )


def _guard_average(kind: type[Any], method: str) -> None:
    original = getattr(kind, method)

    @functools.wraps(original)
    def guarded(self: Any, given: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(given, nn.Module) and isinstance(given, Iterable):
            given = list(given)
        if _is_parted(given):
            raise UsageError(
                f"{kind.__name__}.{method}(): this rank holds parts of the model, which this class cannot average; "
                "use engine.ema(decay=...), which averages each rank's parts"
            )
        return original(self, given, *args, **named)

    setattr(kind, method, guarded)


def _is_parted(given: Any) -> bool:
    if isinstance(given, nn.Module):
        return given in _models
    first = given[0] if isinstance(given, list) and given else None
    return any(first is parameter for model in _models for parameter in model.parameters())
