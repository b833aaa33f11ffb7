"""The process groups of one engine. They are destroyed with the engine because each holds threads and sockets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class ProcessGroups:
    """Creates process groups and destroys them on ``close``. All ranks create the same groups in the same order."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._made: list[dist.ProcessGroup] = []

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

    def close(self) -> None:
        """Destroy the Gloo groups. NCCL groups last until exit: all ranks would have to destroy one together."""
        if self._backend == "gloo" and dist.is_initialized():
            for group in self._made:
                dist.destroy_process_group(group)
        self._made = []
