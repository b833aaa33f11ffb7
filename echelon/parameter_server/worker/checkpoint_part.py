"""The part of a checkpoint that servers, or workers with tables, have written: a directory beside the checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.formatting import brief
from echelon.checkpoint.directory import complete
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint
from echelon.parameter_server.persistence.requested_path import absolute
from echelon.parameter_server.worker.sparse_lookup import SparseLookup


def part_name(step: int) -> str:
    """Return the name of the directory."""
    return f"servers-{step:08d}"


def part_of(checkpoint: Path, name: str | None) -> Path:
    """Return the directory that a checkpoint names."""
    if name is None:
        raise CheckpointError(
            f"{checkpoint} was saved without sparse tables or servers; it cannot be resumed with them"
        )
    if not (isinstance(name, str) and re.fullmatch(r"servers-\d{8,20}", name)):
        raise CheckpointError(f"{checkpoint} names {brief(name)} as its servers' part; use another checkpoint")
    return absolute(checkpoint.parent / name)


def forget_parts(place: Path) -> None:
    """Remove the parts whose checkpoint is removed."""
    kept = {part_name(step) for step in complete(place)}
    newest = max(kept, default="")
    for left in place.glob("servers-*"):
        if left.name not in kept and left.name < newest:
            shutil.rmtree(left, ignore_errors=True)


def refuse_merging(reading: SparseLookup) -> None:
    """Raise ``UsageError`` if gradients of rows wait for an update, which no checkpoint contains."""
    if reading.merges:
        raise UsageError(
            "a checkpoint does not contain gradients of rows: with gradient_merge, save after the engine.step() that "
            "updates"
        )


def refuse_dense_state(part: Path) -> None:
    """Raise ``CheckpointError`` if servers have saved optimizer state that this process's optimizer would lack."""
    with ServerCheckpoint(part) as saved:
        job = saved.jobs[0]
    has_state = job.dense.kind != "SGD" or any(group.get("momentum") for group in job.dense.groups)
    if job.blocks and has_state:
        raise CheckpointError(
            f"{part} has the {job.dense.kind} state of dense parameters that were on servers, and here workers step "
            "them; resume it with servers and the mode that saved it, or train with ParameterServer(dense='allreduce')"
        )
