"""The rank and job of this process, read from the environment variables of the launcher that started it.

All names of environment variables are defined here. The first launcher whose variables are present wins: ``echelon
run`` and ``torchrun`` (RANK ...), Slurm's ``srun``, Open MPI's ``mpirun``. Without any of them there is one process,
or a trainer that is described by its endpoint (echelon/distributed/endpoint_trainers.py).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.base.errors import UsageError

LOG_DIR = "ECHELON_LOG_DIR"
#: The launcher's command line as JSON, for the run log.
COMMAND = "ECHELON_COMMAND"
#: The directory of the run log, if it is not the log directory (``echelon train`` has an output_dir).
RECORD_DIR = "ECHELON_RECORD_DIR"
# Names that Paddle's scripts read. The launcher sets them; the number of hosts may also be given by them.
PADDLE_RANK, PADDLE_WORLD = "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"
PADDLE_ENDPOINTS, PADDLE_ENDPOINT = "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"
PADDLE_HOSTS = ("PADDLE_NUM_TRAINERS", PADDLE_WORLD)
LOOPBACK = "127.0.0.1"

# A job with parameter servers: role of this process, and endpoints of the servers. The first three are Paddle's names.
TRAINING_ROLE = "TRAINING_ROLE"  # TRAINER or PSERVER
PADDLE_SERVERS = ("PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PSERVER_ENDPOINTS")
POD_IP, PADDLE_PORT = "POD_IP", "PADDLE_PORT"
#: The token that servers require from clients, and the name of this run of the job.
PS_TOKEN, PS_SESSION = "ECHELON_PS_TOKEN", "ECHELON_PS_SESSION"
#: A file with the token; PEM files: own certificate and key, CA of trusted servers, CA of accepted clients.
PS_TOKEN_FILE, PS_CERT, PS_KEY = "ECHELON_PS_TOKEN_FILE", "ECHELON_PS_CERT", "ECHELON_PS_KEY"
PS_CA, PS_CLIENT_CA = "ECHELON_PS_CA", "ECHELON_PS_CLIENT_CA"
#: The directory in which servers keep their state; seconds to wait for a role that has not joined yet.
PS_STATE, PS_JOIN_TIMEOUT = "ECHELON_PS_STATE", "ECHELON_PS_JOIN_TIMEOUT"
#: The directories, with colons between them, in which servers write and read what workers ask for; default: all.
PS_PATHS = "ECHELON_PS_PATHS"
#: The file by which workers that joined torch.distributed tell the launcher that a failure of one ends them all.
BOUND_MARK = "ECHELON_BOUND_MARK"
#: How often the launcher has restarted this process; RESTART_COUNT: how often it has restarted all ranks together.
RESTARTS, RESTART_COUNT = "ECHELON_RESTARTS", "TORCHELASTIC_RESTART_COUNT"
#: The name that torch's agents give to a run.
RUN_ID = "TORCHELASTIC_RUN_ID"
#: "True" if the launcher serves the ranks' store; otherwise rank 0 does.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
#: Set if echelon.launch() started the process.
LAUNCHED = "ECHELON_LAUNCHED"
#: The index of this server process in the list; ``echelon run`` names the log after it.
SERVER_INDEX = "ECHELON_SERVER"

#: The directory of caches; ``~/.cache`` by default. ``echelon bench`` writes there.
CACHE_HOME = "XDG_CACHE_HOME"
#: The directory of downloaded data sets; ``echelon/data`` in the cache by default.
DATA_DIR = "ECHELON_DATA_DIR"

#: The file with the plan to run; a file with a candidate plan to time in a throw-away process.
PLAN, TRIAL = "ECHELON_PLAN", "ECHELON_TRIAL"
#: Set by ``echelon plan``: a file with the question that ``distribute()`` answers instead of training.
PLAN_ONLY = "ECHELON_PLAN_ONLY"
#: Set by ``echelon verify``: a file that says which values the processes record or compare.
VERIFY = "ECHELON_VERIFY"

#: The secret of a job on several hosts, or a file that holds it.
TOKEN, TOKEN_FILE = "ECHELON_TOKEN", "ECHELON_TOKEN_FILE"
#: The range of the number of hosts of an elastic job, as ``2:8``.
ELASTIC = "ECHELON_ELASTIC"
#: The snapshot servers of the hosts as JSON (see echelon/checkpoint/in_memory), and the interval of snapshots in steps.
MEMORY, COPIES = "ECHELON_MEMORY", "ECHELON_COPIES"
#: A directory: a rank that saves and exits on SIGTERM or SIGUSR1 creates a file ``rank-N`` there.
LEAVE_MARK = "ECHELON_LEAVE_MARK"
#: Seconds that a rank may be late before all consoles report it; 0: never.
STALL = "ECHELON_STALL"
#: Set if the launcher detects late ranks; otherwise rank 0 does.
STALL_JUDGE = "ECHELON_STALL_JUDGE"
#: Seconds of waiting for another process at startup before a line names that process; the directory in which processes
#: leave such lines for the console of their launcher.
WAIT_NOTICE, WAIT_LINES = "ECHELON_WAIT_NOTICE", "ECHELON_WAIT_LINES"
#: 1: ranks compare their calls in every step, not only in the first ones.
CHECK = "ECHELON_CHECK"
#: 0: the fast path is off for strategies that do not mention it.
FAST = "ECHELON_FAST"
#: 1: errors are shown with their whole traceback, not in one line or without frames of echelon.
TRACEBACK = "ECHELON_TRACEBACK"
#: The steps whose timeline is recorded: ``5:10``, or ``auto``; see echelon/observability/trace.
TIMELINE = "ECHELON_TIMELINE"
#: The file in which the ranks of ``echelon doctor`` write the number of problems for the command.
DOCTOR_RESULT = "ECHELON_DOCTOR_RESULT"
#: The exit code of a process that was preempted, has saved, and is to be restarted (EX_TEMPFAIL).
REQUEUE = 75

#: Set by srun for its tasks. A plain command in a batch script has SLURM_PROCID and SLURM_NTASKS too, but is alone.
SLURM_STEP = "SLURM_STEP_NUM_TASKS"
#: For the job and for a step: its id, number of nodes and compressed node list; and the index of this node.
SLURM_JOB, SLURM_JOB_NODES, SLURM_JOB_LIST = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"
SLURM_STEP_NODES, SLURM_STEP_LIST, SLURM_NODE = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_NODEID"
SLURM_CPUS = "SLURM_CPUS_PER_TASK"
#: Set in every container of a Kubernetes cluster.
KUBERNETES = "KUBERNETES_SERVICE_HOST"


@dataclass(frozen=True)
class RankInfo:
    """This process's coordinates in the job.

    endpoints:  ``host:port`` of every rank, if the trainers were given by endpoints and not started by a launcher
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher: str
    endpoints: tuple[str, ...] = ()

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size


