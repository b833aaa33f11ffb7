"""The command ``echelon run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from echelon.cli import run_options as of
from echelon.cli.options import Args, Module
from echelon.cli.stray_options import say_strayed

if TYPE_CHECKING:
    from echelon.launcher.job import Job


def run(
    context: typer.Context,
    script: of.Script,
    args: Args = None,
    *,
    module: Module = False,
    procs: of.Procs = None,
    gpus: of.Gpus = None,
    nnodes: of.Nnodes = None,
    node_rank: of.NodeRank = None,
    master: of.Master = None,
    max_restarts: of.MaxRestarts = None,
    log_dir: of.LogDir = "log",
    nic: of.Nic = None,
    join_timeout: of.JoinTimeout = 300.0,
    last_call: of.LastCall = 3.0,
    host_timeout: of.HostTimeout = 30.0,
    grace: of.Grace = 30.0,
    copies: of.Copies = None,
    stall: of.Stall = 60.0,
    on_stall: of.OnStall = "end",
    checked: of.Checked = False,
    traceback: of.Traceback = False,
    timeline: of.Timeline = None,
    servers: of.Servers = None,
    workers: of.Workers = None,
    pservers: of.Pservers = None,
    trainers: of.Trainers = None,
    trainer_id_from: of.TrainerIdFrom = None,
    state: of.State = None,
    planned: of.Planned = None,
    hosts: of.Hosts = None,
    hostfile: of.Hostfile = None,
    ssh: of.Ssh = None,
    remote_python: of.RemotePython = None,
    env: of.Env = None,
    on: of.On = None,
    ray_address: of.RayAddress = None,
) -> None:
    """Run a script on one process per GPU, on one host or several, with parameter servers or without."""
    say_strayed(context)
    from echelon.launcher.schedulers.detect_scheduler import dispatch_to_scheduler

    if (code := dispatch_to_scheduler(context)) is not None:
        raise typer.Exit(code)
    job = checked_job(**context.params)
    from echelon.launcher.launch_job import launch  # imports torch: only after all options are checked

    raise typer.Exit(launch(job))


def checked_job(script: str, args: list[str] | None, planned: str | None, **options: Any) -> Job:
    """Return the Job for the options of ``run``, after checking them."""
    from echelon.launcher.job import check
    from echelon.launcher.role_assignment import check_roles
    from echelon.launcher.schedulers.detect_scheduler import add_scheduler_options

    options = add_scheduler_options(options)
    of_roles = ("servers", "workers", "pservers", "trainers", "trainer_id_from", "state")
    roles = check_roles(**{name: options.pop(name) for name in of_roles})
    return check(script, args or [], roles=roles, plan=planned, **options)
