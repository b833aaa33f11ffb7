"""CheckpointSaverHook: saves a checkpoint every ``save_checkpoints_steps`` steps, in the background."""

from __future__ import annotations

from typing import Any

from echelon.zoo.entry import Request
from echelon.zoo.train.hooks.every import steps_of
from echelon.zoo.train.hooks.hook import Hook


class CheckpointSaverHook(Hook):
    def checkpoint_options(self, request: Request) -> dict[str, Any]:
        every = steps_of(request, "save_checkpoints_steps")
        return {"every": every} if every else {}
