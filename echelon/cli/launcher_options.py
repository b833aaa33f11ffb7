"""The options of ``echelon run`` for ``echelon train``, which passes them to the launcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping


@functools.cache
def launcher_options() -> dict[str, bool]:
    """Return the names of the options of ``echelon run``, with _ for -, and True for those that take a value.

    ``-m`` is not included, because the train command sets it.
    """
    from echelon.cli.app import run_command

    options = [param for param in run_command().params if param.opts[0].startswith("--")]
    return {param.opts[0][2:].replace("-", "_"): not param.is_flag for param in options if param.name != "help"}


def launch_module(
    module: str,
    args: list[str],
    options: Mapping[str, str | bool],
    first: Callable[[], None],
    check: Callable[[int], None],
) -> int:
    """Run ``echelon run [options] -m module args`` and return its exit code.

    first: function called after all options are checked, before the launch
    check: function called with the number of ranks, unless the job is elastic or has a plan or servers
    """
    from echelon.cli import checked_job
    from echelon.cli.app import run_command
    from echelon.launcher.launch_job import launch
    from echelon.launcher.run_options import RunOptions
    from echelon.launcher.schedulers.detect_scheduler import dispatch_to_scheduler

    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    with run_command().make_context("echelon train", [*words, "-m", module, *args]) as context:
        if (code := dispatch_to_scheduler(context, first)) is not None:
            return code
        job = checked_job(RunOptions(**context.params))
    if job.elastic is None and job.roles is None and job.plan is None:
        check(job.procs * job.nnodes)
    first()
    return launch(job)
