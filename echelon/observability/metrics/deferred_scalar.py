"""``DeferredScalar``: reads a number from a GPU without stalling the device.

``float(tensor)`` waits for all queued work, including the step just launched. A copy to pinned memory with an event
after it is complete long before it is read one step later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.distributed.activity import waiting


class DeferredScalar:
    """A copy of a scalar tensor; ``read()`` returns the value that it has at this point of its stream.

    name: name of the number, for stall reports: the GPU may wait for another rank; default ""
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
