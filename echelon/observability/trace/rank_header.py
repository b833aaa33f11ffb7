"""The first line of a rank's file, which describes the rank."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Any

import torch

from echelon.base.recorded_steps import RecordedSteps
from echelon.observability.trace.clock_sync import ClockMapping
from echelon.observability.trace.span_recorder import now
from echelon.optim.grad_scaler import DTYPES

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView


def about(engine: EngineView, clock: ClockMapping, steps: RecordedSteps) -> dict[str, Any]:
    """Return the description of this rank.

    clock: mapping to rank 0's clock
    steps: steps to record
    """
    world, plan = engine.world, engine.plan
    staged = plan.pipeline is not None and plan.stages is not None
    measured = world.control is not None or world.size == 1
    return {
        "rank": world.rank,
        "host": platform.node(),
        "clock_offset": clock.before.seconds,
        "clock_error": clock.error if measured else None,
        "clock_drift": clock.drift,
        "pid": os.getpid(),
        "wall": time.time() - now(),  # used to align hosts whose clocks were not compared
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
        "device_index": world.device.index,
        "asked": list(steps),
        "began": time.time(),
        "ranks": world.size,
        "mesh": dict(plan.mesh),
        "at": dict(engine.place),
        "schedule": _schedule(engine) if staged else None,
        "peak": nominal_peak(engine),
    }


def _schedule(engine: EngineView) -> dict[str, Any]:
    pipeline, stages = engine.plan.pipeline, engine.plan.stages
    assert pipeline is not None
    assert stages is not None
    count = 1 + max(stages.units.values())
    return {"name": pipeline.schedule, "micro_batches": pipeline.micro_batches, "stages": count}


def nominal_peak(engine: EngineView) -> float | None:
    """Return the GPU's nominal peak FLOP/s for the dtype of matrix products; None without a GPU."""
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
    """Return True if torch may use TF32 in matrix products, or in convolutions if the model has any (the default)."""
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    products: str = torch.backends.cuda.matmul.fp32_precision
    convolutions: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return products == "tf32" or (convolves and convolutions == "tf32")
