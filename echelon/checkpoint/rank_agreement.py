"""Agreement of the ranks of one save: all of them have the result, or all of them raise the same error.

Messages are JSON. The driver of torch.distributed.checkpoint sends pickles, which Echelon never accepts; only its
planner is used here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import CheckpointError, PeerLost, first_line
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import json_to_tensor, tensor_to_json


class PeerLostWhileSaving(CheckpointError, PeerLost):
    """A rank of the save died or does not answer: a secondary error, whose cause is in that rank's log."""


class SavePeers:
    """The ranks that write one checkpoint together, with their own group, apart from training's collectives."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None
        if group is not None and world_size > 1:
            self._group = dist.new_group(
                dist.get_process_group_ranks(group), backend="gloo", timeout=timedelta(seconds=timeout)
            )

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def agree(self, doing: str, offer: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        """Return rank 0's ``decide`` over every rank's ``offer``; if any of these fails, all ranks raise."""
        own, cause = _attempt(offer)
        try:
            with _noted(doing):
                offers = self._gather(own)
                verdict = self._broadcast(self._judge(offers, decide) if self.rank == 0 else None)
        except RuntimeError as error:
            raise PeerLostWhileSaving(
                f"{doing}: rank {self.rank} lost contact with another rank ({first_line(error, typed=True)}); "
                "every rank must take part in a save; look at that rank's log"
            ) from error
        if "error" in verdict:
            raise CheckpointError(f"{doing}: {verdict['error']}") from cause
        return verdict["value"]

    def _judge(self, offers: list[Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        failures = {rank: offer["error"] for rank, offer in enumerate(offers) if "error" in offer}
        if not failures:
            verdict, _ = _attempt(lambda: decide([offer["value"] for offer in offers]))
            return verdict
        rank, line = next(iter(failures.items()))
        others = f" (and {len(failures) - 1} more ranks failed)" if len(failures) > 1 else ""
        return {"error": f"rank {rank}: {line}{others}" if self.world_size > 1 else line}

    def _gather(self, message: Any) -> list[Any]:
        """Return every rank's message, in rank order, on rank 0."""
        if self._group is None:
            return [message]
        data = json_to_tensor(message)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = [torch.zeros_like(padded) for _ in lengths] if self.rank == 0 else None
        dist.gather(padded, rows, group=self._group, group_dst=0)
        return [tensor_to_json(row[: int(length)]) for row, length in zip(rows or [], lengths, strict=False)]

    def _broadcast(self, message: Any) -> Any:
        """Return rank 0's message on every rank."""
        if self._group is None:
            return message
        data = json_to_tensor(message)
        length = torch.tensor([data.numel()])
        dist.broadcast(length, group=self._group, group_src=0)
        if self.rank != 0:
            data = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, group=self._group, group_src=0)
        return tensor_to_json(data)


def _noted(doing: str) -> contextlib.AbstractContextManager[None]:
    """Mark the wait of the training thread; a save in a background thread does not delay training."""
    here = threading.current_thread() is threading.main_thread()
    return waiting("save", doing) if here else contextlib.nullcontext()


def _attempt(action: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"value": action()}, None
    except CheckpointError as error:
        return {"error": str(error)}, error
    except Exception as error:  # a rank that raised here would leave the others waiting
        return {"error": first_line(error, typed=True)}, error
