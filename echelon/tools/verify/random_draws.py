"""Recording and replay of the random numbers that a model or a loss draws inside ``engine.step()``.

The ranks write their draws to files; one process is given the draws of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.tools.verify.batches import on_device, read_batch, write_batch
from echelon.tools.verify.loop_events import FILLED, put_together
from echelon.tools.verify.verify_request import VerifyRequest

#: One draw: the function's name and its result.
Draw = tuple[str, Tensor]


def _file(question: VerifyRequest, call: int, replica: int) -> Path:
    return question.file(f"draws-{call}-{replica}.safetensors")


def write_draws(question: VerifyRequest, call: int, replica: int, draws: Sequence[Draw]) -> None:
    if draws:
        write_batch(_file(question, call, replica), [list(draw) for draw in draws])


def read_draws(question: VerifyRequest, call: int, replica: int, device: torch.device) -> list[Draw]:
    path = _file(question, call, replica)
    result: list[Any] = on_device(read_batch(path), device) if path.exists() else []
    return [(name, drawn) for name, drawn in result]


class DrawWriter:
    """Collects the draws of the current pass on a rank.

    stray: functions whose draws cannot be seen
    """

    quiet = False

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self.stray: set[str] = set()

    def drawn(self, own: Tensor, name: str) -> Tensor:
        self.draws.append((name, own.detach().clone()))
        return own

    def strayed(self, name: str) -> None:
        self.stray.add(name)

    def take(self) -> list[Draw]:
        """Return the draws of the finished pass and clear them."""
        draws, self.draws = self.draws, []
        return draws


class DrawReader:
    """Replays the draws of the ranks in one process, in order, those of all replicas concatenated.

    replicas: draws of each replica; one list of all draws if one process computes the replicas' batches one by one
    stray:    collects draws that could not be replayed
    """

    quiet = False

    def __init__(self, replicas: Sequence[Sequence[Draw]], stray: set[str]) -> None:
        self._replicas, self.stray, self._at = replicas, stray, 0

    def drawn(self, own: Tensor, name: str) -> Tensor:
        at, self._at = self._at, self._at + 1
        found = [draws[at] for draws in self._replicas if len(draws) > at]
        whole = None
        if len(found) == len(self._replicas) and found and all(known == name for known, _ in found):
            drawn = [value for _, value in found]
            alone = drawn[0] if len(drawn) == 1 else None
            whole = put_together(drawn, own, [None] * len(drawn), order=name == "randperm") if alone is None else alone
        if whole is None or whole.shape != own.shape or whole.dtype != own.dtype:
            self.strayed(f"{name} of shape {tuple(own.shape)}")
            return own
        if name not in FILLED:
            return whole.requires_grad_(own.requires_grad)
        with torch.no_grad():
            return own.copy_(whole)

    def strayed(self, name: str) -> None:
        self.stray.add(name)
