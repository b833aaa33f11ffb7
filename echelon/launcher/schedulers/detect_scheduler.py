"""Detects where ``echelon run`` is to run a job: on named hosts, in a Slurm allocation, on Ray, or in a pod."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from echelon.base.errors import UsageError
from echelon.launcher.run_options import RunOptions
from echelon.launcher.schedulers import kubernetes, slurm

#: Options of ``run`` that require hosts reached over ssh.
OF_SSH = ("ssh", "remote_python", "env")


def dispatch_to_scheduler(context: Any, first: Callable[[], None] | None = None) -> int | None:
    """Start the job on named hosts or on a cluster, and return its exit code; ``None`` if it is to run here.

    ``context`` is click's, of the command ``run``; ``first`` is called after all options have been validated.
    """
    options = RunOptions(**context.params)
    if options.on is not None:
        from echelon.launcher.schedulers.ray import run_on_ray

        return run_on_ray(context, first)
    if options.ray_address is not None:
        raise UsageError("--ray-address is for jobs on a Ray cluster; add --on ray")
    if options.hosts is not None or options.hostfile is not None:
        from echelon.launcher.schedulers.ssh import run_on_hosts

        return run_on_hosts(context, first)
    if odd := next((name for name in OF_SSH if getattr(options, name)), None):
        raise UsageError(f"--{odd.replace('_', '-')} is for other hosts; name them by --hosts or --hostfile")
    if nodes := slurm.needs_srun(options, os.environ):
        slurm.call_srun(nodes, sys.argv[1:], elastic=":" in (options.nnodes or ""))
    return None


def add_scheduler_options(options: RunOptions) -> RunOptions:
    """Return the options of a launcher that runs here, completed by the scheduler's variables."""
    if step := slurm.read_slurm_step(options, os.environ):
        options = replace(options, **step | {"nnodes": str(step["nnodes"])})
    kubernetes.await_master(options.master, options.join_timeout, os.environ)
    return options
