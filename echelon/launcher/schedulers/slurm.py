"""Slurm: reads the allocation for ``echelon run``, and submits jobs for ``echelon submit slurm``."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.base.environment import (
    LOG_DIR,
    REQUEUE,
    SLURM_CPUS,
    SLURM_JOB,
    SLURM_JOB_LIST,
    SLURM_JOB_NODES,
    SLURM_NODE,
    SLURM_STEP,
    SLURM_STEP_LIST,
    SLURM_STEP_NODES,
    TOKEN,
    TOKEN_FILE,
    expand_hosts,
    port_for,
    whole_number,
)
from echelon.base.errors import EchelonError, UsageError
from echelon.base.option_checks import at_least
from echelon.launcher.run_options import RunOptions
from echelon.launcher.schedulers.submission import SlurmSubmission, split_run
from echelon.observability.runlog.run_directory import RUNS, new_run_directory, next_run_directory

_TEMPLATE = Path(__file__).with_name("slurm.sh.j2")
#: Seconds before the time limit at which Slurm sends a signal, so that ranks can save.
NOTICE = 120
#: Characters allowed in sbatch options: sbatch has its own quoting, so only values that need none are accepted.
_VALUE = re.compile(r"[\w .,:;@%/+=()\[\]{}*&|!<>~^-]+")
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d+(:\d{1,2}){0,2}", re.ASCII)
_KEY = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)


# In an allocation


def read_slurm_step(options: RunOptions, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that a task of ``srun --ntasks-per-node=1`` can derive, unless options name the hosts."""
    if SLURM_STEP not in env or LOG_DIR in env or not _ours(options):
        return {}
    hosts = expand_hosts(env.get(SLURM_STEP_LIST) or env.get(SLURM_JOB_LIST) or "localhost")
    nodes = whole_number(env, SLURM_STEP_NODES, len(hosts))
    if (tasks := whole_number(env, SLURM_STEP)) != nodes:
        raise UsageError(
            f"srun started {tasks} tasks on {nodes} nodes, and each would start processes for all GPUs of its node; "
            "use srun --ntasks-per-node=1"
        )
    if nodes == 1:
        return {}
    port, nnodes = port_for(env.get(SLURM_JOB, "0")), options.nnodes or nodes
    # a job that may lose its first host has a second endpoint
    where = ",".join(f"{host}:{port}" for host in hosts[: 2 if ":" in str(nnodes) else 1])
    return {"nnodes": nnodes, "node_rank": whole_number(env, SLURM_NODE), "master": where}


def needs_srun(options: RunOptions, env: Mapping[str, str]) -> int:
    """Return the number of nodes if this is the only process of an allocation, as in a batch script; else 0."""
    if SLURM_STEP in env or LOG_DIR in env or SLURM_JOB not in env or not _ours(options):
        return 0
    nodes = whole_number(env, SLURM_JOB_NODES, 1)
    return nodes if nodes > 1 else 0


def call_srun(nodes: int, argv: Sequence[str], elastic: bool) -> None:
    """Replace this process by ``srun`` with the same command on every node. The environment carries the secret."""
    if not shutil.which("srun"):
        raise UsageError(
            f"this Slurm job has {nodes} nodes, but there is no srun on PATH to reach them; "
            "add its directory to PATH, or say --nnodes 1 to stay on this node"
        )
    if TOKEN not in os.environ and TOKEN_FILE not in os.environ:
        os.environ[TOKEN] = secrets.token_hex(16)
    sys.stdout.flush()
    command = [*srun_argv(nodes, elastic, os.environ.get(SLURM_CPUS)), sys.executable, "-m", "echelon", *argv]
    os.execvp(command[0], command)


def srun_argv(nodes: int, elastic: bool, cpus: str | None) -> list[str]:
    """Return an srun command with one unbound task per node; the end of one task does not end the others."""
    argv = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    argv += ["--kill-on-bad-exit=0", *(["--no-kill"] if elastic else [])]
    return [*argv, f"--cpus-per-task={cpus}"] if cpus else argv


