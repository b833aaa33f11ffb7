"""Translate options of torchrun, accelerate, deepspeed and fleetrun to those of ``echelon run``."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from echelon.cli.option_spelling import dashed

#: torchrun's default rendezvous port.
PORT = "29500"


@dataclass(frozen=True)
class ForeignOption:
    """An option of another launcher.

    launcher: name of the launcher
    ours:     equivalent option of ``echelon run``, with {} for the value; "" if there is none
    instead:  advice if there is no equivalent option
    flag:     True if the option takes no value
    """

    launcher: str
    ours: str = ""
    instead: str = "is not needed"
    flag: bool = False


_TORCHRUN = {
    "nproc-per-node": ForeignOption("torchrun", "--procs {}"),
    "master-addr": ForeignOption("torchrun", "--master {}"),
    "master-port": ForeignOption("torchrun", "--master {}"),
    "rdzv-endpoint": ForeignOption("torchrun", "--master {}"),
    "rdzv-id": ForeignOption("torchrun"),
    "rdzv-backend": ForeignOption("torchrun"),
    "rdzv-conf": ForeignOption("torchrun", instead="is --join-timeout here"),
    "standalone": ForeignOption("torchrun", flag=True),
    "monitor-interval": ForeignOption("torchrun"),
    "start-method": ForeignOption("torchrun"),
    "local-addr": ForeignOption("torchrun", instead="is --nic here"),
    "role": ForeignOption("torchrun"),
    "redirects": ForeignOption("torchrun", instead="is not needed: all ranks write to --log-dir"),
    "tee": ForeignOption("torchrun", instead="is not needed: all ranks write to --log-dir"),
    "module": ForeignOption("torchrun", "-m", flag=True),
}
_ACCELERATE = {
    "num-processes": ForeignOption("accelerate", "--procs {}"),
    "num-machines": ForeignOption("accelerate", "--nnodes {}"),
    "machine-rank": ForeignOption("accelerate", "--node-rank {}"),
    "main-process-ip": ForeignOption("accelerate", "--master {}"),
    "main-process-port": ForeignOption("accelerate", "--master {}"),
    "gpu-ids": ForeignOption("accelerate", "--gpus {}"),
    "multi-gpu": ForeignOption("accelerate", flag=True),
    "same-network": ForeignOption("accelerate", flag=True),
    "config-file": ForeignOption("accelerate", instead="is not read; the strategy is set in the script"),
    "mixed-precision": ForeignOption("accelerate", instead="is set in the script here: Strategy(amp=...)"),
    "dynamo-backend": ForeignOption("accelerate", instead="is not needed: models are compiled on GPUs"),
    "gradient-accumulation-steps": ForeignOption(
        "accelerate", instead="is set in the script here: Strategy(gradient_merge=...)"
    ),
    "use-fsdp": ForeignOption("accelerate", instead="is set in the script here: Strategy(shard=3)", flag=True),
    "use-deepspeed": ForeignOption("accelerate", instead="is set in the script here: Strategy(shard=...)", flag=True),
    "num-cpu-threads-per-process": ForeignOption("accelerate", instead="is the variable OMP_NUM_THREADS here"),
}
_DEEPSPEED = {
    "num-gpus": ForeignOption("deepspeed", "--procs {}"),
    "num-nodes": ForeignOption("deepspeed", "--nnodes {}"),
    "include": ForeignOption("deepspeed", instead="is --hosts a:8,b:8 here, and --gpus 0,2 for GPUs"),
    "exclude": ForeignOption("deepspeed", instead="is --hosts a:8,b:8 here: the hosts that take part"),
    "launcher": ForeignOption("deepspeed", instead="is not needed: hosts are reached by ssh"),
    "no-ssh": ForeignOption("deepspeed", instead="is --nnodes and --master here", flag=True),
    "force-multi": ForeignOption("deepspeed", flag=True),
}
_FLEETRUN = {
    "ips": ForeignOption("fleetrun", "--nnodes {}"),
    "worker-num": ForeignOption("fleetrun", "--workers {}"),
    "server-num": ForeignOption("fleetrun", "--servers {}"),
    "selected-gpus": ForeignOption("fleetrun", "--gpus {}"),
    "devices": ForeignOption("fleetrun", "--gpus {}"),
    "started-port": ForeignOption("fleetrun"),
    "run-mode": ForeignOption("fleetrun"),
    "job-id": ForeignOption("fleetrun"),
}
FOREIGN = {f"--{name}": option for name, option in (_TORCHRUN | _ACCELERATE | _DEEPSPEED | _FLEETRUN).items()}


def is_foreign(name: str) -> bool:
    """Return True if another launcher has an option of this name."""
    return dashed(name) in FOREIGN


@dataclass
class Translation:
    """The arguments of another launcher's command, sorted into foreign options, own options and the rest."""

    values: dict[str, str] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def translate(command: str, argv: Sequence[str], valued: Collection[str]) -> str:
    """Return one line that names the foreign options in ``argv`` and the command to use instead.

    command: name of the command: ``echelon run``
    valued:  options of the command that take a value
    """
    read = _read(argv, valued)
    launchers = sorted({FOREIGN[dashed(name)].launcher for name in read.foreign})
    whole = shlex.join([*command.split(), *_ours(read.values), *read.own, *read.rest])
    notes = [f"{name} {FOREIGN[dashed(name)].instead}" for name in read.foreign if not FOREIGN[dashed(name)].ours]
    are = "is" if len(read.foreign) == 1 else "are"
    heading = f"{', '.join(read.foreign)} {are} {' and '.join(each + chr(39) + 's' for each in launchers)}"
    return "; ".join([f"{heading}: write '{whole}'", *notes])


