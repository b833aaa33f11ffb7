"""What every rank finds in its environment, and where it leaves the record of its end."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from echelon.base import network
from echelon.base.environment import (
    CHECK,
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
from echelon.launcher.job import Job


class RankEnvironment(LogsSpecs):
    """torch asks its ``LogsSpecs`` for each rank's files just before starting it, environment in hand.

    The streams stay untouched here (worker.py opens the log); only the record's path and the names known from
    Paddle are added. ``endpoints`` must be set before: one ``host:port`` per rank of the whole job; ``more`` may be:
    what else every rank of this host finds in its environment.
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
    """Logs of an earlier, larger job in the same directory would pass for this one's."""
    for log in log_dir.glob(f"{kind}-*.log"):
        number = log.stem.removeprefix(f"{kind}-")
        if number.isdigit() and int(number) >= beyond:
            log.unlink(missing_ok=True)


def export(job: Job, address: str) -> None:
    """Put into our own environment, which the ranks inherit, what is the same for all ranks of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.processes)))
    os.environ[LOG_DIR] = str(job.log_dir)
    if job.elastic is not None:
        os.environ[ELASTIC] = job.elastic
    os.environ[STALL] = f"{job.stall:g}"
    if job.checked:
        os.environ[CHECK] = "1"
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # the user's own collectives, too
    if job.traceback:
        os.environ[TRACEBACK] = "1"
    if job.timeline is not None:
        os.environ[TIMELINE] = job.timeline
    if job.plan is not None:
        os.environ[PLAN] = str(job.plan)
    if job.visible_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.visible_gpus
    if job.nic is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = job.nic
        return
    # Gloo would take whatever the host's name resolves to, often not the interface that reaches the others
    if carrier := network.interface_with(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", carrier)
    if job.one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # nobody outside this host has business here
