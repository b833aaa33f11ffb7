"""Arithmetic of a step, for MFU: counted in one more forward pass, after the recording, whose result is thrown away.

A forward pass of the recorded batch is run once with torch's counter and without compiled code, which the counter
cannot look into. Backward takes twice as many. Random streams and buffers (batch norm) are put back afterwards, so that
the training goes on as if nothing had been. What a forward pass alone does not show is not counted: pipelines, tables
on servers, parameters that are fetched layer by layer.
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

#: Of a training step, in forward passes: itself, and backward's two.
PASSES = 3


class ModelCallHook:
    """Tells the recorder the arguments of the model's first call from now on. For a loop of the user's own: the engine
    tells those of its steps, which may be replays of a graph that call no model, and hooks have a call run uncompiled.
    """

    def __init__(self, model: nn.Module, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._recorder.arguments = self._recorder.arguments or (args, named)
        self.close()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def can_count_flops(engine: EngineView) -> bool:
    """Whether a forward pass of this rank's model is all that it computes in a step."""
    plan = engine.plan
    fetched = plan.shard is not None and plan.shard.level > 2
    return engine.world.device.type == "cuda" and plan.pipeline is None and engine.served is None and not fetched


def count_flops(model: nn.Module, arguments: Arguments, amp: torch.dtype | None, device: torch.device) -> float | None:
    """Of forward and backward of that call, on this rank; ``None`` where it cannot be told."""
    args, named = arguments
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    counter = FlopCounterMode(display=False)
    on_gpu = [device] if device.type == "cuda" else []
    autocast = torch.autocast(device.type, amp or torch.bfloat16, enabled=amp is not None)
    try:
        plain = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(on_gpu), torch.no_grad(), plain, autocast, counter:
            model(*args, **named)
    except Exception:  # a user's model may do anything in forward; it did so before, and MFU is not worth an end
        return None
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return PASSES * float(counter.get_total_flops()) or None
