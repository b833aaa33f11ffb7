"""Build the Strategy of a run from strategy options and from common parameters with other names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from echelon.base.environment import PLAN
from echelon.base.errors import UsageError
from echelon.strategy import Shard, Strategy
from echelon.zoo.train.model_marks import split_size
from echelon.zoo.train.resolve import TrainConfig
from echelon.zoo.train.unused_parameters import unused_loss_scale


def requested_strategy(resolved: TrainConfig) -> Strategy:
    """Return the strategy that the user requested; raise UsageError if options conflict."""
    requested = Strategy.from_dict(_values(resolved))
    shard = requested.part(Shard)
    cutting = {
        "--stages": resolved["stages"] > 1,
        "--split": resolved["split"],
        "--marks": resolved["marks"],
        "--auto": requested.auto,
        "--plan": PLAN in os.environ,
        "--shard 3": shard and shard.level == 3,
    }
    named = next((flag for flag, is_on in cutting.items() if is_on), None)
    if resolved["compile"] and named:  # a compiled model is one graph, whose layers cannot be separated
        raise UsageError(f"--compile does not go with {named}, which divides the model; leave one of them out")
    return requested


def _values(resolved: TrainConfig) -> dict[str, Any]:
    values = dict(resolved.strategy)
    if resolved["max_gradient_norm"] is not None and not _is_only_advised(resolved):
        if "clip" in values:
            raise UsageError("--max_gradient_norm and --clip set the same value; give one of them")
        values["clip"] = resolved["max_gradient_norm"]
    if size := split_size(resolved["split"]):
        values["split"] = size
    if not resolved["use_fp16"]:
        values.setdefault("amp", False)  # if unset, bf16 is the default on a GPU
    if resolved.is_user_set("compile"):
        fast = values.get("fast")
        values["fast"] = {**(fast if isinstance(fast, Mapping) else {}), "compile": resolved["compile"]}
    if (scale := _requested_scale(resolved)) is not None and _is_fp16(values.get("amp")):
        values["amp"] = _scaled(values["amp"], scale)
    if values.get("recompute") is True and resolved.model.recompute:
        values["recompute"] = {"checkpoints": list(resolved.model.recompute)}
    return values


def _requested_scale(resolved: TrainConfig) -> str | None:
    return str(resolved["loss_scale"]) if resolved.is_user_set("loss_scale") else None


def _is_fp16(amp: Any) -> bool:
    return amp == "fp16" or (isinstance(amp, Mapping) and amp.get("dtype") == "fp16")


def _scaled(amp: Any, scale: str) -> dict[str, Any]:
    """Return the settings of amp with ``--loss_scale``."""
    settings = dict(amp) if isinstance(amp, Mapping) else {"dtype": amp}
    if settings.get("loss_scale") is not None:
        raise UsageError("--loss_scale and --amp.loss_scale set the same value; give one of them")
    return {**settings, "loss_scale": scale if scale == "dynamic" else float(scale)}


def _is_only_advised(resolved: TrainConfig) -> bool:
    """Return True if ``max_gradient_norm`` is only the model's default and a plan or ``clip`` overrides it."""
    return not resolved.is_user_set("max_gradient_norm") and (plans(resolved) or "clip" in resolved.strategy)


def plans(resolved: TrainConfig) -> bool:
    """Return True if a plan, saved or found by ``auto``, decides how the model is partitioned."""
    return PLAN in os.environ or resolved.strategy.get("auto") not in (None, False)


def make_strategy(resolved: TrainConfig, device: torch.device) -> tuple[Strategy, list[str]]:
    """Return the strategy, and lines to print about it."""
    strategy, notices = _made(resolved, device)
    return strategy, [*notices, *unused_loss_scale(resolved, strategy)]


def _made(resolved: TrainConfig, device: torch.device) -> tuple[Strategy, list[str]]:
    values, notices = _values(resolved), list[str]()
    requested = requested_strategy(resolved)
    if resolved["max_gradient_norm"] is not None and requested.clip is None:
        notices.append(f"max_gradient_norm {resolved['max_gradient_norm']} is ignored: the plan decides about clipping")
    if not resolved["use_fp16"] or "amp" in values or PLAN in os.environ:
        return requested, notices
    if device.type != "cuda":
        notices.append("use_fp16 is for GPUs and is ignored on this CPU; --amp bf16 gives 16 bits here too")
        return requested, notices
    if requested.auto is not None:
        values["auto"] = _allowing_amp(values["auto"])
        return Strategy.from_dict(values), notices
    try:
        return Strategy.from_dict({**values, "amp": _sixteen_bits(resolved["loss_scale"])}), notices
    except UsageError as error:
        notices.append(f"use_fp16 is ignored: {error}")
        return requested, notices


def _sixteen_bits(loss_scale: str) -> Any:
    """Return the value of ``amp``: bf16, which needs no loss scale, or fp16 on GPUs without bf16."""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    if loss_scale == "dynamic":
        return "fp16"
    return {"dtype": "fp16", "loss_scale": float(loss_scale)}


def _allowing_amp(auto: Any) -> dict[str, Any]:
    settings: dict[str, Any] = dict(auto) if isinstance(auto, Mapping) else {"measure": auto == "measure" or None}
    allowed = settings.get("allow", [])
    return {**settings, "allow": [*allowed, *([] if "amp" in allowed else ["amp"])]}
