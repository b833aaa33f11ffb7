"""``RunView``: what run logs and traces read of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.distributed.local_state import LocalState
from echelon.distributed.world import World
from echelon.engine.planned_run import PlannedRun
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan

if TYPE_CHECKING:
    from echelon.engine.forward_backward import ForwardBackward
    from echelon.engine.parallelize import ParallelModel


class RunView:
    """The state of a run for its logs; see ``observability.engine_view.EngineView``.

    parts:  None before the first batch has partitioned a pipeline
    passes: None before the first batch has partitioned a pipeline
    """

    def __init__(
        self, planned: PlannedRun, parts: ParallelModel | None = None, passes: ForwardBackward | None = None
    ) -> None:
        self._run, self._parts, self._passes = planned.run, parts, passes
        self.world: World = planned.world
        self.model: nn.Module = planned.run.model
        self.saved_plan: SavedPlan | None = planned.saved_plan
        self.plan: Plan = planned.plan if parts is None else parts.plan
        self.place: Mapping[str, int] = planned.grid.coords

    @property
    def steps(self) -> int:
        return self._run.progress.steps

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return self._run.optimizers if self._parts is None else self._parts.optimizers

    @property
    def local_state(self) -> LocalState | None:
        """This rank's part of the model."""
        return None if self._parts is None else self._parts.local_state

    @property
    def served(self) -> object | None:
        return self._run.backend.session

    @property
    def trial(self) -> object | None:
        return self._run.trial

    @property
    def has_own_loop(self) -> bool:
        """True if user code calls ``engine.backward``."""
        return self._passes is not None and self._passes.has_own_loop

    def say(self, text: str) -> None:
        self._run.say(text)
