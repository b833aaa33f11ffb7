"""Counts the FLOPs of a step, for MFU, in an extra forward pass after the trace, whose result is discarded.

The forward pass of the recorded batch runs once with torch's FLOP counter, and eagerly, because the counter cannot see
into compiled code. Backward takes twice as many FLOPs. RNG state and buffers (batch norm) are restored afterwards, so
that training is not affected. FLOPs are not counted if one forward pass does not show all of them: with pipelines,
tables on servers, or parameters that are gathered layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView
    from echelon.observability.trace.span_recorder import Arguments, TraceRecorder

#: FLOPs of a training step in forward passes: one for forward, two for backward.
PASSES = 3


class ModelCallHook:
    """Records the arguments of the model's next call, for a loop in user code.

    The engine itself records the arguments of its steps: a CUDA graph replay does not call the model, and a hook makes
    the call run uncompiled.
    """

    def __init__(self, model: nn.Module, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._recorder.note_arguments(args, named)
        self.close()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def can_count_flops(engine: EngineView) -> bool:
    """Return True if a forward pass of this rank's model on a GPU shows all FLOPs of a step."""
    plan = engine.plan
    fetched = plan.shard is not None and plan.shard.level > 2
    return engine.world.device.type == "cuda" and plan.pipeline is None and engine.served is None and not fetched


def count_flops(model: nn.Module, arguments: Arguments, amp: torch.dtype | None, device: torch.device) -> float | None:
    """Return the FLOPs of forward and backward of that call on this rank; ``None`` if they cannot be counted."""
    args, named = arguments
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    counter = FlopCounterMode(display=False)
    on_gpu = [device] if device.type == "cuda" else []
    autocast = torch.autocast(device.type, amp or torch.bfloat16, enabled=amp is not None)
    try:
        plain = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(on_gpu), torch.no_grad(), plain, autocast, counter:
            model(*args, **named)
    except Exception:  # a user's forward may raise anything in an extra call; MFU is not worth ending the run
        return None
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return PASSES * float(counter.get_total_flops()) or None
