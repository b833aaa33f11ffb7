"""Build the learning-rate schedule from the parameters of the command."""

from __future__ import annotations

from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.optim import Schedule
from echelon.zoo.entry import Request

_NOT_YET = 10**12  #: number of steps until the loader gives the real one; no decay depends on it at step 0


def make_schedule(optimizer: Optimizer, request: Request) -> Schedule:
    """Return the schedule; ``stretch`` later sets the length of the run."""
    return Schedule(
        optimizer,
        decay=request.get("decay_scheme", request["learning_rate_decay_type"]),
        total_steps=_NOT_YET,
        decay_steps=_NOT_YET,
        decay_factor=request["learning_rate_decay_factor"],
        end_lr=request["end_learning_rate"],
        warmup_steps=request["warmup_steps"],
        warmup=request["warmup_scheme"],
    )


def stretch(schedule: Schedule, request: Request, total_steps: int | None, steps_per_epoch: int | None) -> None:
    """Fit the schedule to a run of ``total_steps``, of which an epoch has ``steps_per_epoch``."""
    if schedule.decay == "fixed":
        return
    if schedule.decay == "exponential":
        if steps_per_epoch is None:
            raise UsageError(
                "exponential decay counts epochs, and this data set's length is not known before it is read; give "
                "--num_sample_per_epoch, or --learning_rate_decay_type fixed"
            )
        schedule.decay_steps = max(round(request["num_epochs_per_decay"] * steps_per_epoch), 1)
        return
    if total_steps is None:
        raise UsageError(
            f"{schedule.decay} decay needs the number of steps, which is not known before the data is read; give "
            "--stop_at_step or --num_sample_per_epoch"
        )
    schedule.total_steps = schedule.decay_steps = total_steps
