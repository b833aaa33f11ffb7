"""``Job``: the options of ``echelon run``, validated before any process starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from echelon.base import network
from echelon.base.errors import UsageError, nearest
from echelon.base.option_checks import at_least
from echelon.base.recorded_steps import check_steps
from echelon.distributed import rank_main
from echelon.launcher.log_directory import make_log_dir
from echelon.launcher.rendezvous.host_options import check_node_rank, host_counts, master_endpoints
from echelon.launcher.role_assignment import MAX_RESTARTS, ParameterServerRoles, check_roles
from echelon.launcher.run_options import RunOptions

#: Lower limit of --host-timeout, in seconds.
LEAST_HOST_TIMEOUT = 2.0


@dataclass(frozen=True)
class Job:
    """Validated options, in which everything exists and fits together, and the values that follow from them."""

    options: RunOptions
    #: processes on this host; the workers, in a job with parameter servers
    procs: int
    #: number of hosts; the maximum for an elastic job
    nnodes: int
    #: minimum number of hosts
    fewest: int
    #: --nnodes as given, if it is a range
    elastic: str | None
    #: endpoint of the rendezvous, and the endpoints to use if it is lost
    masters: tuple[tuple[str, int], ...]
    max_restarts: int
    #: steps between in-memory snapshots of the ranks; 0: none
    copies: int
    log_dir: Path
    visible_gpus: str | None
    #: the steps whose timeline is recorded, as text
    timeline: str | None
    #: the file with the plan that the ranks run
    plan: Path | None
    #: roles of a job with parameter servers
    roles: ParameterServerRoles | None

    @property
    def master(self) -> tuple[str, int] | None:
        return self.masters[0] if self.masters else None

    @property
    def args(self) -> tuple[str, ...]:
        args = self.options.args or []
        return tuple(args[1:] if args[:1] == ["--"] else args)

    @property
    def one_host(self) -> bool:
        return self.nnodes == 1 if self.roles is None else self.roles.one_host

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a rank or worker: rank_main.py, which then runs the user's program."""
        kind = "module" if self.options.module else "script"
        return (rank_main.__file__, str(os.getpid()), str(self.log_dir), kind, self.options.script, *self.args)

    @property
    def processes(self) -> int:
        """The number of processes on this host, which share its cores."""
        return self.procs + (len(self.roles.servers) if self.roles else 0)


def check(options: RunOptions) -> Job:
    """Return a ``Job`` of the given options; raises a one-line ``UsageError``."""
    roles, procs = check_roles(options), options.procs
    if options.gpus is not None:
        check_gpus(options.gpus)
    if roles is None:
        at_least(1, "--procs", procs)
    else:
        _check_no_ranks(options)
    fewest, hosts, elastic = (1, 1, None) if roles is not None else host_counts(options.nnodes)
    restarts = options.max_restarts
    if restarts is None:
        restarts = MAX_RESTARTS if roles is not None or elastic else 0
    at_least(0, "--max-restarts", restarts)
    _check_times(options)
    if options.on_stall not in ("end", "wait"):
        raise UsageError(f"--on-stall '{options.on_stall}' is neither end nor wait")
    copies = (1 if elastic else 0) if options.copies is None else options.copies
    at_least(0, "--copies", copies)
    check_node_rank(options.node_rank, hosts)
    _check_nic(options.nic)
    check_program(options.script, options.module)
    masters = master_endpoints(options.master, hosts)
    steps = None if options.timeline is None else check_steps(options.timeline, "--timeline")
    visible = _choose_gpus(options.gpus) if options.gpus is not None else None  # imports torch, after all other checks
    if options.plan is not None:
        procs = _planned(options.plan, procs, visible, hosts, has_servers=roles is not None)
    return Job(
        options,
        procs=_count_processes(procs, visible) if roles is None else roles.workers,
        nnodes=hosts,
        fewest=fewest,
        elastic=elastic,
        masters=masters,
        max_restarts=restarts,
        copies=copies,
        log_dir=make_log_dir(options, one_host=hosts == 1 if roles is None else roles.one_host),
        visible_gpus=None if visible is None else ",".join(visible),
        timeline=steps,
        plan=None if options.plan is None else Path(options.plan).absolute(),
        roles=roles,
    )


