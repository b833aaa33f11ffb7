"""Detects where ``echelon run`` is to run a job: on named hosts, in a Slurm allocation, on Ray, or in a pod."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from echelon.base.errors import UsageError
from echelon.launcher.schedulers import kubernetes, slurm
from echelon.launcher.schedulers.ray import run_on_ray
from echelon.launcher.schedulers.ssh import run_on_hosts

#: Options of ``run`` that require hosts reached over ssh.
OF_SSH = ("ssh", "remote_python", "env")
#: Options that name the hosts or the cluster of the job.
OF_CLUSTERS = ("hosts", "hostfile", "on", "ray_address")


def dispatch_to_scheduler(context: Any, first: Callable[[], None] | None = None) -> int | None:
    """Start the job on named hosts or on a cluster, and return its exit code; ``None`` if it is to run here.

    ``context`` is click's, of the command ``run``; ``first`` is called after all options have been validated.
    """
    options = context.params
    if options.get("on") is not None:
        return run_on_ray(context, first)
    if options.get("ray_address") is not None:
        raise UsageError("--ray-address is for jobs on a Ray cluster; add --on ray")
    if options["hosts"] is not None or options["hostfile"] is not None:
        return run_on_hosts(context, first)
    if odd := next((name for name in OF_SSH if options[name]), None):
        raise UsageError(f"--{odd.replace('_', '-')} is for other hosts; name them by --hosts or --hostfile")
    if nodes := slurm.needs_srun(options, os.environ):
        slurm.call_srun(nodes, sys.argv[1:], elastic=":" in str(options["nnodes"]))
    return None


def add_scheduler_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a launcher that runs here, completed by the scheduler's variables."""
    rest = {name: value for name, value in options.items() if name not in (*OF_SSH, *OF_CLUSTERS)}
    rest |= slurm.read_slurm_step(rest, os.environ)
    kubernetes.await_master(rest["master"], rest["join_timeout"], os.environ)
    return rest
