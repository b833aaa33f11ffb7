"""Gives each job a log directory: the one of ``--log-dir``, or a new one in ``runs``."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.base.environment import SLURM_JOB
from echelon.base.errors import UsageError
from echelon.launcher.run_options import RunOptions
from echelon.observability.runlog.run_directory import RUNS, new_run_directory


def make_log_dir(options: RunOptions, one_host: bool) -> Path:
    """Create the job's log directory and return its absolute path; raises a one-line ``UsageError``.

    The launchers of several hosts have not met yet and may share a file system, so they do not count: the directory has
    the script's name, with the number of the Slurm job if there is one.
    """
    if options.log_dir is None and one_host:
        return own_log_dir(options).absolute()
    name = options.log_dir
    if name is None:
        name = str(RUNS / "-".join((_script_name(options), *filter(None, [os.environ.get(SLURM_JOB)]))))
    path = Path(name).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir '{name}' cannot be used: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--log-dir '{name}' cannot be used: it may not be written to")
    return path


def own_log_dir(options: RunOptions) -> Path:
    """Create the log directory of a job that is the only one to have it, and return it."""
    try:
        return new_run_directory(_script_name(options))
    except OSError as error:
        raise UsageError(f"'{RUNS}' cannot be used for logs: {error.strerror}; give --log-dir") from None


def log_dir_argv(options: RunOptions) -> list[str]:
    """Return the option for launchers of other hosts, which are to write to one directory; none if it is given."""
    return [] if options.log_dir is not None else ["--log-dir", str(own_log_dir(options))]


def _script_name(options: RunOptions) -> str:
    return options.script.rpartition(".")[2] if options.module else Path(options.script).stem
