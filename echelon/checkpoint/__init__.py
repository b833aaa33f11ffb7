"""Checkpoints: one per step, written by any number of ranks, complete or absent, loaded on any other number.

Tensors are in safetensors files, everything else in one JSON index; nothing in a checkpoint is ever unpickled.
"""

from typing import TYPE_CHECKING

from echelon.base.late_import import late_import

if TYPE_CHECKING:
    from echelon.base.errors import CheckpointError
    from echelon.checkpoint.directory import find, latest
    from echelon.checkpoint.reader import Stored, verify
    from echelon.checkpoint.weights import export
    from echelon.checkpoint.writer import Writer

__all__ = ["CheckpointError", "Stored", "Writer", "export", "find", "latest", "verify"]

#: Imported on first use: torch's planners take 0.6 s, and a restarted server needs none of them.
__getattr__ = late_import(
    __name__,
    {
        "CheckpointError": "echelon.base.errors",
        "Stored": "echelon.checkpoint.reader",
        "Writer": "echelon.checkpoint.writer",
        "export": "echelon.checkpoint.weights",
        "find": "echelon.checkpoint.directory",
        "latest": "echelon.checkpoint.directory",
        "verify": "echelon.checkpoint.reader",
    },
)
