"""The ``echelon`` command: a list of subcommands, each importing its implementation only when it is called."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.errors import EchelonError, UsageError, nearest
from echelon.launcher.schedulers.command import submit
from echelon.timeline.word import TimelineWord

if TYPE_CHECKING:
    from echelon.launcher.job import Job

app = typer.Typer(
    help="Train one PyTorch model on many devices, with the numbers one process gives.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

#: click's UsageError. Newer typers carry a copy of click, older ones depend on it; this names the right one.
ParseError: type[Any] = typer.BadParameter.__base__ or Exception


@app.callback()
def echelon() -> None:
    """Keeps ``run`` a subcommand even while it is the only one."""


@app.command(cls=TimelineWord, context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script to run (or, with -m, the module).")],
    args: Annotated[list[str] | None, typer.Argument(help="Everything after the script is the script's.")] = None,
    *,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    procs: Annotated[
        int | None, typer.Option(help="Processes on this host.", show_default="one per visible GPU, or 1")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="How many GPUs (4), or which (0,1,3; '0,' is GPU zero alone).")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            help="Number of hosts; 2:8 for a job that goes on while at least 2 are there and takes in up to 8.",
            show_default="PADDLE_TRAINERS_NUM, or 1",
        ),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="This host's place among the hosts; 0 is the one at --master.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where the hosts meet, the same on every host; more by commas stand in for it."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="How often to start again what failed.", show_default="0; elastic 3; with servers 3 for each"
        ),
    ] = None,
    log_dir: Annotated[str, typer.Option(help="Directory for rank-N.log, one file per rank.")] = "log",
    nic: Annotated[str | None, typer.Option(help="Network interface for Gloo and NCCL.")] = None,
    join_timeout: Annotated[float, typer.Option(help="Seconds to wait for the other hosts, or roles.")] = 300.0,
    last_call: Annotated[
        float, typer.Option(help="Elastic: seconds without a newcomer after which those that are there begin.")
    ] = 3.0,
    host_timeout: Annotated[float, typer.Option(help="Seconds after which a silent host is lost.")] = 30.0,
    grace: Annotated[float, typer.Option(help="Seconds for ranks to save and leave when they are asked to.")] = 30.0,
    copies: Annotated[
        int | None,
        typer.Option(
            help="After every N steps ranks copy their state into memory; 0: never.", show_default="elastic 1"
        ),
    ] = None,
    stall: Annotated[float, typer.Option(help="Seconds that a rank may be late before it is told; 0: never.")] = 60.0,
    on_stall: Annotated[str, typer.Option(help="What to do about a rank that is late: end or wait.")] = "end",
    checked: Annotated[
        bool, typer.Option("--check", help="Compare the calls of all ranks in every step, not in the first ones only.")
    ] = False,
    timeline: Annotated[
        str | None,
        typer.Option(metavar="[STEPS]", help="Record these steps (5:10) of all ranks; alone: five after ten others."),
    ] = None,
    servers: Annotated[int | None, typer.Option(help="Parameter servers on this host.")] = None,
    workers: Annotated[int | None, typer.Option(help="With servers: workers on this host.", show_default="1")] = None,
    pservers: Annotated[
        str | None, typer.Option(help="Several hosts: HOST:PORT,... of all servers; those of this host start here.")
    ] = None,
    trainers: Annotated[int | None, typer.Option(help="With --pservers: workers of all hosts.")] = None,
    trainer_id_from: Annotated[int | None, typer.Option(help="With --pservers: id of the first worker here.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Where servers keep their state, to go on from it by the same command.")
    ] = None,
    planned: Annotated[
        str | None,
        typer.Option("--plan", help="The plan to run, from 'echelon plan --save', on as many processes."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Start it on these hosts, over ssh: a:8,b:8 (host:processes).")
    ] = None,
    hostfile: Annotated[str | None, typer.Option(help="A file with a host a line: gpu01 slots=8.")] = None,
    ssh: Annotated[
        str | None, typer.Option(help="With hosts: how to reach them ('ssh -p 2222').", show_default="ssh")
    ] = None,
    remote_python: Annotated[str | None, typer.Option(help="With hosts: Python there.", show_default="as here")] = None,
    env: Annotated[list[str] | None, typer.Option(help="With hosts: NAME[=VALUE] that they are to see, too.")] = None,
    on: Annotated[str | None, typer.Option(help="Start it on nodes of a cluster: ray.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="With --on ray: where the cluster is.", show_default="the one running here")
    ] = None,
) -> None:
    """Run a script on one process per GPU, on one host or several, with parameter servers or without."""
    from echelon.launcher.schedulers.surroundings import started_elsewhere

    if (code := started_elsewhere(context)) is not None:
        raise typer.Exit(code)
    from echelon.launcher.run import launch

    raise typer.Exit(launch(checked_job(**context.params)))


def checked_job(script: str, args: list[str] | None, planned: str | None, **options: Any) -> Job:
    """What ``run`` was asked for, checked before anything is done about it."""
    from echelon.launcher.job import check
    from echelon.launcher.roles import check_roles
    from echelon.launcher.schedulers.surroundings import completed

    options = completed(options)
    of_roles = ("servers", "workers", "pservers", "trainers", "trainer_id_from", "state")
    roles = check_roles(**{name: options.pop(name) for name in of_roles})
    return check(script, args or [], roles=roles, plan=planned, **options)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def train(
    words: Annotated[list[str] | None, typer.Argument(metavar="--NAME VALUE ...")] = None,
) -> None:
    """Train a model of the zoo: echelon train --model_name lenet --dataset_name digits --procs 2."""
    from echelon.zoo.train.command import train_words

    raise typer.Exit(train_words(words or []))


zoo = typer.Typer(help="The models and data sets that 'echelon train' knows.", no_args_is_help=True)
app.add_typer(zoo, name="zoo")


@zoo.command("list")
def zoo_list(*, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """All models and data sets, in a line each."""
    from echelon.zoo.show import listed

    print(listed(as_json))


@zoo.command("show")
def zoo_show(
    name: Annotated[str, typer.Argument(help="A model or a data set.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """One model: parameters, arithmetic, memory, recommended strategy, its own settings. Or one data set."""
    from echelon.zoo.show import shown

    print(shown(name, as_json))


@zoo.command("copy")
def zoo_copy(
    name: Annotated[str, typer.Argument(help="A model.")],
    out: Annotated[str | None, typer.Argument(help="The script to write.", show_default="NAME.py")] = None,
) -> None:
    """Write a model and its training loop into a script of your own, to be changed at will."""
    from echelon.zoo.copy import copy_model

    print(f"echelon: {copy_model(name, out)}")


app.add_typer(submit, name="submit")


@app.command()
def serve(
    *,
    endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of this server.")] = None,
    pservers: Annotated[
        str | None, typer.Option(help="HOST:PORT,... of all servers, the same everywhere.", show_default="this one")
    ] = None,
    trainers: Annotated[int | None, typer.Option(help="Workers of the job.", show_default="1")] = None,
    state: Annotated[str | None, typer.Option(help="Where to keep what must outlive this process.")] = None,
    join_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for the workers.")] = None,
    token: Annotated[
        str | None, typer.Option(help="The secret of the job. Other users see it here: better set ECHELON_PS_TOKEN.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate (PEM): speak TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="Who has signed the other servers' certificates.")] = None,
    client_ca: Annotated[str | None, typer.Option(help="Who must have signed the certificates of callers.")] = None,
    read_only: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Answer readers with its rows; take no updates.")
    ] = None,
) -> None:
    """Be a parameter server, started by hand; ends when the workers are done."""
    from echelon.ps.command import serve_by_hand

    files = {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca, "client_ca": client_ca}
    serve_by_hand(endpoint, pservers, trainers, state, join_timeout, token, files, read_only)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a directory whose newest is taken.")],
    out: Annotated[str, typer.Argument(help="The file to write: .safetensors, or .parquet for a sparse table.")],
    *,
    table: Annotated[
        str | None, typer.Option(help="The sparse table to write, in place of the model's weights.")
    ] = None,
) -> None:
    """Write a checkpoint's weights, or one of its sparse tables, into one file."""
    if table is not None or out.endswith(".parquet"):
        from echelon.ps.export import export_checkpoint

        count = export_checkpoint(checkpoint, out, table)
        print(f"echelon: {count:,} rows of {checkpoint} written to {out}")
        return
    from echelon.checkpoint import export as write
    from echelon.checkpoint import find

    found = find(checkpoint)
    count = write(found, out)
    print(f"echelon: {count} tensors of {found} written to {out}")


