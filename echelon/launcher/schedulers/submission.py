"""``SlurmSubmission`` and ``KubernetesSubmission``: the options of ``echelon submit``, as the user gives them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from echelon.base.errors import UsageError
from echelon.launcher.run_options import Args, Module

MASTER_PORT, SERVER_PORT = 29500, 6174

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The script to run (or, with -m, the module), as the hosts see it.")
]
Name = Annotated[str | None, typer.Option(help="The job's name.", show_default="the script's")]
Run = Annotated[str, typer.Option(help="Options for 'echelon run' on every host: --run '--max-restarts 3'.")]


@dataclass(frozen=True)
class SlurmSubmission:
    """The options of ``echelon submit slurm``."""

    script: Script
    args: Args = None
    nodes: Annotated[int, typer.Option("--nnodes", help="Number of hosts.")] = 1
    gpus: Annotated[int | None, typer.Option(help="GPUs of each host.", show_default="none requested")] = None
    cpus: Annotated[int | None, typer.Option(help="Cores of each host.", show_default="Slurm's default")] = None
    time: Annotated[str | None, typer.Option(help="Time limit: 8:00:00, 2-12:00.")] = None
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.")] = None
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None
    options: Annotated[list[str] | None, typer.Option("--option", help="KEY=VALUE: any other option of sbatch.")] = None
    name: Name = None
    log_dir: Annotated[
        str | None,
        typer.Option(
            help="Directory of the script and logs, shared by all hosts.", show_default="runs/NAME-N, a new one"
        ),
    ] = None
    run: Run = ""
    requeue: Annotated[bool, typer.Option(help="Requeue the job after a preemption.")] = True
    module: Module = False

    @property
    def program(self) -> list[str]:
        return [self.script, *(self.args or [])]

    @property
    def job_name(self) -> str:
        return self.name or Path(self.script).stem or "job"

    @property
    def elastic(self) -> bool:
        """True if the options for ``echelon run`` contain a range of hosts."""
        return bool(re.search(r"--nnodes[ =]\d+:", " ".join(split_run(self.run))))


@dataclass(frozen=True)
class KubernetesSubmission:
    """The options of ``echelon submit k8s``."""

    script: Script
    image: Annotated[str, typer.Option(help="The container image, with echelon and the script in it.")]
    args: Args = None
    nnodes: Annotated[
        str, typer.Option(help="Pods of the job; 2:8 for one that goes on while at least 2 are there.")
    ] = "1"
    min_hosts: Annotated[int | None, typer.Option(hidden=True, help="Minimum of pods; the 2 of --nnodes 2:8.")] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs of each pod.")] = None
    cpu: Annotated[str | None, typer.Option(help="Cores of each pod: 8, 500m.")] = None
    memory: Annotated[str | None, typer.Option(help="Memory of each pod: 64Gi.")] = None
    servers: Annotated[int, typer.Option(help="Parameter servers, in pods of their own.")] = 0
    workers: Annotated[int, typer.Option(help="With servers: workers of each host.")] = 1
    state: Annotated[
        str | None, typer.Option("--state-size", help="With servers: size of the volume for each one's state.")
    ] = None
    name: Name = None
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job.", show_default="kubectl's")] = None
    environment: Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME with its value here.")] = (
        None
    )
    volumes: Annotated[
        list[str] | None, typer.Option("--volume", help="CLAIM:/path: a persistent volume for all pods.")
    ] = None
    token_secret: Annotated[
        str | None, typer.Option(help="A Secret that holds the job's secret as 'token'.", show_default="a new one")
    ] = None
    tls_secret: Annotated[
        str | None, typer.Option(help="With servers: a Secret with tls.crt, tls.key and ca.crt; they speak TLS.")
    ] = None
    grace: Annotated[float, typer.Option(help="Seconds to save in when a pod is preempted.")] = 30.0
    restarts: Annotated[int, typer.Option(help="Restarts of each pod after failures.")] = 3
    run: Run = ""
    module: Module = False

    @property
    def hosts(self) -> int:
        """The number of hosts; the maximum for an elastic job."""
        fewest, colon, most = self.nnodes.partition(":")
        if not fewest.isdigit() or (colon and not most.isdigit()):
            raise UsageError(f"--nnodes '{self.nnodes}' is neither a number of hosts (4) nor a range (2:8)")
        return int(most or fewest)

    @property
    def fewest(self) -> int | None:
        """The minimum number of hosts; None if the job is not elastic."""
        return int(self.nnodes.partition(":")[0]) if ":" in self.nnodes else self.min_hosts

    @property
    def program(self) -> list[str]:
        return [self.script, *(self.args or [])]

    @property
    def job_name(self) -> str:
        return self.name or (Path(self.script).stem or "job").lower().replace("_", "-").replace(".", "-")

    @property
    def secret(self) -> str:
        return self.token_secret or f"{self.job_name}-token"

    @property
    def servers_name(self) -> str:
        return f"{self.job_name}-servers"

    @property
    def endpoints(self) -> str:
        """The endpoints of all servers: each pod of a StatefulSet has its own name in its headless Service."""
        pods = (f"{self.servers_name}-{index}.{self.servers_name}" for index in range(self.servers))
        return ",".join(f"{pod}:{SERVER_PORT}" for pod in pods)

    @property
    def master(self) -> str:
        return f"{self.job_name}-0.{self.job_name}:{MASTER_PORT}"


def split_run(text: str) -> list[str]:
    """Split ``--run '--max-restarts 3'`` into arguments."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--run '{text}' cannot be read: {error}") from None
