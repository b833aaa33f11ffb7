"""The commands ``echelon submit slurm`` and ``echelon submit k8s``."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.base.console import say
from echelon.cli.expand_options import expand_options
from echelon.cli.parsing import EchelonCommand, EchelonGroup
from echelon.cli.stray_options import refuse_strayed
from echelon.launcher.schedulers.submission import KubernetesSubmission, SlurmSubmission

submit = typer.Typer(cls=EchelonGroup, help="Hand a job to a cluster: Slurm or Kubernetes.", no_args_is_help=True)
_SCRIPT_IS_LAST = {"allow_interspersed_args": False}

DryRun = Annotated[bool, typer.Option(help="Print what would be submitted, and do nothing.")]


@submit.command(cls=EchelonCommand, context_settings=_SCRIPT_IS_LAST)
@expand_options
def slurm(context: typer.Context, options: SlurmSubmission, dry_run: DryRun = False) -> None:
    """Write a batch script, and submit it by sbatch."""
    refuse_strayed(context)
    from echelon.launcher.schedulers import slurm as scheduler

    print(
        scheduler.script(options) if dry_run else f"echelon: {scheduler.submit(options)}", end="" if dry_run else "\n"
    )


@submit.command(cls=EchelonCommand, context_settings=_SCRIPT_IS_LAST)
@expand_options
def k8s(
    context: typer.Context,
    options: KubernetesSubmission,
    dry_run: DryRun = False,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write the documents into this file.")] = None,
) -> None:
    """Describe the job to Kubernetes, and hand it over by kubectl."""
    refuse_strayed(context)
    from echelon.launcher.schedulers import kubernetes

    if dry_run:
        print(kubernetes.manifest(options), end="")
    else:
        say(kubernetes.submit(options, out), stdout=True)
