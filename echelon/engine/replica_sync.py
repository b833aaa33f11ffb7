"""OneModel: what is shown, stored or sent is one model, also where replicas differ or servers hold the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.replicas import average_buffers
from echelon.engine.consistency import ConsistencyChecker
from echelon.engine.replica_buffers import ReplicaBuffers
from echelon.plan import Plan
from echelon.plan.batch_norms import batch_norm_names

if TYPE_CHECKING:
    from echelon.parallel.data.local_sgd import LocalSgdAverager
    from echelon.parameter_server.worker.session import ParameterServerSession


class ReplicaSync:
    """Replicas agree on it when they are asked to; all ranks ask together."""

    def __init__(self, model: nn.Module, company: ConsistencyChecker, served: ParameterServerSession | None) -> None:
        self._model, self._company, self._served = model, company, served
        self.local: LocalSgdAverager | None = None  #: where replicas step alone
        self.buffers: ReplicaBuffers | None = None  #: of replicas that share every step

    def takes(self, plan: Plan, grid: MeshGroups) -> None:
        """Go by this plan."""
        self._plan, self._grid = plan, grid

    def has_local_statistics(self) -> bool:
        """Whether each replica has batch-norm statistics of its own."""
        return self._plan.replicas > 1 and not self._plan.sync_batch_norm and bool(batch_norm_names(self._model))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Replicas that step alone are their average for as long; others agree on what differs, and go on with it."""
        if self.local is not None:
            with self._company.explained(), self.local.averaged():
                yield
            return
        self._refresh()
        if self.has_local_statistics():
            average_buffers(self._model, self._grid.group(*self._plan.data_axes))
        if self.buffers is not None:
            with self._company.explained():
                self.buffers.compare()
        yield

    def meet(self) -> None:
        """Replicas go on with what they have in common."""
        self._refresh()
        if self.local is not None:
            with self._company.explained():
                self.local.meet()

    def _refresh(self) -> None:
        if self._served is not None:
            with self._company.explained():
                self._served.refresh()