ALONE = RankInfo(0, 1, 0, 1, 0, LOOPBACK, 0, "one process")


def detect_rank_info(env: Mapping[str, str] | None = None) -> RankInfo:
    """Return the coordinates of this process from the launcher's variables; ``ALONE`` if there are none."""
    env = os.environ if env is None else env
    for present, read in (("RANK", _torchrun), (SLURM_STEP, _slurm), ("OMPI_COMM_WORLD_RANK", _open_mpi)):
        if present in env:
            place = read(env)
            return place if place.world_size > 1 or present == "RANK" else ALONE
    return ALONE


def worker_rank_info(index: int, workers: int, env: Mapping[str, str] | None = None) -> RankInfo:
    """Return the coordinates of worker ``index`` of a job with parameter servers. It may have no master endpoint."""
    env = os.environ if env is None else env
    here = max(1, whole_number(env, "LOCAL_WORLD_SIZE", 1))
    return RankInfo(
        rank=index,
        world_size=workers,
        local_rank=whole_number(env, "LOCAL_RANK", index % here),
        local_world_size=here,
        node_rank=whole_number(env, "GROUP_RANK", 0),
        master_addr=env.get("MASTER_ADDR", ""),
        master_port=whole_number(env, "MASTER_PORT", 0),
        launcher="echelon run" if LOG_DIR in env else "parameter servers",
    )


