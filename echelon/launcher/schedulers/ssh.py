"""``echelon run --hosts a:8,b:8 train.py``: runs a launcher on each host over ssh, which ends with this command."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from echelon.base import network
from echelon.base.environment import LOG_DIR, TOKEN, TOKEN_FILE, port_for
from echelon.base.errors import UsageError
from echelon.base.job_secret import find_token
from echelon.launcher.log_directory import log_dir_argv
from echelon.launcher.rendezvous.host_options import host_counts
from echelon.launcher.run_options import RunOptions
from echelon.launcher.schedulers.argv import rebuild_argv
from echelon.launcher.schedulers.host_list import HostListEntry, parse_host_list
from echelon.launcher.schedulers.ssh_connection import RemoteLaunchRequest, SshConnection
from echelon.launcher.schedulers.ssh_job import SshJob

#: Prefixes of variables that are sent to other hosts, in addition to --env. Variables for ranks only are excluded.
CARRIED = ("ECHELON_", "PADDLE_", "NCCL_", "GLOO_", "OMP_", "CUDA_")
CARRIED_NAMES = ("PYTHONPATH",)
#: ssh options: a password prompt cannot be answered here, and a host that does not answer is reported.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4")
#: Options of ``run`` that this module handles; each host gets its own values.
OWN = ("hosts", "hostfile", "ssh", "remote_python", "env", "nnodes", "node_rank", "master", "procs")


@dataclass(frozen=True)
class SshRequest:
    """The validated options of ``echelon run`` that concern the hosts."""

    hosts: tuple[HostListEntry, ...]
    #: minimum number of hosts; all of them if the job is not elastic
    least: int
    ssh: tuple[str, ...]
    python: str
    environment: Mapping[str, str]
    master: str
    #: arguments that every launcher gets, after its own options
    argv: tuple[str, ...]
    #: seconds that launchers may take to save and end
    grace: float

    @property
    def nnodes(self) -> str:
        count = len(self.hosts)
        return str(count) if self.least == count else f"{self.least}:{count}"


def run_on_hosts(context: Any, first: Callable[[], None] | None = None) -> int:
    """Run the job of ``echelon run`` on its hosts; return the job's exit code."""
    request = check(context)
    if first is not None:
        first()
    ssh_job = SshJob(request.hosts, request.least, request.grace)

    def hand_on(number: int, frame: FrameType | None) -> None:
        ssh_job.hand_on(signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    for index, entry in enumerate(request.hosts):
        ssh_job.add(_connect(request, index, entry))
    return ssh_job.run_until_end()


def check(context: Any) -> SshRequest:
    """Return a ``SshRequest`` of the options; raises a one-line ``UsageError``."""
    options = RunOptions(**context.params)
    hosts = parse_host_list(options.hosts, options.hostfile)
    _check_fit(options, hosts)
    least = least_hosts(options.nnodes, len(hosts))
    ssh = _ssh_command(options.ssh)
    environment = collect_forwarded_environment(os.environ, options.env or [])
    if TOKEN_FILE in environment or TOKEN not in environment:  # the file may exist on this host only
        environment.pop(TOKEN_FILE, None)
        environment[TOKEN] = (find_token() or secrets.token_hex(16).encode()).decode()
    return SshRequest(
        hosts=_with_procs(hosts, options.procs),
        least=least,
        ssh=ssh,
        python=options.remote_python or sys.executable,
        environment=environment,
        master=options.master or _master_endpoints(_master_hosts(hosts, least), ssh, environment[TOKEN]),
        argv=(*rebuild_argv(context, leave_out=OWN), *log_dir_argv(options), options.script, *(options.args or [])),
        grace=options.grace or 30.0,
    )


def least_hosts(nnodes: str | None, count: int) -> int:
    """Return the minimum number of hosts: ``--nnodes MIN:MAX`` makes a job elastic; a single number must match."""
    fewest, most, _ = (count, count, None) if nnodes is None else host_counts(nnodes)
    if most != count:
        raise UsageError(
            f"--nnodes {nnodes} does not fit the {count} hosts of --hosts or --hostfile; leave --nnodes out"
        )
    return fewest


def collect_forwarded_environment(env: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return the variables for all hosts: those of Echelon and the libraries, and ``--env NAME`` or ``NAME=VALUE``."""
    result = {k: v for k, v in env.items() if (k.startswith(CARRIED) or k in CARRIED_NAMES) and k != LOG_DIR}
    for entry in named:
        name, given, value = entry.partition("=")
        if not name or (not given and name not in env):
            raise UsageError(f"--env {entry} is not set here; set it, or give --env {name or 'NAME'}=VALUE")
        result[name] = value if given else env[name]
    return result


def _check_fit(options: RunOptions, hosts: Sequence[HostListEntry]) -> None:
    if options.node_rank is not None:
        raise UsageError(
            "--node-rank is for a launcher started by hand; with --hosts their order sets it: leave it out"
        )
    if options.servers is not None or options.pservers is not None:
        raise UsageError(
            "--hosts starts jobs without parameter servers; with servers start the same command on every host, "
            "with --pservers and --trainers"
        )
    if options.procs is not None and any(entry.procs is not None for entry in hosts):
        raise UsageError("--procs and the numbers of --hosts both count processes; leave one of them out")


def _master_hosts(hosts: Sequence[HostListEntry], least: int) -> Sequence[HostListEntry]:
    """Return the hosts of the rendezvous: the first one, and a second one for a job that may lose the first."""
    return hosts[:2] if least < len(hosts) else hosts[:1]


def _with_procs(hosts: Sequence[HostListEntry], procs: int | None) -> tuple[HostListEntry, ...]:
    return tuple(hosts) if procs is None else tuple(HostListEntry(entry.name, procs) for entry in hosts)


def _ssh_command(text: str | None) -> tuple[str, ...]:
    try:
        argv = shlex.split(text or "ssh")
    except ValueError as error:
        raise UsageError(f"--ssh '{text}' cannot be read: {error}") from None
    if not argv:
        raise UsageError("--ssh is empty; give a command, such as --ssh 'ssh -p 2222 -i key'")
    options = [word for option in _OPTIONS for word in ("-o", option)] if os.path.basename(argv[0]) == "ssh" else []
    return (*argv, *options)


def _connect(request: SshRequest, index: int, entry: HostListEntry) -> SshConnection:
    here = is_here(entry)
    python = sys.executable if here else request.python
    procs = () if entry.procs is None else ("--procs", str(entry.procs))
    own = ("--nnodes", request.nnodes, "--node-rank", str(index), "--master", request.master, *procs)
    argv = (python, "-m", "echelon", "run", *own, *request.argv)
    order = RemoteLaunchRequest(
        argv, os.getcwd(), dict(request.environment), hail=not here, patience=request.grace + 10.0
    )
    return SshConnection(entry.address, order, python, () if here else (*request.ssh, entry.name), first=index == 0)


def is_here(entry: HostListEntry) -> bool:
    """Return True if the host is this one, so that ssh is not needed. Another user's account always needs it."""
    if "@" in entry.name:
        return False
    if entry.address in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    address = _resolved(entry.address)
    return address is not None and network.is_local(address)


def _master_endpoints(hosts: Sequence[HostListEntry], ssh: Sequence[str], token: str) -> str:
    """Return HOST:PORT on each of these hosts, comma-separated, as other hosts reach it."""
    away = [entry for entry in hosts if not is_here(entry)]
    towards = _address_of(away[0], ssh) if away else None
    return ",".join(_master_endpoint(entry, towards, ssh, token) for entry in hosts)


def _master_endpoint(entry: HostListEntry, towards: str | None, ssh: Sequence[str], token: str) -> str:
    if not is_here(entry):
        return network.endpoint(_address_of(entry, ssh), port_for(token))
    address = network.resolve(entry.address, "--hosts")
    if towards is not None:
        address = network.address_towards(towards, 22)
    return network.endpoint(address, network.free_ports(address, 1)[0])


def _address_of(entry: HostListEntry, ssh: Sequence[str]) -> str:
    """Return the address of the name itself, or of the host name in ssh's configuration."""
    if result := _resolved(entry.address):
        return result
    try:
        output = subprocess.run(
            [*ssh, "-G", entry.name], capture_output=True, text=True, timeout=15, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    names = [line.split()[1] for line in output.splitlines() if line.lower().startswith("hostname ")]
    if names and (result := _resolved(names[0])):
        return result
    raise UsageError(f"--hosts names '{entry.name}', which has no address here; add --master HOST:PORT")


def _resolved(host: str) -> str | None:
    try:
        return network.resolve(host, "--hosts")
    except UsageError:
        return None
