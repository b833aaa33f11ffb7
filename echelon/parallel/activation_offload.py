"""Activation offload: keeps saved tensors in host memory between forward and backward, overlapped with computation.

A tensor is copied to pinned memory on a separate stream while the device computes, and copied back on another one. When
backward unpacks a tensor, the tensor stored before it, which backward needs next, is prefetched.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.base.errors import UsageError

# Number of copies in flight before the compute stream waits for the oldest. Without a bound all tensors would pile up
# on the device, because the host runs ahead of it.
UNDER_WAY = 2


class HostStore:
    """Host memory for the saved inputs of recomputed segments; CPU tensors are not moved."""

    def __init__(self) -> None:
        self._leaving: deque[_PendingOffload] = deque()
        self._lanes: dict[torch.device, _CopyStreams] = {}
        self._latest: weakref.ref[_OffloadedTensor] | None = None

    def holding(self, tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[object]:
        """Return a context in which activations saved for backward are offloaded to the host."""
        if not any(_worth_moving(tensor) for tensor in tensors):
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        if not _worth_moving(tensor):
            return tensor
        self._let_go(UNDER_WAY - 1)
        lanes = self._lanes_of(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        source = tensor.detach()
        lanes.out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(lanes.out):
            host.copy_(source, non_blocking=True)
        left = lanes.out.record_event()
        self._leaving.append(_PendingOffload(source, source._version, left))
        stored = _OffloadedTensor(host, tensor.device, left, self._latest)
        self._latest = weakref.ref(stored)
        return stored

    def _unpack(self, stored: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        self._let_go(0)
        lanes = self._lanes_of(stored.device)
        tensor, arrived = stored.coming or lanes.fetch(stored)
        stored.coming = None
        before = stored.before() if stored.before else None
        if before is not None and before.coming is None:
            before.coming = self._lanes_of(before.device).fetch(before)
        torch.cuda.current_stream(stored.device).wait_event(arrived)
        return tensor

    def _let_go(self, remaining: int) -> None:
        """Free device memory that has been copied; wait on the device for all but the latest ``remaining`` copies."""
        while self._leaving and (len(self._leaving) > remaining or self._leaving[0].is_released):
            leaving = self._leaving.popleft()
            torch.cuda.current_stream(leaving.source.device).wait_event(leaving.left)
            if leaving.source._version != leaving.version:
                raise UsageError(
                    "the input of a recomputed module was changed in place while it moved to host memory; change a "
                    "copy of it, or use Recompute(offload=False)"
                )

    def _lanes_of(self, device: torch.device) -> _CopyStreams:
        if device not in self._lanes:
            out, back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._lanes[device] = _CopyStreams(out, back)
        return self._lanes[device]


@dataclass(frozen=True)
class _PendingOffload:
    source: Tensor  # held until the copy is done, so that its memory is not reused
    version: int
    left: torch.cuda.Event

    @property
    def is_released(self) -> bool:
        return bool(self.left.query())  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class _OffloadedTensor:
    host: Tensor
    device: torch.device
    left: torch.cuda.Event
    before: weakref.ref[_OffloadedTensor] | None
    coming: tuple[Tensor, torch.cuda.Event] | None = None


@dataclass(frozen=True)
class _CopyStreams:
    """The copy streams of one device: to the host, and back."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream

    def fetch(self, stored: _OffloadedTensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start the copy to the device. Its memory belongs to the compute stream, so the copy waits for that stream."""
        tensor = torch.empty_like(stored.host, device=stored.device)
        self.back.wait_stream(torch.cuda.current_stream(stored.device))
        self.back.wait_event(stored.left)
        with torch.cuda.stream(self.back):
            tensor.copy_(stored.host, non_blocking=True)
        tensor.record_stream(self.back)  # an unused tensor's memory must not be reused before the copy has ended
        return tensor, self.back.record_event()


def _worth_moving(tensor: Tensor) -> bool:
    """Return True for activations: weights stay on the device anyway, and many segments share masks and data."""
    return tensor.is_cuda and tensor.requires_grad and not tensor.is_leaf