def _torchrun(env: Mapping[str, str]) -> RankInfo:
    world = whole_number(env, "WORLD_SIZE")
    local_world = whole_number(env, "LOCAL_WORLD_SIZE", world)
    return _checked(
        RankInfo(
            rank=whole_number(env, "RANK"),
            world_size=world,
            local_rank=whole_number(env, "LOCAL_RANK", whole_number(env, "RANK") % local_world),
            local_world_size=local_world,
            node_rank=whole_number(env, "GROUP_RANK", whole_number(env, "RANK") // local_world),
            master_addr=_text(env, "MASTER_ADDR"),
            master_port=whole_number(env, "MASTER_PORT"),
            launcher="echelon.launch" if LAUNCHED in env else "echelon run" if LOG_DIR in env else "torchrun",
        )
    )


def _slurm(env: Mapping[str, str]) -> RankInfo:
    hosts = expand_hosts(env.get(SLURM_STEP_LIST) or env.get(SLURM_JOB_LIST) or "localhost")
    world = whole_number(env, SLURM_STEP)
    return _checked(
        RankInfo(
            rank=whole_number(env, "SLURM_PROCID"),
            world_size=world,
            local_rank=whole_number(env, "SLURM_LOCALID"),
            local_world_size=_slurm_local_tasks(env, world),
            node_rank=whole_number(env, SLURM_NODE, 0),
            master_addr=env.get("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else LOOPBACK),
            master_port=whole_number(env, "MASTER_PORT", port_for(env.get(SLURM_JOB, "0"))),
            launcher="Slurm",
        )
    )


def _slurm_local_tasks(env: Mapping[str, str], world: int) -> int:
    """Return the number of tasks on this node. ``4(x2),2`` means four tasks on each of two nodes, two on the third."""
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        counts += [int(count)] * int(repeat or 1)
    node = whole_number(env, SLURM_NODE, 0)
    return counts[node] if node < len(counts) else counts[-1]


def _open_mpi(env: Mapping[str, str]) -> RankInfo:
    world, local_world = whole_number(env, "OMPI_COMM_WORLD_SIZE"), whole_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = env.get("MASTER_ADDR") or (LOOPBACK if world == local_world else "")
    if not address:
        raise UsageError(
            "Open MPI runs on several hosts and does not say where rank 0 is; "
            "name its host: mpirun -x MASTER_ADDR=<host of rank 0> ..."
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "0"
    return _checked(
        RankInfo(
            rank=whole_number(env, "OMPI_COMM_WORLD_RANK"),
            world_size=world,
            local_rank=whole_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=local_world,
            node_rank=whole_number(env, "OMPI_COMM_WORLD_RANK") // local_world,
            master_addr=address,
            master_port=whole_number(env, "MASTER_PORT", port_for(job)),
            launcher="Open MPI",
        )
    )


def _checked(place: RankInfo) -> RankInfo:
    if not 0 <= place.rank < place.world_size:
        raise UsageError(
            f"{place.launcher} says rank {place.rank} of {place.world_size} processes; "
            "the rank must lie between 0 and the number of processes less one"
        )
    return place


def expand_hosts(nodelist: str) -> list[str]:
    """Expand Slurm's node list: ``gpu[01-03,07]-ib,rack[1-2]n[1-2]`` is gpu01-ib ... gpu07-ib, rack1n1, rack1n2 ..."""
    return [host for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist) for host in _expand_pattern(pattern)]


def _expand_pattern(pattern: str) -> list[str]:
    """Return all names of one pattern; the last bracket varies fastest."""
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [before]
    body, _, after = rest.partition("]")
    numbers = [number for part in body.split(",") for number in _count(*part.partition("-")[::2])]
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand_pattern(after)]


def _count(first: str, last: str) -> list[str]:
    """Return the numbers from ``first`` to ``last``, padded to the width of ``first``."""
    return [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]


def port_for(job: str) -> int:
    """Return a port that all processes of a job compute without communication; other jobs most likely get another."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def whole_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable's value, ``default`` if it is not set. Raises ``UsageError`` unless it is a whole number."""
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
