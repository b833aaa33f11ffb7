"""The part of an engine that run logs and traces read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from echelon.distributed.local_state import LocalState
from echelon.distributed.world import World
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan

if TYPE_CHECKING:
    import torch
    from torch import nn


class ServerSession(Protocol):
    """A worker's session with parameter servers."""

    @property
    def workers(self) -> int: ...

    @property
    def dense(self) -> bool: ...


class EngineView(Protocol):
    """The attributes of an engine that run logs and traces use."""

    world: World
    model: nn.Module
    worker: int
    steps: int
    plan: Plan
    found: SavedPlan | None
    optimizers: dict[str, torch.optim.Optimizer]

    @property
    def place(self) -> Mapping[str, int]: ...

    @property
    def served(self) -> ServerSession | None: ...

    @property
    def trial(self) -> Any | None: ...

    @property
    def holdings(self) -> LocalState | None: ...

    @property
    def has_own_loop(self) -> bool: ...

    def say(self, text: str) -> None:
        """Write a line to the console and to the run's events."""
