"""Collects the contents of run.json: ranks, model, plan, settings and predictions."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from echelon.base.version import __version__
from echelon.observability.runlog.tolerant_json import JSON
from echelon.plan import Plan
from echelon.plan.plan import numel
from echelon.strategy import Strategy

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView
    from echelon.plan.saved_plan import SavedPrediction

#: Prefixes of environment variables that change how a run behaves, and parts of names whose values are secret.
_TELLING = ("NCCL_", "GLOO_", "ECHELON_", "TORCH_", "PYTORCH_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_")
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD", "CREDENTIAL")


def own_facts(engine: EngineView) -> JSON:
    """Return the facts of this rank, which are gathered on all ranks."""
    world = engine.world
    return {
        "rank": engine.world.rank,
        "host": socket.gethostname(),
        "device": _device(world.device),
        "memory": _memory(world.device),
        "at": engine.place,
        "pid": os.getpid(),
    }


def facts_of(engine: EngineView, ranks: Sequence[JSON]) -> JSON:
    """Return all of run.json except times, settings and startup lines."""
    plan, found = engine.plan, engine.found
    predicted = None if found is None else found.predicted
    return {
        "echelon": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "command": shown_command(sys.argv),
        "script": sys.argv[0] if sys.argv else "",
        "world": _world(engine, ranks),
        "mesh": dict(plan.mesh),
        "ranks": list(ranks),
        "plan": shown_plan(plan),
        "parameters": {"count": sum(map(numel, plan.model)), "bytes": parameter_bytes(plan)},
        "stages": stages_of(plan, ranks),
        "schedule": _schedule(plan),
        "predicted": None if predicted is None else _predicted(predicted),
        "flops_per_step": None if predicted is None else predicted.flops or None,
        "environment": relevant_environment(os.environ),
    }


def strategy_settings(asked: Strategy) -> dict[str, tuple[Any, str]]:
    """Return every option of a strategy with its value and its origin: ``script`` or ``default``."""
    given, usual = asked.to_dict(), Strategy()
    return {
        name: (given[name], "script") if name in given else (_plain(getattr(usual, name)), "default")
        for name in (field.name for field in dataclasses.fields(asked))
    }


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_TELLING) and not any(word in name.upper() for word in _SECRET)
    }


def shown_command(words: Sequence[str]) -> list[str]:
    """Return the script and its command-line arguments, with secret values replaced by ``...``."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(part in name.upper() for part in _SECRET)
        shown.append(f"{name}=..." if secret and equals else "..." if hide else word)
        hide = secret and not equals
    return shown


def parameter_bytes(plan: Plan) -> int:
    return sum(numel(parameter) * _itemsize(parameter.dtype) for parameter in plan.model)


def shown_plan(plan: Plan) -> JSON:
    """Return the plan as JSON, with counts in place of the lists of parameters."""
    plain = dataclasses.asdict(plan)
    for name in ("model", "stages"):
        plain.pop(name)
    plain["no_weight_decay"] = len(plan.no_weight_decay)
    for bucket in plain["buckets"]:
        bucket["parameters"] = len(bucket["parameters"])
    return plain


def stages_of(plan: Plan, ranks: Sequence[JSON]) -> list[JSON]:
    """Return the stages of a pipeline; on a stage axis of P ranks, stage s is at place s modulo P."""
    if plan.stages is None:
        return []
    places, sizes = plan.mesh.get("stage", 1), {parameter.name: numel(parameter) for parameter in plan.model}
    return [
        {
            "stage": stage,
            "ranks": [one["rank"] for one in ranks if one["at"].get("stage", 0) == stage % places],
            "units": [unit for unit, at in plan.stages.units.items() if at == stage],
            "parameters": sum(sizes.get(name, 0) for name, at in plan.stages.holders.items() if stage in at),
        }
        for stage in range(plan.stages.stages)
    ]


def _world(engine: EngineView, ranks: Sequence[JSON]) -> JSON:
    world = engine.world
    return {
        "size": world.size,
        "hosts": len({one["host"] for one in ranks}),
        "device": world.device.type,
        "backend": world.backend,
        "launcher": world.place.launcher,
        "servers": len(world.role.endpoints),
    }


def _schedule(plan: Plan) -> JSON | None:
    if plan.pipeline is None:
        return None
    return {"name": plan.pipeline.schedule, "micro_batches": plan.pipeline.micro_batches}


def _predicted(predicted: SavedPrediction) -> JSON:
    memory = predicted.kinds or tuple({"total": total} for total in predicted.memory)
    return {
        "seconds": predicted.seconds,
        "parts": dict(predicted.parts),
        "memory": [{**one, "limit": predicted.limit} for one in memory],
        "events": [list(event) for event in predicted.events],
    }


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype.removeprefix("torch."), None)
    return found.itemsize if isinstance(found, torch.dtype) else 0


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu {platform.machine()}, {os.cpu_count()} cores"


def _memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
