"""Copies tensors to host memory, so that training may change them while they are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.distributed.tensor_region import TensorRegion


class StagingBuffers:
    """Buffers that are reused from save to save: allocating pinned memory costs more than filling it."""

    def __init__(self) -> None:
        self._buffers: dict[TensorRegion, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, held: Sequence[tuple[TensorRegion, torch.Tensor]]) -> list[tuple[TensorRegion, torch.Tensor]]:
        """Return the same pieces with copies of their current values."""
        self._buffers = {piece: self._buffer(piece, tensor) for piece, tensor in held}
        for piece, tensor in held:
            self._buffers[piece].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for _, tensor in held if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return list(self._buffers.items())

    def _buffer(self, piece: TensorRegion, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(piece)
        if kept is not None and kept.is_pinned() == tensor.is_cuda:
            return kept
        return torch.empty(piece.sizes, dtype=piece.dtype, device="cpu", pin_memory=tensor.is_cuda)
