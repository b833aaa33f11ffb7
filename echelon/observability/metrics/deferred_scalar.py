"""A number that is still being computed on a GPU, read without stopping the device.

``float(tensor)`` waits for everything queued so far, the step just launched included. A copy to pinned memory, with an
event behind it, is ready long before it is asked for one step later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.distributed.activity import waiting


class DeferredScalar:
    """``read()`` gives the value that ``tensor`` has at this point of its stream.

    name: what it is, where all ranks read it: the GPU may be waiting for another rank
    """

    def __init__(self, tensor: Tensor, name: str = "") -> None:
        self._name = name
        self._value = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._value = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> float:
        if self._event is not None:
            with waiting(f"{self._name or 'a number'} from the GPU"):
                self._event.synchronize()
        return float(self._value)
