"""The commands ``echelon submit slurm`` and ``echelon submit k8s``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.cli.parsing import EchelonCommand, EchelonGroup
from echelon.cli.stray_options import refuse_strayed
from echelon.launcher.run_options import Args, Module

submit = typer.Typer(cls=EchelonGroup, help="Hand a job to a cluster: Slurm or Kubernetes.", no_args_is_help=True)
_SCRIPT_IS_LAST = {"allow_interspersed_args": False}

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The script to run (or, with -m, the module), as the hosts see it.")
]
Run = Annotated[str, typer.Option(help="Options for 'echelon run' on every host: --run '--max-restarts 3'.")]
DryRun = Annotated[bool, typer.Option(help="Print what would be submitted, and do nothing.")]


@submit.command(cls=EchelonCommand, context_settings=_SCRIPT_IS_LAST)
def slurm(
    context: typer.Context,
    script: Script,
    args: Args = None,
    *,
    nodes: Annotated[int, typer.Option("--nnodes", help="Number of hosts.")] = 1,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each.", show_default="none asked for")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each.", show_default="as Slurm is set up")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit: 8:00:00, 2-12:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Where to queue.")] = None,
    account: Annotated[str | None, typer.Option(help="Who pays.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE: any other option of sbatch.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name.", show_default="the script's")] = None,
    log_dir: Annotated[str, typer.Option(help="For the batch script and all logs; every host must see it.")] = "log",
    run: Run = "",
    requeue: Annotated[bool, typer.Option(help="Queue again when the job had to go and has saved.")] = True,
    module: Module = False,
    dry_run: DryRun = False,
) -> None:
    """Write a batch script, and submit it by sbatch."""
    refuse_strayed(context)
    from echelon.launcher.schedulers import slurm as scheduler

    asked = scheduler.SlurmSubmission(
        program=_program(script, args),
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        time=time,
        name=name or _job_name(script),
        partition=partition,
        account=account,
        options=option or [],
        run=run,
        module=module,
        requeue=requeue,
        log_dir=log_dir,
    )
    print(scheduler.script(asked) if dry_run else f"echelon: {scheduler.submit(asked)}", end="" if dry_run else "\n")


@submit.command(cls=EchelonCommand, context_settings=_SCRIPT_IS_LAST)
def k8s(
    context: typer.Context,
    script: Script,
    args: Args = None,
    *,
    image: Annotated[str, typer.Option(help="The container image, with echelon and the script in it.")],
    nnodes: Annotated[
        str, typer.Option(help="Pods of the job; 2:8 for one that goes on while at least 2 are there.")
    ] = "1",
    min_hosts: Annotated[int | None, typer.Option(hidden=True, help="The 2 of --nnodes 2:8.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores of each: 8, 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each: 64Gi.")] = None,
    servers: Annotated[int, typer.Option(help="Parameter servers, in pods of their own.")] = 0,
    workers: Annotated[int, typer.Option(help="With servers: workers of each host.")] = 1,
    state: Annotated[
        str | None, typer.Option("--state-size", help="With servers: size of the volume for each one's state.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The job's name.", show_default="the script's")] = None,
    namespace: Annotated[str | None, typer.Option(help="Where to make it.", show_default="kubectl's")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, or NAME with its value here.")] = None,
    volume: Annotated[list[str] | None, typer.Option(help="CLAIM:/path: a persistent volume for all pods.")] = None,
    token_secret: Annotated[
        str | None, typer.Option(help="A Secret that holds the job's secret as 'token'.", show_default="a new one")
    ] = None,
    tls_secret: Annotated[
        str | None, typer.Option(help="With servers: a Secret with tls.crt, tls.key and ca.crt; they speak TLS.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds to save in when a pod is asked to go.")] = 30.0,
    restarts: Annotated[int, typer.Option(help="How often each pod may fail and come back.")] = 3,
    run: Run = "",
    module: Module = False,
    dry_run: DryRun = False,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write the documents into this file.")] = None,
) -> None:
    """Describe the job to Kubernetes, and hand it over by kubectl."""
    refuse_strayed(context)
    from echelon.launcher.schedulers import kubernetes

    fewest, most = _pods(nnodes)
    asked = kubernetes.KubernetesSubmission(
        program=_program(script, args),
        image=image,
        hosts=most,
        name=name or _job_name(script).lower().replace("_", "-").replace(".", "-"),
        namespace=namespace,
        min_hosts=min_hosts if fewest is None else fewest,
        gpus=gpus,
        cpu=cpu,
        memory=memory,
        environment=env or [],
        volumes=volume or [],
        servers=servers,
        workers=workers,
        state=state,
        token_secret=token_secret,
        tls_secret=tls_secret,
        run=run,
        module=module,
        grace=grace,
        restarts=restarts,
    )
    if dry_run:
        print(kubernetes.manifest(asked), end="")
    else:
        say(kubernetes.submit(asked, out), stdout=True)


def _pods(nnodes: str) -> tuple[int | None, int]:
    """Return the smallest number of pods, which is None if the job is not elastic, and the largest."""
    fewest, colon, most = nnodes.partition(":")
    if not fewest.isdigit() or (colon and not most.isdigit()):
        raise UsageError(f"--nnodes '{nnodes}' is neither a number of hosts (4) nor a range (2:8)")
    return (int(fewest), int(most)) if colon else (None, int(fewest))


def _program(script: str, args: list[str] | None) -> list[str]:
    return [script, *(args or [])]


def _job_name(script: str) -> str:
    return Path(script).stem or "job"
