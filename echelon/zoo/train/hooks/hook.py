"""Hook: what a run does besides training. Written by users too; see the methods for when each is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from echelon.data import Loader
from echelon.engine.engine import Engine
from echelon.zoo.entry import Data, Request


class HookContext(Protocol):
    """What hooks see of a run.

    steps:       updates so far, those before a resume included
    total_steps: updates in all, where that is known
    results:     goes into the JSON that a run ends with
    """

    results: dict[str, Any]

    @property
    def engine(self) -> Engine: ...
    @property
    def request(self) -> Request: ...
    @property
    def loader(self) -> Loader: ...
    @property
    def data(self) -> Data: ...
    @property
    def directory(self) -> Path: ...
    @property
    def steps(self) -> int: ...
    @property
    def total_steps(self) -> int | None: ...

    def stop(self, reason: str) -> None:
        """Train no more after this step; said before the first step, take none. All ranks must say it alike."""

    def say(self, line: str) -> None:
        """A line on rank 0's console."""

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the test part; empty where there is none. All ranks call it together."""


class Hook:
    """Made without arguments; parameters of the run are in ``run.request``. Every method runs on all ranks."""

    def log_options(self, request: Request) -> dict[str, Any]:
        """What it asks of the engine's Log, before there is an engine."""
        return {}

    def checkpoint_options(self, request: Request) -> dict[str, Any]:
        """What it asks of the engine's Checkpoint, before there is an engine."""
        return {}

    def begin(self, run: HookContext) -> None:
        """Before the first step, after a resume."""

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        """After every step. ``loss`` is on the device: reading its value waits for the GPU."""

    def after_evaluation(self, run: HookContext, results: dict[str, float]) -> None:
        """After an evaluation of EvaluationHook; ``run.results["evaluations"]`` has all of them, this one last."""

    def end(self, run: HookContext) -> None:
        """After the last step, whatever ended training, unless it was an error."""