@app.command()
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
        str | None, typer.Option(help="What makes the model: package.module:callable or path/to/file.py:callable.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Size of the job.")] = 2,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="How many of them share a host.", show_default="all")
    ] = None,
) -> None:
    """Say what a strategy will do to a step, in which order, and what it costs."""
    from echelon.strategy.command import explain_words

    print(explain_words(settings or [], model, ranks, ranks_per_host))


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="gpt:layers=96,hidden=12288,heads=96,sequence=2048 (or bert:..., llama:...); file.py:callable or "
            "package.module:callable that returns a model, (model, batch) or (model, batch, loss); or a script.",
        ),
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="A script's own arguments, after --.")] = None,
    *,
    cluster: Annotated[
        str | None, typer.Option(help="4x8xH100 (hosts x devices x kind), 2x8xV100+1x8xT4, a .yaml file, or here.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of the global batch.", show_default="the model's")] = None,
    memory: Annotated[str | None, typer.Option(help="What a device may use: 60GB.", show_default="what it has")] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="Means that change the numbers: amp,fp16_allreduce,dgc,localsgd.", show_default="none"),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adam, sgd, momentum, lamb ...", show_default="the script's, or adam")
    ] = None,
    bench: Annotated[
        str | None, typer.Option(help="A file of 'echelon bench'.", show_default="the usual one, where there is one")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--input", help="One sample, where no batch comes with the model: 3x224x224, int64:128:30522."),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="How many plans to show.", show_default="10")] = None,
    html: Annotated[str | None, typer.Option(help="Write a page with the schedule and the memory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    save: Annotated[str | None, typer.Option(help="Write the best plan, for 'echelon run --plan FILE'.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="FILE", help="Explain a saved plan instead of searching for one.")
    ] = None,
) -> None:
    """Find the quickest way to train a model on a cluster, without either, and say why."""
    from echelon.planner.explain.command import plan_words

    plan_words(
        model,
        args or [],
        explain=explain,
        html=html,
        as_json=as_json,
        save=save,
        cluster=cluster,
        batch=batch,
        memory=memory,
        allow=allow,
        optimizer=optimizer,
        bench=bench,
        input=inputs,
        keep=keep,
    )


