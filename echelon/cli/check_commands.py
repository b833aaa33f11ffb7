"""The commands ``echelon doctor``, which checks machines, and ``echelon verify``, which checks numerics."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from echelon.base.option_checks import at_least
from echelon.cli.options import AllAsJson, ScriptArgs
from echelon.launcher.run_options import Module


def doctor(
    context: typer.Context,
    *,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint directory to check: free space, speed, and that all hosts share it.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Write all findings as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure no speeds.")] = False,
) -> None:
    """Examine every host, every rank and the links between them; takes the options of 'echelon run' (--procs ...)."""
    from echelon.cli.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(context.args, checkpoint, save, quick))


def verify(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to verify (or, with -m, the module).")],
    args: ScriptArgs = None,
    *,
    module: Module = False,
    procs: Annotated[
        int | None, typer.Option(help="Processes.", show_default="one per visible GPU, 2 at least")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="How many GPUs, or which, as for run.")] = None,
    planned: Annotated[str | None, typer.Option("--plan", help="The plan to run, as for run.")] = None,
    steps: Annotated[int, typer.Option(help="Updates to compare.")] = 5,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative difference that counts as equal.", show_default="1e-4, or the strategy's"),
    ] = None,
    as_json: AllAsJson = False,
) -> None:
    """Train a script for some steps on several processes and in one, and report the first difference."""
    from echelon.launcher.job import check_gpus
    from echelon.tools.verify.verify_options import VerifyOptions, check_verify_options

    options = VerifyOptions(script, tuple(args or []), module, steps, tolerance, ())
    check_verify_options(options)
    at_least(1, "--procs", procs)
    if gpus is not None:
        check_gpus(gpus)
    from echelon.cli.commands.verify import launcher_argv, run_verify

    raise typer.Exit(run_verify(replace(options, argv=tuple(launcher_argv(procs, gpus, planned))), as_json))
