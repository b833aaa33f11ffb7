"""Copies batches to the device, one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from echelon.data.data_source import RankBatch


def on_device(pieces: Iterator[RankBatch], device: torch.device | None) -> Iterator[RankBatch]:
    """Return the same batches with their tensors on ``device``; nothing changes on the CPU."""
    if device is None or device.type == "cpu":
        return pieces
    if device.type == "cuda":
        return _copied_ahead(pieces, device)
    return (piece._replace(batch=each_tensor(piece.batch, lambda t: t.to(device))) for piece in pieces)


def _copied_ahead(pieces: Iterator[RankBatch], device: torch.device) -> Iterator[RankBatch]:
    """Copy on a separate stream, so that the copy of the next batch overlaps with the computation of this one."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        # the memory belongs to the side stream, which may reuse it only after the step has finished with it
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    ahead: tuple[RankBatch, torch.cuda.Event] | None = None
    for piece in pieces:
        with torch.cuda.stream(side):
            sent = piece._replace(batch=each_tensor(piece.batch, send)), side.record_event()
        if ahead is not None:
            yield _received(ahead, device, receive)
        ahead = sent
    if ahead is not None:
        yield _received(ahead, device, receive)


def _received(
    sent: tuple[RankBatch, torch.cuda.Event], device: torch.device, receive: Callable[[torch.Tensor], torch.Tensor]
) -> RankBatch:
    piece, copied = sent
    torch.cuda.current_stream(device).wait_event(copied)
    return piece._replace(batch=each_tensor(piece.batch, receive))


def each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``batch`` with every tensor in its tuples, lists and dicts changed; other values stay unchanged."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(value, change) for value in batch)
    return batch
