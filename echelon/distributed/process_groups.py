"""The process groups of one engine, destroyed with it because each holds threads and sockets, and its shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from echelon.distributed.host_memory import HostMemory, share_host_memory


class ProcessGroups:
    """Creates process groups and destroys them on ``close``. All ranks create the same groups in the same order."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._made: list[dist.ProcessGroup] = []
        self._shared: list[HostMemory] = []

    @property
    def backend(self) -> str:
        return self._backend

    def new(
        self, ranks: Sequence[int] | None = None, backend: str | None = None, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """Create a group of ``ranks``, or of all; a rank outside the group gets torch's placeholder object."""
        made: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), timeout=timeout, backend=backend or self._backend
        )
        if isinstance(made, dist.ProcessGroup):
            self._made.append(made)
        return made

    def share_memory(self, group: dist.ProcessGroup, timeout: float) -> HostMemory | None:
        """Return memory that the ranks of a Gloo group share; None unless all of them are on one host."""
        made = share_host_memory(group, 1, timeout, "rank", "sum of gradients")
        if made is not None:
            self._shared.append(made)
        return made

    def close(self) -> None:
        """Destroy the Gloo groups. NCCL groups last until exit: all ranks would have to destroy one together."""
        for memory in self._shared:
            memory.close()
        self._shared = []
        if self._backend == "gloo" and dist.is_initialized():
            for group in self._made:
                dist.destroy_process_group(group)
        self._made = []
