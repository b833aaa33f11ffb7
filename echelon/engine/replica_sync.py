"""``ReplicaSync``: gives all ranks one model to evaluate or save if replicas differ or servers hold parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.replicas import average_buffers
from echelon.engine.replica_buffers import ReplicaBuffers
from echelon.engine.run_context import RunContext
from echelon.plan import Plan
from echelon.plan.batch_norms import batch_norm_names

if TYPE_CHECKING:
    from echelon.engine.parallelize import ParallelModel


def has_local_statistics(model: nn.Module, plan: Plan) -> bool:
    """Return True if each replica has its own batch-norm statistics."""
    return plan.replicas > 1 and not plan.sync_batch_norm and bool(batch_norm_names(model))


class ReplicaSync:
    """Synchronizes replicas on demand; all ranks call its methods together.

    buffers: buffers to keep equal on replicas that share every step; None without any
    """

    def __init__(self, run: RunContext, grid: MeshGroups, parts: ParallelModel, buffers: ReplicaBuffers | None) -> None:
        self._run, self._grid, self._parts, self._buffers = run, grid, parts, buffers

    def has_local_statistics(self) -> bool:
        """Return True if each replica has its own batch-norm statistics."""
        return has_local_statistics(self._run.model, self._parts.plan)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Give all replicas one model within the context.

        Replicas that step alone have their average within the context only. Other replicas average the buffers that
        differ, and keep the result.
        """
        if self._parts.local is not None:
            with self._run.checker.explained(), self._parts.local.averaged():
                yield
            return
        self._refresh()
        if self.has_local_statistics():
            average_buffers(self._run.model, self._grid.group(*self._parts.plan.data_axes))
        if self._buffers is not None:
            with self._run.checker.explained():
                self._buffers.compare()
        yield

    def sync(self) -> None:
        """Synchronize the replicas, which continue with the result."""
        self._refresh()
        if self._parts.local is not None:
            with self._run.checker.explained():
                self._parts.local.sync()

    def next_sync(self) -> int:
        """Return the next step that no rank can finish without all other ranks."""
        step = self._run.checker.step
        return step if self._parts.local is None else self._parts.local.next_sync(step - 1)

    def _refresh(self) -> None:
        with self._run.checker.explained():
            self._run.backend.refresh()
