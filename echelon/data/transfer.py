"""Batches onto the device, one ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from echelon.data.data_source import RankBatch


def on_device(pieces: Iterator[RankBatch], device: torch.device | None) -> Iterator[RankBatch]:
    """The same pieces with their tensors on ``device``; on the CPU nothing is touched."""
    if device is None or device.type == "cpu":
        return pieces
    if device.type == "cuda":
        return _copied_ahead(pieces, device)
    return (piece._replace(batch=each_tensor(piece.batch, lambda t: t.to(device))) for piece in pieces)


def _copied_ahead(pieces: Iterator[RankBatch], device: torch.device) -> Iterator[RankBatch]:
    """Copies run on a stream of their own, so that the next batch travels while this one is computed on."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        # the memory belongs to the side stream; it may be reused there only after the step is through with it
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
    """``batch`` with every tensor in its tuples, lists and dicts changed; anything else stays as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(value, change) for value in batch)
    return batch
