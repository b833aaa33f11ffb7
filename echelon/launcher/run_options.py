"""``RunOptions``: the options of ``echelon run``, as the user gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")]
Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Everything after the script is the script's.")]


@dataclass(frozen=True)
class RunOptions:
    """The options of ``echelon run``, in the order of its help; the command line has one for each field."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run (or, with -m, the module).")]
    args: Args = None
    module: Module = False
    procs: Annotated[
        int | None, typer.Option(help="Processes on this host.", show_default="one per visible GPU, or 1")
    ] = None
    gpus: Annotated[str | None, typer.Option(help="How many GPUs (4), or which (0,1,3; '0,' is GPU zero alone).")] = (
        None
    )
    nnodes: Annotated[
        str | None,
        typer.Option(
            help="Number of hosts; 2:8 for a job that goes on while at least 2 are there and takes in up to 8.",
            show_default="PADDLE_NUM_TRAINERS or PADDLE_TRAINERS_NUM, or 1",
        ),
    ] = None
    node_rank: Annotated[
        int | None, typer.Option(help="This host's place among the hosts; 0 is the one at --master.")
    ] = None
    master: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where the hosts meet, the same on every host; more by commas stand in for it."),
    ] = None
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="How often to start again what failed.", show_default="0; elastic 3; with servers 3 for each"
        ),
    ] = None
    log_dir: Annotated[
        str | None,
        typer.Option(help="Directory for rank-N.log, one file per rank.", show_default="runs/SCRIPT-N, a new one"),
    ] = None
    share_log_dir: Annotated[
        bool, typer.Option("--share-log-dir", help="Start even if another job writes into --log-dir.")
    ] = False
    nic: Annotated[str | None, typer.Option(help="Network interface for Gloo and NCCL.")] = None
    join_timeout: Annotated[float, typer.Option(help="Seconds to wait for the other hosts, or roles.")] = 300.0
    last_call: Annotated[
        float, typer.Option(help="Elastic: seconds without a newcomer after which those that are there begin.")
    ] = 3.0
    host_timeout: Annotated[float, typer.Option(help="Seconds after which a silent host is lost.")] = 30.0
    grace: Annotated[float, typer.Option(help="Seconds for ranks to save and leave when they are asked to.")] = 30.0
    copies: Annotated[
        int | None,
        typer.Option(
            help="After every N steps ranks copy their state into memory; 0: never.", show_default="elastic 1"
        ),
    ] = None
    stall: Annotated[float, typer.Option(help="Seconds that a rank may be late until it is reported; 0: off.")] = 60.0
    on_stall: Annotated[str, typer.Option(help="What to do about a rank that is late: end or wait.")] = "end"
    checked: Annotated[
        bool, typer.Option("--check", help="Compare the calls of all ranks in every step, not in the first ones only.")
    ] = False
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show errors with their whole traceback, not in one line.")
    ] = False
    timeline: Annotated[
        str | None,
        typer.Option(metavar="[STEPS]", help="Record these steps (5:10) of all ranks; alone: five after ten others."),
    ] = None
    servers: Annotated[int | None, typer.Option(help="Parameter servers on this host.")] = None
    workers: Annotated[int | None, typer.Option(help="With servers: workers on this host.", show_default="1")] = None
    pservers: Annotated[
        str | None, typer.Option(help="Several hosts: HOST:PORT,... of all servers; those of this host start here.")
    ] = None
    trainers: Annotated[int | None, typer.Option(help="With --pservers: workers of all hosts.")] = None
    trainer_id_from: Annotated[int | None, typer.Option(help="With --pservers: id of the first worker here.")] = None
    state: Annotated[
        str | None, typer.Option(help="Where servers keep their state, to go on from it by the same command.")
    ] = None
    plan: Annotated[
        str | None, typer.Option(help="The plan to run, from 'echelon plan --save', on as many processes.")
    ] = None
    hosts: Annotated[str | None, typer.Option(help="Start it on these hosts, over ssh: a:8,b:8 (host:processes).")] = (
        None
    )
    hostfile: Annotated[str | None, typer.Option(help="A file with a host a line: gpu01 slots=8.")] = None
    ssh: Annotated[
        str | None, typer.Option(help="With hosts: how to reach them ('ssh -p 2222').", show_default="ssh")
    ] = None
    remote_python: Annotated[str | None, typer.Option(help="With hosts: Python there.", show_default="as here")] = None
    env: Annotated[list[str] | None, typer.Option(help="With hosts: NAME[=VALUE] that they are to see, too.")] = None
    on: Annotated[str | None, typer.Option(help="Start it on nodes of a cluster: ray.")] = None
    ray_address: Annotated[
        str | None, typer.Option(help="With --on ray: where the cluster is.", show_default="the one running here")
    ] = None
