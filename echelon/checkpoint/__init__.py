"""One logical checkpoint per step: written by any number of ranks, complete or absent, loaded on any other number.

Tensors lie in safetensors files, everything else in one JSON index; nothing in a checkpoint is ever unpickled.
"""

from echelon.checkpoint.layout import find, latest
from echelon.checkpoint.stored import Stored, verify
from echelon.checkpoint.weights import export
from echelon.checkpoint.writer import Writer
from echelon.errors import CheckpointError

__all__ = ["CheckpointError", "Stored", "Writer", "export", "find", "latest", "verify"]
