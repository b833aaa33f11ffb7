"""The output directory of a run, with its checkpoints, metrics and timelines."""

from __future__ import annotations

import shutil
from pathlib import Path

from echelon.observability.runlog.log_files import is_record
from echelon.zoo.train.hooks.built_in import EVALUATIONS
from echelon.zoo.train.resolve import TrainConfig


def output_directory(resolved: TrainConfig) -> Path:
    name = f"{resolved.model.name}-{resolved.dataset.name}".replace(":", "-").replace("/", "-")
    return Path(resolved["output_dir"] or f"runs/{name}")


def forget(directory: Path) -> None:
    """Remove the output of an earlier run, and no other files."""
    for name in ("checkpoints", "tensorboard", "timeline"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("metrics.jsonl", EVALUATIONS):
        (directory / name).unlink(missing_ok=True)
    for path in directory.glob("*.json*"):
        if is_record(path.name):
            path.unlink(missing_ok=True)
