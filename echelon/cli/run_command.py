"""The command ``echelon run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from echelon.cli.expand_options import expand_options
from echelon.cli.stray_options import say_strayed
from echelon.launcher.run_options import RunOptions

if TYPE_CHECKING:
    from echelon.launcher.job import Job


@expand_options
def run(context: typer.Context, options: RunOptions) -> None:
    """Run a script on one process per GPU, on one host or several, with parameter servers or without."""
    say_strayed(context)
    from echelon.launcher.schedulers.detect_scheduler import dispatch_to_scheduler

    if (code := dispatch_to_scheduler(context)) is not None:
        raise typer.Exit(code)
    job = checked_job(options)
    from echelon.launcher.launch_job import launch  # imports torch: only after all options are checked

    raise typer.Exit(launch(job))


def checked_job(options: RunOptions) -> Job:
    """Return the Job for the options of ``run``, after checking them."""
    from echelon.launcher.job import check
    from echelon.launcher.schedulers.detect_scheduler import add_scheduler_options

    return check(add_scheduler_options(options))
