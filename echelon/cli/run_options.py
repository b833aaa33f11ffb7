"""The options of ``echelon run``."""

from __future__ import annotations

from typing import Annotated

import typer

# ---- script and processes ----

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run (or, with -m, the module).")]
Procs = Annotated[int | None, typer.Option(help="Processes on this host.", show_default="one per visible GPU, or 1")]
Gpus = Annotated[str | None, typer.Option(help="How many GPUs (4), or which (0,1,3; '0,' is GPU zero alone).")]
Planned = Annotated[
    str | None,
    typer.Option("--plan", help="The plan to run, from 'echelon plan --save', on as many processes."),
]

# ---- several hosts ----

Nnodes = Annotated[
    str | None,
    typer.Option(
        help="Number of hosts; 2:8 for a job that goes on while at least 2 are there and takes in up to 8.",
        show_default="PADDLE_NUM_TRAINERS or PADDLE_TRAINERS_NUM, or 1",
    ),
]
NodeRank = Annotated[int | None, typer.Option(help="This host's place among the hosts; 0 is the one at --master.")]
Master = Annotated[
    str | None,
    typer.Option(help="HOST:PORT where the hosts meet, the same on every host; more by commas stand in for it."),
]
Nic = Annotated[str | None, typer.Option(help="Network interface for Gloo and NCCL.")]
JoinTimeout = Annotated[float, typer.Option(help="Seconds to wait for the other hosts, or roles.")]
LastCall = Annotated[
    float, typer.Option(help="Elastic: seconds without a newcomer after which those that are there begin.")
]
HostTimeout = Annotated[float, typer.Option(help="Seconds after which a silent host is lost.")]

# ---- failures ----

MaxRestarts = Annotated[
    int | None,
    typer.Option(help="How often to start again what failed.", show_default="0; elastic 3; with servers 3 for each"),
]
Grace = Annotated[float, typer.Option(help="Seconds for ranks to save and leave when they are asked to.")]
Copies = Annotated[
    int | None,
    typer.Option(help="After every N steps ranks copy their state into memory; 0: never.", show_default="elastic 1"),
]
Stall = Annotated[float, typer.Option(help="Seconds that a rank may be late before it is told; 0: never.")]
OnStall = Annotated[str, typer.Option(help="What to do about a rank that is late: end or wait.")]
Checked = Annotated[
    bool, typer.Option("--check", help="Compare the calls of all ranks in every step, not in the first ones only.")
]
Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show errors with their whole traceback, not in one line.")
]

# ---- logs and traces ----

LogDir = Annotated[str, typer.Option(help="Directory for rank-N.log, one file per rank.")]
Timeline = Annotated[
    str | None,
    typer.Option(metavar="[STEPS]", help="Record these steps (5:10) of all ranks; alone: five after ten others."),
]

# ---- parameter servers ----

Servers = Annotated[int | None, typer.Option(help="Parameter servers on this host.")]
Workers = Annotated[int | None, typer.Option(help="With servers: workers on this host.", show_default="1")]
Pservers = Annotated[
    str | None, typer.Option(help="Several hosts: HOST:PORT,... of all servers; those of this host start here.")
]
Trainers = Annotated[int | None, typer.Option(help="With --pservers: workers of all hosts.")]
TrainerIdFrom = Annotated[int | None, typer.Option(help="With --pservers: id of the first worker here.")]
State = Annotated[
    str | None, typer.Option(help="Where servers keep their state, to go on from it by the same command.")
]

# ---- remote hosts and clusters ----

Hosts = Annotated[str | None, typer.Option(help="Start it on these hosts, over ssh: a:8,b:8 (host:processes).")]
Hostfile = Annotated[str | None, typer.Option(help="A file with a host a line: gpu01 slots=8.")]
Ssh = Annotated[str | None, typer.Option(help="With hosts: how to reach them ('ssh -p 2222').", show_default="ssh")]
RemotePython = Annotated[str | None, typer.Option(help="With hosts: Python there.", show_default="as here")]
Env = Annotated[list[str] | None, typer.Option(help="With hosts: NAME[=VALUE] that they are to see, too.")]
On = Annotated[str | None, typer.Option(help="Start it on nodes of a cluster: ray.")]
RayAddress = Annotated[
    str | None, typer.Option(help="With --on ray: where the cluster is.", show_default="the one running here")
]
