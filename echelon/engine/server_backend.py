"""``ServerBackend``: what an engine calls for state on parameter servers; ``NoServers`` if there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from echelon.parallel.data.gradients import Gradients
    from echelon.parameter_server.worker.session import ParameterServerSession


class ServerBackend(Protocol):
    """The state outside of this process: dense parameters on servers, and rows of sparse tables.

    session:        session with the servers; None without one
    pushes:         True if gradients are pushed after each step
    dense:          True if the dense parameters are on servers, so that workers are connected through servers only
    steps_here:     True if this process's own optimizer steps the dense parameters
    steps_together: True if each step ends with ``finish_step``
    ahead:          callback for the next batch of a loader; None without one
    """

    @property
    def session(self) -> ParameterServerSession | None: ...
    @property
    def pushes(self) -> bool: ...
    @property
    def dense(self) -> bool: ...
    @property
    def steps_here(self) -> bool: ...
    @property
    def steps_together(self) -> bool: ...
    @property
    def ahead(self) -> Callable[[Any], None] | None: ...

    # ---- a step ----

    def step(self, batch: Any) -> AbstractContextManager[None]:
        """Return the context of a forward and backward with ``batch``."""

    def push(self, gradients: Gradients, loss: Tensor) -> None:
        """Push the reduced gradients of ``loss``."""

    def skip(self) -> None:
        """Skip a step that has nothing to apply."""

    def finish_step(self, own: Tensor) -> Tensor:
        """Wait for the other workers' part of the step; return the mean loss over all workers."""

    # ---- between steps ----

    def open(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], pack_state: Callable[[], bytes]
    ) -> None:
        """Open the job; ``pack_state`` returns the state from which this worker resumes."""

    def begin(self) -> None:
        """Start training, after the state was restored."""

    def refresh(self) -> None:
        """Install the newest parameters in the model."""

    @property
    def resumed(self) -> bytes | None:
        """State that this worker has stored on servers before a restart; None if there is none."""

    def save(self, place: Path, step: int) -> str | None:
        """Save this part of a checkpoint; return the name of its directory, None if there is no such part."""

    def forget_saves(self, place: Path) -> None:
        """Remove the parts whose checkpoint is gone."""

    def load(self, checkpoint: Path, name: str | None) -> None:
        """Load the part that was saved as ``name``."""

    def leave(self, done: bool, say: Callable[[str], None]) -> None:
        """Leave the job at the end of the run; ``done`` is False after an error."""

    def describe(self) -> Iterator[str]:
        """Yield lines for the startup log."""

    def describe_processes(self) -> str | None:
        """Return a description of the job's processes if workers are connected through servers only; else None."""


class NoServers:
    """The backend of a job without parameter servers and sparse tables: all state is in the training processes."""

    session: ParameterServerSession | None = None
    pushes = dense = steps_together = False
    steps_here = True
    ahead: Callable[[Any], None] | None = None
    resumed: bytes | None = None
    _step: AbstractContextManager[None] = contextlib.nullcontext()

    def step(self, batch: Any) -> AbstractContextManager[None]:
        return self._step

    def push(self, gradients: Gradients, loss: Tensor) -> None:
        """Do nothing; as do the methods below."""

    def skip(self) -> None: ...

    def finish_step(self, own: Tensor) -> Tensor:
        return own

    def open(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], pack_state: Callable[[], bytes]
    ) -> None: ...

    def begin(self) -> None: ...

    def refresh(self) -> None: ...

    def save(self, place: Path, step: int) -> str | None:
        return None

    def forget_saves(self, place: Path) -> None: ...

    def load(self, checkpoint: Path, name: str | None) -> None: ...

    def leave(self, done: bool, say: Callable[[str], None]) -> None: ...

    def describe(self) -> Iterator[str]:
        return iter(())

    def describe_processes(self) -> str | None:
        return None
