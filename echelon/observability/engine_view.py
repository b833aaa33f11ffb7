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


class EngineView(Protocol):
    """The attributes of an engine that run logs and traces use."""

    world: World
    model: nn.Module
    plan: Plan
    saved_plan: SavedPlan | None

    @property
    def steps(self) -> int: ...

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]: ...

    @property
    def place(self) -> Mapping[str, int]: ...

    @property
    def served(self) -> object | None:
        """The session with parameter servers; None without one."""

    @property
    def trial(self) -> Any | None: ...

    @property
    def local_state(self) -> LocalState | None: ...

    @property
    def has_own_loop(self) -> bool: ...

    def say(self, text: str) -> None:
        """Write a line to the console and to the run's events."""
