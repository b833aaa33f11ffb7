"""The launcher's options, as ``echelon run`` has them: known in one place, and shared by ``echelon train``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping


@functools.cache
def launcher_options() -> dict[str, bool]:
    """Names of its options, with _ for -, and whether each takes a value; ``-m`` is the train command's own affair."""
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
    """As ``echelon run [options] -m module args``.

    first: done once all that was asked for is found right
    check: called with the number of ranks, where it is known and no plan or server decides what each does
    """
    from echelon.cli import checked_job
    from echelon.cli.app import run_command
    from echelon.launcher.launch_job import launch
    from echelon.launcher.schedulers.detect_scheduler import dispatch_to_scheduler

    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    with run_command().make_context("echelon train", [*words, "-m", module, *args]) as context:
        if (code := dispatch_to_scheduler(context, first)) is not None:
            return code
        job = checked_job(**context.params)
    if job.elastic is None and job.roles is None and job.plan is None:
        check(job.procs * job.nnodes)
    first()
    return launch(job)
