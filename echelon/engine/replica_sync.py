"""``ReplicaSync``: gives all ranks one model to evaluate or save if replicas differ or servers hold parameters."""

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
    """Synchronizes replicas on demand; all ranks call its methods together."""

    def __init__(self, model: nn.Module, company: ConsistencyChecker, served: ParameterServerSession | None) -> None:
        self._model, self._company, self._served = model, company, served
        self.local: LocalSgdAverager | None = None  #: set under local SGD, where replicas step alone
        self.buffers: ReplicaBuffers | None = None  #: buffers to keep equal on replicas that share every step

    def takes(self, plan: Plan, grid: MeshGroups) -> None:
        """Use this plan from now on."""
        self._plan, self._grid = plan, grid

    def has_local_statistics(self) -> bool:
        """Return True if each replica has its own batch-norm statistics."""
        return self._plan.replicas > 1 and not self._plan.sync_batch_norm and bool(batch_norm_names(self._model))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Give all replicas one model within the context.

        Replicas that step alone have their average within the context only. Other replicas average the buffers that
        differ, and keep the result.
        """
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
        """Synchronize the replicas, which continue with the result."""
        self._refresh()
        if self.local is not None:
            with self._company.explained():
                self.local.meet()

    def _refresh(self) -> None:
        if self._served is not None:
            with self._company.explained():
                self._served.refresh()
