"""``BestCheckpoint``: the checkpoint with the best result of an evaluation, in a directory of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError, UsageError
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.engine.automatic_checkpoints import opened

#: Name of the directory inside that of the run's checkpoints.
BEST = "best"


class BestCheckpoint:
    """Compares results with the best one that was saved, also by an earlier process.

    directory: directory of the run's checkpoints; None if it has none
    """

    def __init__(self, world: World, directory: str | None) -> None:
        self._world, self._directory = world, directory
        self._values: dict[Path, float | None] = {}  # None: nothing is saved there

    def place(self, directory: str | Path | None) -> Path:
        """Return the directory of the best checkpoint, which holds no others."""
        if directory is not None:
            if self._directory is not None and Path(directory).absolute() == Path(self._directory).absolute():
                raise UsageError(
                    f"save_best() keeps one checkpoint alone in {directory}, where the run saves; give another"
                )
            return Path(directory)
        if self._directory is None:
            raise UsageError("save_best() needs a directory=, or distribute(..., checkpoint=Checkpoint(dir=...))")
        return Path(self._directory) / BEST

    def accepts(self, value: float, largest: bool, place: Path) -> bool:
        """Return True if ``value`` is better than the saved one, on all ranks alike; all of them call it."""
        if place not in self._values:
            self._values[place] = _saved(place)
        own = [float(value), self._values[place]]
        given: list[Any] = gather_json(own, self._world.control) if self._world.control else [own]
        if any(other[0] != given[0][0] and not _are_nan(other[0], given[0][0]) for other in given):
            values = ", ".join(f"{other[0]:g}" for other in given)
            raise UsageError(
                f"save_best() was given {values} on ranks 0 to {len(given) - 1}; give all ranks the same number, such "
                "as a result of engine.evaluate()"
            )
        best = given[0][1]
        is_better = not math.isnan(value) and (best is None or (value > best if largest else value < best))
        self._values[place] = float(value) if is_better else best
        return is_better


def _are_nan(*values: float) -> bool:
    return all(math.isnan(value) for value in values)


def _saved(place: Path) -> float | None:
    """Return the value of the newest checkpoint of a directory; None without one."""
    try:
        found = opened(place).facts.get("best")
    except CheckpointError:
        return None
    return found if isinstance(found, int | float) else None