def _read(argv: Sequence[str], valued: Collection[str]) -> Translation:
    read, at = Translation(), 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        name, equals, value = argv[at].partition("=")
        option = FOREIGN.get(dashed(name))
        takes_next = not equals and (not option.flag if option else dashed(name) in valued)
        if takes_next and at + 1 < len(argv):
            value = argv[at + 1]
        if option is not None:
            read.foreign.append(name)
            read.values[dashed(name)] = value
        else:
            read.own += [dashed(argv[at]), *([value] if takes_next else [])]
        at += 2 if takes_next else 1
    read.rest = list(argv[at:])
    return read


def _ours(values: dict[str, str]) -> list[str]:
    """Return the equivalent options of ``echelon run``."""
    left = dict(values)
    argv = [*_master_options(left), *_processes(left)]
    for name, value in left.items():
        argv += FOREIGN[name].ours.format(value).split(maxsplit=1)
    return argv


def _master_options(left: dict[str, str]) -> list[str]:
    """Remove address and port from ``left`` and return ``--nnodes`` and ``--master``.

    The first host of fleetrun's list is the master.
    """
    hosts = [host for host in left.pop("--ips", "").split(",") if host]
    counted = ["--nnodes", str(len(hosts))] if len(hosts) > 1 else []
    address = left.pop("--master-addr", "") or left.pop("--main-process-ip", "") or (hosts[0] if counted else "")
    port = left.pop("--master-port", "") or left.pop("--main-process-port", "") or PORT
    return [*counted, *(["--master", f"{address}:{port}"] if address else [])]


def _processes(left: dict[str, str]) -> list[str]:
    """Remove the number of processes from ``left`` and return ``--procs``.

    accelerate counts the processes of all hosts, ``--procs`` those of one host.
    """
    total, hosts = left.pop("--num-processes", ""), left.get("--num-machines", "1")
    if total.isdigit() and hosts.isdigit() and int(hosts) and int(total) % int(hosts) == 0:
        return ["--procs", str(int(total) // int(hosts))]
    each = left.pop("--nproc-per-node", "")
    return ["--procs", each] if each.isdigit() else []
