"""Commands to use before a run: ``echelon explain``, ``plan``, ``memory`` and ``bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.base.option_checks import at_least, require_one_of
from echelon.cli.expand_options import expand_options
from echelon.cli.options import AllAsJson, AsJson, ScriptArgs
from echelon.cli.preflight import require_model
from echelon.tools.memory_profile.memory_options import Inputs, MemoryOptions


def explain(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|NAME=VALUE",
            help="A .yaml or .json file, settings such as localsgd.k_steps=4, or both.",
        ),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Maker of the model: package.module:callable or path/to/file.py:callable."),
    ] = None,
    procs: Annotated[int, typer.Option(help="Processes of the job.")] = 2,
    procs_per_host: Annotated[int | None, typer.Option(help="Processes of each host.", show_default="all")] = None,
) -> None:
    """Say what a strategy will do to a step, in which order, and what it costs."""
    at_least(1, "--procs", procs)
    at_least(1, "--procs-per-host", procs_per_host)
    from echelon.cli.commands.explain import run_explain

    print(run_explain(settings or [], model, procs, procs_per_host))


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="gpt:layers=96,hidden=12288,heads=96,sequence=2048 (or bert:..., llama:...); file.py:callable or "
            "package.module:callable that returns a model, (model, batch) or (model, batch, loss); or a script.",
        ),
    ] = None,
    args: ScriptArgs = None,
    *,
    cluster: Annotated[
        str | None, typer.Option(help="4x8xH100 (hosts x devices x kind), 2x8xV100+1x8xT4, a .yaml file, or here.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--global-batch", min=1, help="Samples of the global batch.", show_default="the model's"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device: 60GB.", show_default="all of it")] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="Techniques that change the numbers: amp,fp16_allreduce,dgc,localsgd.", show_default="none"),
    ] = None,
    amp: Annotated[
        str | None, typer.Option(help="bf16, fp16 or off.", show_default="what a run does there: bf16 on new GPUs")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adam, sgd, momentum, lamb ...", show_default="the script's, or adam")
    ] = None,
    bench: Annotated[
        str | None, typer.Option(help="A file of 'echelon bench'.", show_default="the default file, if it exists")
    ] = None,
    inputs: Inputs = None,
    keep: Annotated[int | None, typer.Option(min=1, help="How many plans to show.", show_default="10")] = None,
    html: Annotated[str | None, typer.Option(help="Write a page with the schedule and the memory.")] = None,
    as_json: AllAsJson = False,
    save: Annotated[str | None, typer.Option(help="Write the best plan, for 'echelon run --plan FILE'.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="FILE", help="Explain a saved plan instead of searching for one.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="FILE FILE", help="Show two saved plans side by side.")
    ] = None,
) -> None:
    """Find the fastest plan to train a model on a cluster, without running it, and explain it."""
    if compare is not None:
        beside = {"MODEL": model, "ARGS": args, "--cluster": cluster, "--global-batch": batch, "--memory": memory}
        beside |= {
            "--allow": allow,
            "--amp": amp,
            "--optimizer": optimizer,
            "--bench": bench,
            "--input": inputs,
            "--keep": keep,
        }
        beside |= {"--html": html, "--save": save, "--explain": explain}
        from echelon.tools.plan_report.compare import compare_files

        compare_files(compare, [name for name, value in beside.items() if value], as_json)
        return
    from echelon.tools.plan_report.plan_arguments import check_plan_options, parse_plan_options

    if model is not None:
        require_model(model)
    require_one_of("--amp", amp, ("bf16", "fp16", "off"))
    given = {"cluster": cluster, "batch": batch, "memory": memory, "allow": allow, "amp": amp, "optimizer": optimizer}
    options = parse_plan_options(model, args or [], explain, given | {"bench": bench, "input": inputs, "keep": keep})
    check_plan_options(options, html, save)
    from echelon.cli.commands.plan import run_plan

    run_plan(options, explain=explain, html=html, as_json=as_json, save=save)


@expand_options
def memory(
    options: MemoryOptions,
    args: ScriptArgs = None,
    as_json: AsJson = False,
    save: Annotated[
        str | None, typer.Option("--log-dir", metavar="DIR", help="Write memory.json there, for 'echelon report DIR'.")
    ] = None,
) -> None:
    """Compute the memory of each rank of a job, by module and kind, its peak, and possible savings; nothing runs."""
    require_model(options.model)
    if options.optimizer is not None:
        from echelon.planner.profiling.named_optimizers import check_name

        check_name(options.optimizer)  # before torch is imported
    from echelon.cli.commands.memory import run_memory

    run_memory(options, args or [], as_json=as_json, save=save)


def bench(
    *,
    out: Annotated[str | None, typer.Option(help="The file to write.", show_default="the file that plans use")] = None,
    procs: Annotated[int | None, typer.Option(help="Processes.", show_default="one per GPU, or per core")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer sizes, a few seconds.")] = False,
) -> None:
    """Measure this machine, in under two minutes, into a file that plans use."""
    at_least(1, "--procs", procs)
    if out is not None:
        from echelon.planner.cluster.bench_file import make_room

        make_room(Path(out))
    from echelon.cli.commands.bench import bench as measure

    measure(out, procs, quick)
