"""Collects the contents of run.json: ranks, model, plan, settings and predictions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from echelon.base.environment import COMMAND
from echelon.base.process_info import own_command
from echelon.base.version import __version__
from echelon.observability.runlog.tolerant_json import JSON
from echelon.plan import Plan
from echelon.plan.plan import numel
from echelon.strategy import Strategy

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView
    from echelon.plan.saved_plan import SavedPrediction

#: Seconds that git may take; a large working tree on a slow disk then goes without its commit.
GIT_PATIENCE = 2.0
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
        **_peak(engine),
    }


def _peak(engine: EngineView) -> JSON:
    """Return the nominal peak of this rank's device, if it can be compared with the FLOPs of a step."""
    if known_flops(engine) is None:
        return {}
    from echelon.observability.trace.rank_header import nominal_peak

    return {"peak": nominal_peak(engine)}


def known_flops(engine: EngineView) -> float | None:
    """Return the FLOPs of a step on all devices, if the planner has counted them."""
    predicted = None if engine.saved_plan is None else engine.saved_plan.predicted
    return None if predicted is None else predicted.flops or None


def promised_flops(ranks: Sequence[JSON]) -> float | None:
    """Return the nominal peak FLOP/s of the devices of all ranks, each device once; None if some is unknown."""
    peaks = {(one["host"], one["device"]): one.get("peak") for one in ranks}
    return None if None in peaks.values() else sum(peak for peak in peaks.values() if peak is not None)


def facts_of(engine: EngineView, ranks: Sequence[JSON]) -> JSON:
    """Return all of run.json except times, settings and startup lines."""
    plan, found = engine.plan, engine.saved_plan
    predicted = None if found is None else found.predicted
    return {
        "echelon": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "command": shown_command(_command()),
        "commit": _commit(os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv else ""))),
        "optimizer": "; ".join(map(describe_optimizer, engine.optimizers.values())),
        "script": sys.argv[0] if sys.argv else "",
        "world": _world(engine, ranks),
        "mesh": dict(plan.mesh),
        "ranks": list(ranks),
        "plan": shown_plan(plan),
        "parameters": {"count": sum(map(numel, plan.model)), "bytes": parameter_bytes(plan)},
        "stages": stages_of(plan, ranks),
        "schedule": _schedule(plan),
        "predicted": None if predicted is None else _predicted(predicted),
        "flops_per_step": known_flops(engine),
        "environment": relevant_environment(os.environ),
    }


def _command() -> list[str]:
    """Return the launcher's command line, or that of this process without a launcher."""
    with contextlib.suppress(KeyError, ValueError):
        return [str(word) for word in json.loads(os.environ[COMMAND])]
    return own_command()


@functools.cache
def _commit(directory: str) -> str:
    """Return the git commit of the script's directory, with ``-dirty`` if files differ from it; "" outside of git."""
    words = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(words, check=False, cwd=directory, capture_output=True, text=True, timeout=GIT_PATIENCE)
        return found.stdout.strip() if found.returncode == 0 else ""
    return ""


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return ``SGD(lr=0.1, momentum=0.9)``: the class, the learning rate, and options that are not at their default."""
    usual = {name: p.default for name, p in inspect.signature(type(optimizer).__init__).parameters.items()}
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    shown = {name: value for name, value in group.items() if name == "lr" or (name in usual and name != "params")}
    given = [f"{name}={_brief(value)}" for name, value in shown.items() if name == "lr" or value != usual[name]]
    groups = len(optimizer.param_groups)
    return f"{type(optimizer).__name__}({', '.join(given)})" + (f" in {groups} groups" if groups > 1 else "")


def _brief(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, float | torch.Tensor) else str(value)


def strategy_settings(strategy: Strategy) -> dict[str, tuple[Any, str]]:
    """Return every option of a strategy with its value and its origin: ``script`` or ``default``."""
    given, usual = strategy.to_dict(), Strategy()
    return {
        name: (given[name], "script") if name in given else (_plain(getattr(usual, name)), "default")
        for name in (field.name for field in dataclasses.fields(strategy))
    }


def is_secret(name: str) -> bool:
    """Return True if the value of a variable or an option of this name is not to be written down."""
    return any(word in name.upper() for word in _SECRET)


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_TELLING) and name != COMMAND and not is_secret(name)
    }


def shown_command(words: Sequence[str]) -> list[str]:
    """Return the script and its command-line arguments, with secret values replaced by ``...``."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and is_secret(name)
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
