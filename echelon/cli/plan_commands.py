"""Commands to use before a run: ``echelon explain``, ``plan``, ``memory`` and ``bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from echelon.cli.options import AllAsJson, Inputs, ScriptArgs
from echelon.cli.preflight import require_model, require_one_of


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
    _check_procs(procs)
    _check_procs(procs_per_host, "--procs-per-host")
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
    asked = parse_plan_options(model, args or [], explain, given | {"bench": bench, "input": inputs, "keep": keep})
    check_plan_options(asked, html, save)
    from echelon.cli.commands.plan import run_plan

    run_plan(asked, explain=explain, html=html, as_json=as_json, save=save)


def memory(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="A script, zoo:NAME, gpt:layers=...,..., or file.py:callable, as for 'echelon plan'."),
    ],
    args: ScriptArgs = None,
    *,
    procs: Annotated[
        int | None, typer.Option(help="Processes of the job.", show_default="the fewest that the options need")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Samples in a batch of each copy of the model.",
            show_default="the model's",
        ),
    ] = None,
    plan: Annotated[str | None, typer.Option(help="A plan from 'echelon plan --save'; it sets all the rest.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Stages of a pipeline; cut by cost.")] = None,
    split: Annotated[
        int | None, typer.Option(min=1, help="Processes that share each layer that plans can split.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of a batch.", show_default="4 with stages")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="1f1b, gpipe, interleaved or zero-bubble.", show_default="1f1b")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: device whose kernels count.", show_default="the one here")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam, sgd, momentum, lamb ...", show_default="the script's, or adamw")
    ] = None,
    amp: Annotated[
        str | None, typer.Option(help="bf16, fp16 or off.", show_default="the script's; else bf16 on GPUs")
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute/--no-recompute", help="Keep few activations.", show_default="the script's, or no"),
    ] = None,
    low_memory: Annotated[
        bool | None,
        typer.Option("--low-memory/--no-low-memory", help="Six bytes a parameter.", show_default="the script's, or no"),
    ] = None,
    shard: Annotated[
        int | None, typer.Option(help="0 to 3: level of sharding (ZeRO).", show_default="the script's, or 0")
    ] = None,
    merge: Annotated[
        int | None,
        typer.Option(
            "--gradient-merge", min=1, help="Batches that make up one update.", show_default="the script's, or 1"
        ),
    ] = None,
    input: Inputs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    save: Annotated[
        str | None, typer.Option("--log-dir", metavar="DIR", help="Write memory.json there, for 'echelon report DIR'.")
    ] = None,
) -> None:
    """Compute the memory of each rank of a job, by module and kind, its peak, and possible savings; nothing runs."""
    from echelon.strategy.annotations.marks import ScheduleName

    require_model(model)
    _check_procs(procs)
    require_one_of("--device", device, ("cpu", "cuda"))
    require_one_of("--amp", amp, ("bf16", "fp16", "off"))
    require_one_of("--schedule", schedule, get_args(ScheduleName))
    require_one_of("--shard", shard, (0, 1, 2, 3))
    if optimizer is not None:
        from echelon.planner.profiling.named_optimizers import check_name

        check_name(optimizer)
    from echelon.cli.commands.memory import run_memory

    run_memory(**context.params)


def bench(
    *,
    out: Annotated[str | None, typer.Option(help="The file to write.", show_default="the file that plans use")] = None,
    procs: Annotated[int | None, typer.Option(help="Processes.", show_default="one per GPU, or per core")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer sizes, a few seconds.")] = False,
) -> None:
    """Measure this machine, in under two minutes, into a file that plans use."""
    _check_procs(procs)
    if out is not None:
        from echelon.planner.cluster.bench_file import make_room

        make_room(Path(out))
    from echelon.cli.commands.bench import bench as measure

    measure(out, procs, quick)


def _check_procs(count: int | None, option: str = "--procs") -> None:
    from echelon.launcher.rendezvous.host_options import at_least

    if count is not None:
        at_least(1, option, count)
