"""What a rank says of itself: the first line of its file."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Any

import torch

from echelon.observability.trace.clock_sync import ClockMapping
from echelon.observability.trace.span_recorder import now
from echelon.optim.grad_scaler import DTYPES
from echelon.strategy.recorded_steps import RecordedSteps

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView


def processes(engine: EngineView) -> int:
    """How many train, workers that only servers bind together included."""
    served = engine.served
    return served.workers if served is not None and served.dense else engine.world.size


def about(engine: EngineView, clock: ClockMapping, asked: RecordedSteps) -> dict[str, Any]:
    """asked: the steps that are to be recorded"""
    world, plan = engine.world, engine.plan
    staged = plan.pipeline is not None and plan.stages is not None
    measured = world.control is not None or processes(engine) == 1
    return {
        "rank": engine.worker,
        "host": platform.node(),
        "clock_offset": clock.before.seconds,
        "clock_error": clock.error if measured else None,
        "clock_drift": clock.drift,
        "pid": os.getpid(),
        "wall": time.time() - now(),  # where nothing was measured, the time of day is what hosts have in common
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
        "device_index": world.device.index,
        "asked": list(asked),
        "began": time.time(),
        "ranks": processes(engine),
        "mesh": dict(plan.mesh),
        "at": dict(engine.place),
        "schedule": _schedule(engine) if staged else None,
        "peak": _peak(engine),
    }


def _schedule(engine: EngineView) -> dict[str, Any]:
    pipeline, stages = engine.plan.pipeline, engine.plan.stages
    assert pipeline is not None
    assert stages is not None
    count = 1 + max(stages.units.values())
    return {"name": pipeline.schedule, "micro_batches": pipeline.micro_batches, "stages": count}


def _peak(engine: EngineView) -> float | None:
    """FLOP/s that the GPU's maker promises for the type that products are computed in."""
    if engine.world.device.type != "cuda":
        return None
    from echelon.planner.cluster.detect import gpu_kind

    peaks = gpu_kind(engine.world.device.index or 0).device.peak
    weights = next((p.dtype for p in engine.model.parameters() if p.is_floating_point()), torch.float32)
    computed = DTYPES[engine.plan.amp.dtype] if engine.plan.amp is not None else weights
    sixteen = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    wanted = sixteen.get(computed) or ("tf32" if _in_tf32(engine.model) else "float32")
    return peaks.get(wanted, peaks.get("float32"))


def _in_tf32(model: torch.nn.Module) -> bool:
    """Whether torch may round what products or convolutions of 32-bit floats take in. By default convolutions may."""
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    products: str = torch.backends.cuda.matmul.fp32_precision
    convolutions: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return products == "tf32" or (convolves and convolutions == "tf32")
