"""Where this process stands in the job, read from whichever launcher started it.

One home for every name of an environment variable. The first launcher whose variables are present wins:
``echelon run`` and ``torchrun`` (RANK ...), Slurm's ``srun``, Open MPI's ``mpirun``; with none, one process.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import UsageError

LOG_DIR = "ECHELON_LOG_DIR"
# Names that Paddle's scripts look for. The launcher sets them; the number of hosts may also be asked for by them.
PADDLE_RANK, PADDLE_WORLD = "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"
PADDLE_ENDPOINTS, PADDLE_ENDPOINT = "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"
PADDLE_HOSTS = ("PADDLE_NUM_TRAINERS", PADDLE_WORLD)
LOOPBACK = "127.0.0.1"
#: Set by srun for its tasks. A plain command in a batch script sees SLURM_PROCID and SLURM_NTASKS too, but is alone.
SLURM_STEP = "SLURM_STEP_NUM_TASKS"


@dataclass(frozen=True)
class Place:
    """This process's coordinates in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher: str

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size


ALONE = Place(0, 1, 0, 1, 0, LOOPBACK, 0, "one process")


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """This process's place, from the launcher's variables; alone when there are none."""
    env = os.environ if env is None else env
    for present, read in (("RANK", _torchrun), (SLURM_STEP, _slurm), ("OMPI_COMM_WORLD_RANK", _open_mpi)):
        if present in env:
            place = read(env)
            return place if place.world_size > 1 or present == "RANK" else ALONE
    return ALONE


def _torchrun(env: Mapping[str, str]) -> Place:
    world = _int(env, "WORLD_SIZE")
    local_world = _int(env, "LOCAL_WORLD_SIZE", world)
    return _checked(
        Place(
            rank=_int(env, "RANK"),
            world_size=world,
            local_rank=_int(env, "LOCAL_RANK", _int(env, "RANK") % local_world),
            local_world_size=local_world,
            node_rank=_int(env, "GROUP_RANK", _int(env, "RANK") // local_world),
            master_addr=_text(env, "MASTER_ADDR"),
            master_port=_int(env, "MASTER_PORT"),
            launcher="echelon run" if LOG_DIR in env else "torchrun",
        )
    )


def _slurm(env: Mapping[str, str]) -> Place:
    hosts = expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost")
    world = _int(env, SLURM_STEP)
    return _checked(
        Place(
            rank=_int(env, "SLURM_PROCID"),
            world_size=world,
            local_rank=_int(env, "SLURM_LOCALID"),
            local_world_size=_slurm_local_tasks(env, world),
            node_rank=_int(env, "SLURM_NODEID", 0),
            master_addr=env.get("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else LOOPBACK),
            master_port=_int(env, "MASTER_PORT", _port_for(env.get("SLURM_JOB_ID", "0"))),
            launcher="Slurm",
        )
    )


def _slurm_local_tasks(env: Mapping[str, str], world: int) -> int:
    """SLURM_STEP_TASKS_PER_NODE reads like ``4(x2),2``: four tasks on each of two nodes, two on the third."""
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        counts += [int(count)] * int(repeat or 1)
    node = _int(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[-1]


def _open_mpi(env: Mapping[str, str]) -> Place:
    world, local_world = _int(env, "OMPI_COMM_WORLD_SIZE"), _int(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = env.get("MASTER_ADDR") or (LOOPBACK if world == local_world else "")
    if not address:
        raise UsageError(
            "Open MPI runs on several hosts and does not say where rank 0 is; "
            "name its host: mpirun -x MASTER_ADDR=<host of rank 0> ..."
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "0"
    return _checked(
        Place(
            rank=_int(env, "OMPI_COMM_WORLD_RANK"),
            world_size=world,
            local_rank=_int(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=local_world,
            node_rank=_int(env, "OMPI_COMM_WORLD_RANK") // local_world,
            master_addr=address,
            master_port=_int(env, "MASTER_PORT", _port_for(job)),
            launcher="Open MPI",
        )
    )


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.world_size:
        raise UsageError(
            f"{place.launcher} says rank {place.rank} of {place.world_size} processes; "
            "the rank must lie between 0 and the number of processes less one"
        )
    return place


def expand_hosts(nodelist: str) -> list[str]:
    """Slurm's compressed list: ``gpu[01-03,07],login`` is gpu01, gpu02, gpu03, gpu07, login."""
    hosts: list[str] = []
    for prefix, body, suffix in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodelist):
        if not body:
            hosts.append(prefix + suffix)
            continue
        for part in body.split(","):
            first, _, last = part.partition("-")
            width = len(first)
            hosts += [f"{prefix}{n:0{width}d}{suffix}" for n in range(int(first), int(last or first) + 1)]
    return hosts


def _port_for(job: str) -> int:
    """A port that all processes of one job agree on without talking, apart from other jobs' ports."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        found = f"is '{text}'" if text else "is not set"
        raise UsageError(f"{name} must be a whole number, but it {found} in the environment") from None


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise UsageError(f"{name} is not set in the environment, although RANK is; start with 'echelon run'")
    return env[name]
