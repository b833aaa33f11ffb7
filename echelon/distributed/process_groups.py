"""The process groups of one engine, which end with it: each holds threads and sockets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class ProcessGroups:
    """Makes groups and remembers them. All ranks make the same ones, in the same order."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._made: list[dist.ProcessGroup] = []

    def new(
        self, ranks: Sequence[int] | None = None, backend: str | None = None, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """A group of ``ranks``, or of all; on a rank that is not in it, torch's stand-in for that."""
        made: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), timeout=timeout, backend=backend or self._backend
        )
        if isinstance(made, dist.ProcessGroup):
            self._made.append(made)
        return made

    def close(self) -> None:
        """End them. NCCL's end with the process: to end one sooner, all ranks would have to arrive at the same time."""
        if self._backend == "gloo" and dist.is_initialized():
            for group in self._made:
                dist.destroy_process_group(group)
        self._made = []
