"""Resuming: where training goes on from, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import CheckpointError, Damaged
from echelon.keep import Keeper
from echelon.memory.memories import Memories
from echelon.parallel.collective import gather_json
from echelon.watch.voice import Voice
from echelon.world import World

if TYPE_CHECKING:
    from echelon.assembly import Parts
    from echelon.checkpoint import Stored
    from echelon.ps.served import Served


class Resuming:
    """Puts state back in its place. Its calls return the last step of what is gone on from.

    A pipeline that no batch has cut has no place for it yet: then only loaders go on, and the rest waits for ``takes``.
    """

    def __init__(
        self, world: World, keeper: Keeper, served: Served | None, memories: Memories | None, voice: Voice
    ) -> None:
        self._world, self._keeper, self._served, self._memories = world, keeper, served, memories
        self._voice = voice
        self._parts: Parts | None = None
        self._waiting: Stored | None = None

    def takes(self, parts: Parts, step: int) -> int:
        """From now on there is a place for it; what was waiting for one is put there. ``step``: where nothing was."""
        self._parts, waiting = parts, self._waiting
        return step if waiting is None else self._restore(waiting, parts)

    def load(self, source: str | Path | Stored) -> int:
        if self._parts is not None:
            return self._restore(source, self._parts)
        self._waiting = self._keeper.peek(source)
        return self._waiting.step

    def newest(self, step: int) -> int:
        """Go on from what this worker left with servers, from copies in memory, or from the newest checkpoint that is
        whole. ``step``: where there is nothing."""
        if self._served is not None and (left := self._served.resumed) is not None:
            step = self._keeper.take_up(left)
            self._voice.resumed(f"went on after step {step}, where this worker was before it was started again")
            return step
        if self._memories is not None and (copies := self._memories.newest()) is not None:
            return self.load(copies)
        return self._first_whole(self._keeper.kept(), step)

    def _restore(self, source: str | Path | Stored, parts: Parts) -> int:
        stored = self._keeper.load(source, loaders=self._waiting is None, served=self._served)
        self._waiting = None
        if parts.shards is not None:
            parts.shards.refresh()
        self._voice.resumed(f"resumed from {stored.title}, after step {stored.step}{stored.origin}")
        if stored.world_size != self._world.size:
            ranks = f"saved by {stored.world_size} ranks, resumed by {self._world.size}"
            self._voice.say(f"{ranks}: random streams start afresh")
        return stored.step

    def _first_whole(self, checkpoints: Sequence[Path], step: int) -> int:
        """Ranks read different parts of a checkpoint: what one of them finds damaged, none goes on from."""
        found: list[str | None] = []
        for path in checkpoints:
            last, damage = self._met(path)
            found = [damage] if self._world.control is None else gather_json(damage, self._world.control)
            if not any(found):
                return last
            self._voice.say(f"{next(filter(None, found))}; looking at the one before it")
        if any(found):
            raise CheckpointError(f"none of {len(checkpoints)} checkpoints is whole: {next(filter(None, found))}")
        return step

    def _met(self, path: Path) -> tuple[int, str | None]:
        """Go on from there; or why that cannot be, and nothing here is to be trusted."""
        try:
            if self._parts is None and self._world.rank == 0:  # too late to choose another when it is read
                self._keeper.verify(path)
            return self.load(path), None
        except Damaged as error:
            return 0, str(error)