@app.command()
def memory(
    model: Annotated[
        str,
        typer.Argument(help="A script, zoo:NAME, gpt:layers=...,..., or file.py:callable, as for 'echelon plan'."),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="A script's own arguments, after --.")] = None,
    *,
    procs: Annotated[
        int | None, typer.Option(help="Processes of the job.", show_default="the fewest that what is asked for takes")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples that each copy of the model is given at a time.", show_default="the model's"),
    ] = None,
    planned: Annotated[
        str | None, typer.Option("--plan", help="A plan from 'echelon plan --save'; it says all of the rest.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages of a pipeline; cut by cost.")] = None,
    split: Annotated[int | None, typer.Option(help="Processes that share each layer; those that plans split.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts of a batch, one after another.", show_default="4 with stages")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="1f1b, gpipe, interleaved or zero-bubble.", show_default="1f1b")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: whose kernels are counted.", show_default="what is here")
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
    lean: Annotated[
        bool | None, typer.Option("--lean/--no-lean", help="Six bytes a parameter.", show_default="the script's, or no")
    ] = None,
    shard: Annotated[
        int | None, typer.Option(help="0 to 3: what processes share out.", show_default="the script's, or 0")
    ] = None,
    merge: Annotated[
        int | None, typer.Option(help="Batches that make up one update.", show_default="the script's, or 1")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--input", help="One sample, where no batch comes with the model: 3x224x224, int64:128:30522."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    save: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write memory.json there, for 'echelon report DIR'.")
    ] = None,
) -> None:
    """Say what each rank of a job holds, by module and kind, when it holds most, and what would save: nothing runs."""
    from echelon.footprint.command import memory_words

    given = {"procs": procs, "batch": batch, "device": device, "optimizer": optimizer, "input": inputs}
    given |= {"amp": amp, "recompute": recompute, "shard": shard, "merge": merge, "lean": lean, "plan": planned}
    given |= {"stages": stages, "split": split, "micro_batches": micro_batches, "schedule": schedule}
    memory_words(model, args or [], as_json=as_json, save=save, **given)