def _planned(plan: str, procs: int | None, visible: list[str] | None, hosts: int, has_servers: bool) -> int:
    """Return the number of processes on this host: as given, else as many as the plan needs."""
    from echelon.plan.saved_plan import SavedPlan

    if has_servers:
        raise UsageError("--plan is for jobs without parameter servers; leave --plan or the servers out")
    needed = SavedPlan.load(plan).draft.ranks
    requested = procs if procs is not None else len(visible) if visible is not None else None
    if requested is not None and hosts > 1:  # hosts may differ in their number of processes; the ranks check the total
        return requested
    each, rest = divmod(needed, hosts)
    if rest:
        raise UsageError(f"--plan {plan} is for {needed} processes, which {hosts} hosts cannot share; give --procs")
    if requested not in (None, each):
        raise UsageError(f"--plan {plan} is for {needed} processes, and {requested} were asked for; leave that out")
    return each


def _check_no_ranks(options: RunOptions) -> None:
    if options.procs is not None:
        raise UsageError("--procs counts the ranks of a job without servers; with servers say --workers")
    if options.nnodes is not None or options.node_rank is not None:
        raise UsageError(
            "--nnodes and --node-rank are for jobs without servers; with servers on several hosts give each host "
            "the same --pservers and --trainers"
        )


def check_gpus(text: str) -> None:
    """Raise for a value of --gpus that is invalid on any host."""
    if not re.fullmatch(r"\d+|(\d+,)+\d*", text):
        raise UsageError(f"--gpus {text!r} is neither a count (4) nor a list (0,1,3)")
    if "," not in text and int(text) == 0:
        raise UsageError("--gpus 0 asks for no GPU at all; for GPU zero alone write '--gpus 0,'")
    if len(set(_wanted_gpus(text))) < len(_wanted_gpus(text)):
        raise UsageError(f"--gpus {text} names a GPU twice; name each once")


def _wanted_gpus(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part] if "," in text else list(range(int(text)))


def _choose_gpus(text: str) -> list[str]:
    """Return the GPUs of --gpus: a bare number is a count, a list has commas; indices count the visible GPUs."""
    there, wanted = _visible_gpus(), _wanted_gpus(text)
    if missing := [index for index in wanted if index >= len(there)]:
        requested = f"GPU {missing[0]}" if "," in text else f"{text} GPUs"
        raise UsageError(f"--gpus {text} asks for {requested}, but there {_gpus_in_words(len(there))}")
    return [there[index] for index in wanted]


def _visible_gpus() -> list[str]:
    count = _device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def _device_count() -> int:
    """Return the number of GPUs that torch sees; torch is imported here, after all checks that do not need it."""
    import torch

    return torch.cuda.device_count()


def _gpus_in_words(count: int) -> str:
    if count == 0:
        return "is none that torch can see here; leave --gpus out to run on the CPU"
    return "is one here: GPU 0" if count == 1 else f"are {count} here: GPUs 0 to {count - 1}"


def _count_processes(procs: int | None, visible: list[str] | None) -> int:
    if procs is not None:
        return procs
    return len(visible) if visible is not None else max(1, _device_count())


def _check_times(options: RunOptions) -> None:
    if options.join_timeout <= 0:
        raise UsageError(f"--join-timeout {options.join_timeout:g} leaves no time to meet; it must be above 0 seconds")
    if options.host_timeout < LEAST_HOST_TIMEOUT:
        raise UsageError(
            f"--host-timeout {options.host_timeout:g} would take hosts for lost that only had a busy moment; "
            f"it must be {LEAST_HOST_TIMEOUT:g} seconds or more"
        )
    for option, value in (
        ("--last-call", options.last_call),
        ("--grace", options.grace),
        ("--stall", options.stall),
    ):
        if value < 0:
            raise UsageError(f"{option} {value:g} is no time to wait; it must be 0 seconds or more")


def _check_nic(nic: str | None) -> None:
    if nic is not None and nic not in network.interfaces():
        raise UsageError(f"--nic '{nic}' is not a network interface here; there are: {', '.join(network.interfaces())}")


def check_program(program: str, module: bool) -> None:
    if module:
        if PathFinder.find_spec(program.partition(".")[0], [os.getcwd(), *_import_path()]) is None:
            raise UsageError(f"-m {program}: no module of that name can be imported from here")
        return
    path = Path(program)
    if not path.exists():
        beside = path.parent.glob("*.py") if path.parent.is_dir() else []
        names = [str(found) for found in beside]
        hint = nearest(program, names) if names else "; there is no .py file in that directory"
        raise UsageError(f"no script at '{program}'{hint if len(hint) < 200 else ''}")


def _import_path() -> list[str]:
    import sys

    return sys.path