def _ours(options: RunOptions) -> bool:
    """Return True if Slurm names the hosts: not if options name them, and not in a job with servers."""
    by_hand = ("master", "node_rank", "hosts", "hostfile", "servers", "pservers")
    return options.nnodes != "1" and all(getattr(options, name) is None for name in by_hand)


# echelon submit slurm


def script(options: SlurmSubmission) -> str:
    """Return the batch script; every value from the user is validated, or quoted for the shell."""
    import jinja2  # imported late: it would cost every run 60 ms

    template = jinja2.Template(_TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    logs = Path(options.log_dir or next_run_directory(options.job_name)).absolute()
    run = [*split_run(options.run), "--log-dir", str(logs), *(["-m"] if options.module else [])]
    text: str = template.render(
        directives=_directives(options, logs),
        directory=shlex.quote(os.getcwd()),
        srun=shlex.join(srun_argv(options.nodes, options.elastic, None)),
        echelon=shlex.join([sys.executable, "-m", "echelon", "run", *run]),
        program=shlex.join(options.program),
        requeue=options.requeue,
        code=REQUEUE,
        notice=NOTICE,
    )
    return text


def submit(options: SlurmSubmission) -> str:
    """Write the script beside the logs and pass it to sbatch; return a message about it."""
    script(options)  # raises before anything is created
    try:
        logs = Path(options.log_dir or new_run_directory(options.job_name)).absolute()
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"{options.job_name}.sbatch"
        path.write_text(script(replace(options, log_dir=str(logs))), encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"--log-dir '{options.log_dir or RUNS}' cannot be used: {error.strerror}") from None
    if not shutil.which("sbatch"):
        raise EchelonError(f"there is no sbatch on this host; submit the script {path} on a host that has it")
    ended = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if ended.returncode:
        said = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise EchelonError(f"sbatch refused {path}: {said}")
    job = ended.stdout.strip().partition(";")[0]
    return f"submitted as job {job}; its console will be {path.parent}/slurm-{job}.log, its script is {path}"


def _directives(options: SlurmSubmission, logs: Path) -> list[str]:
    at_least(1, "--nnodes", options.nodes)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", options.job_name, re.ASCII):
        raise UsageError(f"--name '{options.job_name}' is not a valid job name; use letters, digits, dots and dashes")
    if options.time is not None and not _TIME.fullmatch(options.time):
        raise UsageError(f"--time '{options.time}' is no time limit; write 8:00:00, or 2-12:00 for days and hours")
    console = f"{logs}/slurm-".replace("%", "%%") + "%j.log"
    pairs: list[tuple[str, object]] = [
        ("job-name", options.job_name),
        ("nodes", options.nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", options.gpus),
        ("cpus-per-task", options.cpus),
        ("time", options.time),
        ("partition", options.partition),
        ("account", options.account),
        ("output", console),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{NOTICE}"),
    ]
    given = [_option(text) for text in options.options or []]
    own = [(key, str(value)) for key, value in pairs if value is not None and key not in dict(given)]
    flags = ["--requeue" if options.requeue else "--no-requeue", *(["--no-kill"] if options.elastic else [])]
    return [_directive(key, value) for key, value in [*own, *given]] + flags


def _option(text: str) -> tuple[str, str]:
    key, given, value = text.removeprefix("--").partition("=")
    if not _KEY.fullmatch(key) or (given and not value):
        raise UsageError(f"--option '{text}' is not KEY=VALUE of an option of sbatch, such as --option qos=high")
    return key, value


def _directive(key: str, value: str) -> str:
    if not value:
        return f"--{key}"
    if not _VALUE.fullmatch(value):
        raise UsageError(f"--{key} {value!r} has characters that a line of sbatch options cannot hold; leave them out")
    return f'--{key}="{value}"' if " " in value else f"--{key}={value}"
