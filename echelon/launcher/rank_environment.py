"""``RankEnvironment``: the environment variables of every rank, and the path of the record of its end."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from echelon.base import network
from echelon.base.environment import (
    CHECK,
    COMMAND,
    ELASTIC,
    LOG_DIR,
    PADDLE_ENDPOINT,
    PADDLE_ENDPOINTS,
    PADDLE_HOSTS,
    PADDLE_RANK,
    PADDLE_WORLD,
    PLAN,
    STALL,
    TIMELINE,
    TRACEBACK,
)
from echelon.base.process_info import own_command
from echelon.launcher.job import Job
from echelon.observability.runlog.run_directory import forget_elsewhere


class RankEnvironment(LogsSpecs):
    """A ``LogsSpecs``, which torch calls with each rank's environment just before it starts the rank.

    It does not redirect output, because rank_main.py opens the log; it adds the record's path and Paddle's variables.
    ``endpoints``, one ``host:port`` per rank of the whole job, must be set before; ``more`` may have more variables for
    every rank of this host.
    """

    def __init__(self, log_dir: Path, records: Path) -> None:
        super().__init__(log_dir=str(log_dir))
        self.log_dir = log_dir
        self.endpoints: list[str] = []
        self.more: dict[str, str] = {}
        self._records = records

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def log_of(self, rank: int) -> Path:
        return self.log_dir / f"rank-{rank}.log"

    def record_of(self, rank: int) -> Path:
        return self._records / f"rank-{rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            rank = int(env["RANK"])
            self.record_of(rank).unlink(missing_ok=True)
            env.update(self.more)
            env |= {
                "TORCHELASTIC_ERROR_FILE": str(self.record_of(rank)),
                PADDLE_RANK: str(rank),
                PADDLE_WORLD: env["WORLD_SIZE"],
                PADDLE_HOSTS[0]: env["GROUP_WORLD_SIZE"],
                PADDLE_ENDPOINTS: ",".join(self.endpoints),
                PADDLE_ENDPOINT: self.endpoints[rank],
            }
        untouched = dict.fromkeys(envs, "")
        records = {local: env["TORCHELASTIC_ERROR_FILE"] for local, env in envs.items()}
        return LogsDest(stdouts=dict(untouched), stderrs=dict(untouched), error_files=records)


def forget_logs(log_dir: Path, kind: str, beyond: int) -> None:
    """Remove logs of an earlier, larger job in the same directory, which would look like logs of this job."""
    for log in log_dir.glob(f"{kind}-*.log"):
        number = log.stem.removeprefix(f"{kind}-")
        if number.isdigit() and int(number) >= beyond:
            log.unlink(missing_ok=True)


def export(job: Job, address: str) -> None:
    """Set variables that are the same for all ranks of this host in the launcher's environment, which they inherit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.processes)))
    os.environ[LOG_DIR] = str(job.log_dir)
    os.environ[COMMAND] = json.dumps(own_command())
    forget_elsewhere(job.log_dir)
    if job.elastic is not None:
        os.environ[ELASTIC] = job.elastic
    os.environ[STALL] = f"{job.options.stall:g}"
    if job.options.checked:
        os.environ[CHECK] = "1"
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # checks collectives of user code, too
    if job.options.traceback:
        os.environ[TRACEBACK] = "1"
    if job.timeline is not None:
        os.environ[TIMELINE] = job.timeline
    if job.plan is not None:
        os.environ[PLAN] = str(job.plan)
    if job.visible_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.visible_gpus
    if job.options.nic is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = job.options.nic
        return
    # Gloo would use the address of the host's name, often not on the interface that reaches the other hosts
    if carrier := network.interface_with(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", carrier)
    if job.one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # other hosts have no reason to connect
