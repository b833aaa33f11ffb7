"""Both sides of a loop of one's own: ``Listener`` on the ranks, ``Repeater`` in the one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.errors import DataError
from echelon.verify.batches import joined, on_device, read_batch, write_batch
from echelon.verify.events import FILLED, Kind, put_together, rows_of
from echelon.verify.question import Question

_OVER = object()


def _file(question: Question, number: int, replica: int) -> Path:
    return question.file(f"event-{number}-{replica}.safetensors")


class Listener:
    """Holds what has come in until ``write``: only then is it known that the loop is the script's own.

    kinds: of all events so far
    rows:  of the last batch
    stray: functions that drew what cannot be followed
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self.kinds: list[Kind] = []
        self.rows: int | None = None
        self.stray: set[str] = set()
        self._held: list[tuple[int, Any]] = []
        self._off, self.quiet = False, False

    def batches(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        with self._quietly():
            batches = own()
        while True:
            with self._quietly():
                batch = next(batches, _OVER)
            if batch is _OVER:
                break
            self.rows = rows_of(batch)
            self._note("batch", batch)
            yield batch
        self._note("end", None)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def drawn(self, own: Tensor, name: str) -> Tensor:
        self._note("draw", own.detach().clone())
        return own

    def strayed(self, name: str) -> None:
        self.stray.add(name)

    def stop(self) -> None:
        """It is no loop of its own: nothing is held any more."""
        self._off, self._held = True, []

    def write(self, replica: int | None) -> None:
        """What came in since the last time. replica: none where another rank has the same and writes it"""
        for number, value in self._held:
            if replica is not None and value is not None:
                try:
                    write_batch(_file(self._question, number, replica), value)
                except DataError as error:
                    self._question.refuse(str(error))
        self._held = []

    def _note(self, kind: Kind, value: Any) -> None:
        if not self._off:
            self._held.append((len(self.kinds), value))
            self.kinds.append(kind)


class Repeater:
    """Hands out what the ranks got, in the same order.

    kinds: of the ranks' events
    """

    def __init__(self, question: Question, kinds: Sequence[Kind], replicas: int, device: torch.device) -> None:
        self._question, self._kinds, self._replicas, self._device = question, kinds, replicas, device
        self._at, self.quiet = 0, False
        self._rows: list[int | None] = [None] * replicas
        self.stray: set[str] = set()

    def batches(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        while self._next("batch", "end") == "batch":
            found = self._taken()
            self._rows = [rows_of(batch) for batch in found]
            whole = joined(found)
            if whole is None:
                self._question.refuse(
                    "the replicas' batches do not fit into one (rows of other lengths?), and a loop of its own cannot "
                    "be given them one after another; verify it with batches that fit"
                )
            yield whole

    def drawn(self, own: Tensor, name: str) -> Tensor:
        if self._next("draw") is None:
            return own
        found = self._taken()
        rows = self._rows if len(found) == len(self._rows) else [None] * len(found)
        whole, in_place = put_together(found, own, rows, order=name == "randperm"), name in FILLED
        if whole is None or (in_place and whole.shape != own.shape):
            self.strayed(f"random numbers of shape {tuple(own.shape)}, other ones on each rank")
            return own
        if not in_place:
            return whole.requires_grad_(own.requires_grad)
        with torch.no_grad():
            return own.copy_(whole)

    def strayed(self, name: str) -> None:
        self.stray.add(name)

    def _next(self, *wanted: Kind) -> Kind | None:
        """None after the last event: what comes then is not compared any more."""
        if self._at >= len(self._kinds):
            return None
        kind = self._kinds[self._at]
        if kind not in wanted:
            names = {"batch": "a batch of its loader", "end": "the end of its loader", "draw": "random numbers"}
            self._question.refuse(
                f"the loop takes another course in one process: it asks for {names[wanted[0]]} where the ranks had "
                f"{names[kind]}; let it not depend on their number"
            )
        self._at += 1
        return kind

    def _taken(self) -> list[Any]:
        """What the replicas got there."""
        paths = [_file(self._question, self._at - 1, replica) for replica in range(self._replicas)]
        return [on_device(read_batch(path), self._device) for path in paths if path.exists()]
