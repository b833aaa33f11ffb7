"""Copies tensors into a snapshot buffer: synchronously on the CPU, from a GPU while it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.in_memory.snapshot_buffer import SnapshotBuffer
from echelon.engine.in_memory.snapshot_layout import SnapshotLayout


class DeviceCopy:
    """Copies the tensors of one device into a snapshot buffer.

    at_once: True if a copy is complete when ``copy`` returns; else it is complete when ``wait`` returns
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.at_once = device.type != "cuda"
        self._stream: torch.cuda.Stream | None = None
        if not self.at_once:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None
        self._registered: int | None = None

    def register(self, buffer: SnapshotBuffer) -> None:
        """Pin the buffer's memory for the GPU. If pinning fails, copies are slower but still correct."""
        self.forget()
        if self._stream is None:
            return
        whole = torch.frombuffer(buffer.memory, dtype=torch.uint8)
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            if int(cuda.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)) == 0:
                self._registered = whole.data_ptr()

    def forget(self) -> None:
        if self._registered is not None:
            self.wait()
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):
                cuda.cudaHostUnregister(self._registered)
            self._registered = None

    @torch.no_grad()
    def copy(self, targets: Sequence[Tensor], form: SnapshotLayout) -> None:
        if self._stream is None:
            torch._foreach_copy_(list(targets), form.views)
            return
        steady, changing = form.steady()
        now = torch.cuda.current_stream(self._device)
        for at in changing:  # the next forward pass may change these, so the copy runs before it, on its stream
            targets[at].copy_(form.views[at], non_blocking=True)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for at in steady:
                targets[at].copy_(form.views[at], non_blocking=True)
        self._read = self._stream.record_event()

    def hold(self) -> None:
        """Make the current stream wait until the last copy has read its sources."""
        if self._read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._read)

    def wait(self) -> None:
        if self._read is not None:
            self._read.synchronize()
