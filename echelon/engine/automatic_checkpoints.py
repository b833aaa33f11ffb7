"""``AutomaticCheckpoints``: the directory and interval of ``distribute(checkpoint=...)``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.base.errors import Damaged
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.checkpoint.directory_lock import DirectoryLocks
from echelon.distributed.world import World

if TYPE_CHECKING:  # the checkpoint modules take 0.5 s to import, so only a run that saves imports them
    from echelon.checkpoint import Stored


class AutomaticCheckpoints:
    """The checkpoints that a run writes by itself and resumes from.

    settings: None if the script writes all checkpoints itself
    """

    def __init__(self, world: World, settings: Checkpoint | None, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.locks = DirectoryLocks(world.control, writes=world.rank == 0, say=say)

    @property
    def directory(self) -> str | None:
        return self.settings.dir if self.settings is not None else None

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due at this step. The first call locks the directory."""
        if self.settings is None or not self.settings.every:
            return False
        if not self.locks:
            self.locks.take(Path(self.settings.dir))
        return step % self.settings.every == 0

    def kept(self) -> list[Path]:
        """Return the checkpoints that the same command can resume from, newest first."""
        if self.settings is None or not self.settings.resume:
            return []
        from echelon.checkpoint.directory import complete

        return [path for _, path in sorted(complete(Path(self.settings.dir)).items(), reverse=True)]

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none or the newest is damaged."""
        try:
            return next((opened(path).step for path in self.kept()), 0)
        except Damaged:
            return 0


def opened(source: str | Path | Stored) -> Stored:
    """Return the checkpoint of that path, or the newest one of that directory."""
    from echelon.checkpoint import Stored, find

    return source if isinstance(source, Stored) else Stored(find(source))
