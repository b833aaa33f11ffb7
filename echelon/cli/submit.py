"""The words of ``echelon submit slurm`` and ``echelon submit k8s``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Args, Module

submit = typer.Typer(help="Hand a job to a cluster: Slurm or Kubernetes.", no_args_is_help=True)
_SCRIPT_IS_LAST = {"allow_interspersed_args": False}

Script = Annotated[str, typer.Argument(help="The script to run (or, with -m, the module), as the hosts see it.")]
Run = Annotated[str, typer.Option(help="Options for 'echelon run' on every host: --run '--max-restarts 3'.")]
DryRun = Annotated[bool, typer.Option(help="Print what would be submitted, and do nothing.")]


@submit.command(context_settings=_SCRIPT_IS_LAST)
def slurm(
    script: Script,
    args: Args = None,
    *,
    nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
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
    from echelon.launcher.schedulers import slurm as scheduler

    asked = scheduler.Submission(
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


@submit.command(context_settings=_SCRIPT_IS_LAST)
def k8s(
    script: Script,
    args: Args = None,
    *,
    image: Annotated[str, typer.Option(help="The container image, with echelon and the script in it.")],
    hosts: Annotated[int, typer.Option(help="Pods of the job.")] = 1,
    min_hosts: Annotated[
        int | None, typer.Option(help="Elastic: the fewest that the job goes on with.", show_default="all")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores of each: 8, 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each: 64Gi.")] = None,
    servers: Annotated[int, typer.Option(help="Parameter servers, in pods of their own.")] = 0,
    workers: Annotated[int, typer.Option(help="With servers: workers of each host.")] = 1,
    state: Annotated[str | None, typer.Option(help="With servers: size of the volume for each one's state.")] = None,
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
    out: Annotated[str | None, typer.Option("-o", help="Write the documents into this file.")] = None,
) -> None:
    """Describe the job to Kubernetes, and hand it over by kubectl."""
    from echelon.launcher.schedulers import kubernetes

    asked = kubernetes.Submission(
        program=_program(script, args),
        image=image,
        hosts=hosts,
        name=name or _job_name(script).lower().replace("_", "-").replace(".", "-"),
        namespace=namespace,
        min_hosts=min_hosts,
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
        print(f"echelon: {kubernetes.submit(asked, out)}")


def _program(script: str, args: list[str] | None) -> list[str]:
    return [script, *(args or [])]


def _job_name(script: str) -> str:
    return Path(script).stem or "job"
