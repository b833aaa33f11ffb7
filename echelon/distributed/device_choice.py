"""The device on which a process trains."""

from __future__ import annotations

import torch

from echelon.base.environment import RankInfo
from echelon.base.errors import UsageError


def choose_device(place: RankInfo, requested: str | torch.device | None, gpus: int) -> torch.device:
    """Return the requested device, with its index; by default the rank's own GPU, or the CPU.

    place:     host and local rank of the process; ranks beyond the number of GPUs share them in turn
    requested: device given to ``init``; "cuda" alone leaves the index to the local rank
    gpus:      number of GPUs that torch sees here
    """
    chosen = _parse(requested) if requested is not None else torch.device("cuda" if gpus else "cpu")
    if chosen.type != "cuda":
        return chosen
    if not gpus:
        raise UsageError(f"device '{requested}' was asked for, but torch sees no GPU here; use device='cpu'")
    index = place.local_rank % gpus if chosen.index is None else chosen.index
    if index >= gpus:
        there = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise UsageError(f"device '{requested}' was asked for, but torch sees only {there} here; use device='cuda'")
    return torch.device("cuda", index)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _parse(requested: str | torch.device) -> torch.device:
    try:
        return torch.device(requested)
    except (RuntimeError, TypeError):
        raise UsageError(f"device={requested!r}: torch knows no such device; use 'cuda', 'cuda:0' or 'cpu'") from None