@app.command()
def bench(
    *,
    out: Annotated[
        str | None, typer.Option(help="The file to write.", show_default="the one that plans look for")
    ] = None,
    procs: Annotated[int | None, typer.Option(help="Processes.", show_default="one per GPU, or per core")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer sizes, a few seconds.")] = False,
) -> None:
    """Measure this machine, in under two minutes, into a file that plans use."""
    from echelon.planner.machines.bench_command import bench as measure

    measure(out, procs, quick)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def doctor(
    context: typer.Context,
    *,
    checkpoint: Annotated[
        str | None, typer.Option(help="Where checkpoints will go: its room and speed, and whether all hosts share it.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write all that was found as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure no speeds.")] = False,
) -> None:
    """Examine every host, every rank and what lies between them; takes the options of 'echelon run' (--procs ...)."""
    from echelon.doctor.command import doctor_words

    raise typer.Exit(doctor_words(context.args, checkpoint, json, quick))


@app.command(context_settings={"allow_interspersed_args": True})
def verify(
    script: Annotated[str, typer.Argument(help="The script to verify (or, with -m, the module).")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    *,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    procs: Annotated[
        int | None, typer.Option(help="Processes.", show_default="one per visible GPU, 2 at least")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="How many GPUs, or which, as for run.")] = None,
    planned: Annotated[str | None, typer.Option("--plan", help="The plan to run, as for run.")] = None,
    steps: Annotated[int, typer.Option(help="Updates to compare.")] = 5,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative difference that is still the same.", show_default="1e-4, or the strategy's"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Train a script for some steps on several processes and in one, and say where their numbers part."""
    from echelon.verify.command import Asked, launcher_words, verify_words

    words = tuple(launcher_words(procs, gpus, planned))
    raise typer.Exit(verify_words(Asked(script, tuple(args or []), module, steps, tolerance, words), as_json))


@app.command()
def timeline(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The run's log directory.")] = "log",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say where the steps went that 'echelon run --timeline' has recorded, and put all ranks into one trace."""
    from echelon.timeline.command import timeline_words

    print(timeline_words(directory, as_json))


@app.command()
def report(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The log directory of a run.")] = "log",
    *,
    out: Annotated[str | None, typer.Option(help="The page to write.", show_default="DIR/report.html")] = None,
) -> None:
    """Make one page of a run: curves, plan, time, memory, ranks, settings and events."""
    from echelon.report.command import report as write

    print(f"echelon: {write(directory, out)} written")


@app.command()
def watch(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The log directory of a run.")] = "log",
    *,
    port: Annotated[int, typer.Option(help="Where to serve it; 0: any port that is free.")] = 7171,
    host: Annotated[str, typer.Option(help="On which address; others than this machine's own get a token.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Serve the page of a run while it goes on."""
    from echelon.report.command import watch as serve_page

    serve_page(directory, host, port)


@app.command(name="fetch-data")
def fetch_data(
    spec: Annotated[str, typer.Argument(help="A .yaml or .json file that names the files, or its URL.")],
    *,
    out: Annotated[str, typer.Option(help="The folder to fetch into.")] = "data",
    worker: Annotated[int, typer.Option(help="With --workers: which of them this is, from 0 on.")] = 0,
    workers: Annotated[int, typer.Option(help="Fetch every N-th file only, from --worker on.")] = 1,
    parallel: Annotated[int | None, typer.Option(help="Files at once.", show_default="the spec's, or 8")] = None,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with a token for the server, where it asks for one.")
    ] = None,
) -> None:
    """Fetch the files that a spec names, whole and verified; what is there already is left alone."""
    from echelon.data import Downloader

    given = Downloader(spec, out, worker=worker, workers=workers, parallel=parallel, token_env=token_env)
    print(f"echelon: {len(given.fetch())} files in {out}, as {spec.split('?')[0]} has them")


def main() -> None:
    """The entry point: a user's mistake is one line on stderr and exit code 2, never a traceback of ours."""
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        return int(app(prog_name="echelon", standalone_mode=False) or 0)
    except ParseError as error:
        print(f"echelon: {_explain(error)}", file=sys.stderr)
        return 2
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, typer.Abort):
        print("echelon: stopped by SIGINT", file=sys.stderr)
        return 130


def _explain(error: Any) -> str:
    """click's complaint as one line, with the nearest name for an option or command that does not exist."""
    command: Any = error.ctx.command if error.ctx else None
    if type(error).__name__ == "NoArgsIsHelpError":
        return f"which command? known: {', '.join(sorted(command.commands))} (see 'echelon --help')"
    if hasattr(error, "option_name") and type(error).__name__ == "NoSuchOption":
        known = [name for param in command.params for name in param.opts if name.startswith("--")]
        return f"no option '{error.option_name}' for '{error.ctx.command_path}'{nearest(error.option_name, known)}"
    message = " ".join(error.format_message().split())
    if message.startswith("No such command"):
        name = message.split("'")[1]
        return f"no command '{name}'{nearest(name, command.commands)}"
    return message[:1].lower() + message[1:].rstrip(".")
