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
    from echelon.engine import Engine

#: Of a training step, in forward passes: itself, and backward's two.
PASSES = 3


class Seen:
    """The arguments of the model's first call from now on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._arguments = self._arguments or (args, named)
        self.close()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def flops(self, amp: torch.dtype | None, device: torch.device) -> float | None:
        """Of forward and backward of that call, on this rank; ``None`` where it cannot be told."""
        self.close()
        if self._arguments is None:
            return None
        (args, named), self._arguments = self._arguments, None
        return _counted(self._model, args, named, amp, device)


def countable(engine: Engine) -> bool:
    """Whether a forward pass of this rank's model is all that it computes in a step."""
    plan = engine.plan
    fetched = plan.shard is not None and plan.shard.level > 2
    return engine.world.device.type == "cuda" and plan.pipeline is None and engine.served is None and not fetched


def _counted(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], amp: torch.dtype | None, device: torch.device
) -> float | None:
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
