"""One host's part of the job: start its ranks, watch them and the other hosts, end or restart them all together."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from echelon.launch.failure import Failure, first_cause, read_record
from echelon.launch.guard import Guard, end_sessions
from echelon.launch.job import Job
from echelon.launch.muster import Muster
from echelon.launch.ranks import RankEnvironment, forget_logs
from echelon.launch.signals import signals_held

#: Seconds between asking the ranks to end and killing them.
GRACE = 5
#: How often the ranks are looked at; between hosts, how often they ask one another.
LOOK, ASK = 0.1, 0.5


class JobFailed(Exception):
    """The job is over and this is why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure


@dataclass
class _Pace:
    """Tells when another ``seconds`` have passed."""

    seconds: float
    last: float = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True


class HostAgent(LocalElasticAgent):
    """torch's agent starts and ends the processes; which failure counts, and what follows, is decided here."""

    def __init__(self, job: Job, muster: Muster, ranks: RankEnvironment, guard: Guard, host: str) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.procs,
            entrypoint=sys.executable,
            args=tuple(
                word.replace("$", "$$") for word in job.command
            ),  # torch fills in ${...} and would eat a dollar,
            rdzv_handler=muster,
            max_restarts=job.max_restarts,
            monitor_interval=LOOK,
        )
        super().__init__(spec, ranks)
        self._muster, self._ranks, self._guard, self._host = muster, ranks, guard, host
        self._sessions: list[int] = []
        self._succeeded = False
        self._pace = _Pace(ASK if job.nnodes > 1 else 0.0)

    def _invoke_run(self, role: str = "") -> RunResult:
        """Until every rank of every host is done; raises ``JobFailed`` when a failure is final."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(LOOK)
            verdict = self._local_verdict() or self._others_verdict()
            if verdict is None:
                if self._succeeded:
                    return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in group.workers})
            elif verdict.again:
                restart = f"restart {self._muster.round + 1} of {group.spec.max_restarts}"
                cause = f"{verdict.failure.who} {verdict.failure.how}"
                print(f"echelon: restarting all ranks ({restart}) because {cause}", file=sys.stderr, flush=True)
                self._restart_workers(group)
            else:
                self._stop_workers(group)
                raise JobFailed(verdict.failure)

    def _local_verdict(self) -> Any:
        failures = [self._describe(rank, code) for rank, code in self._exit_codes() if code]
        return self._muster.settle(first_cause(failures)) if failures else None

    def _others_verdict(self) -> Any:
        """What the other hosts say; also takes note when the whole job is done."""
        if not self._pace.due():
            return None
        self._muster.beat()
        if (verdict := self._muster.verdict()) is not None:
            return verdict
        if all(code == 0 for _, code in self._exit_codes()):
            self._muster.finish()
            self._succeeded = self._muster.all_finished()
        if silent := self._muster.silent_host():
            return self._muster.settle(host_failure(silent.name, "has not been heard of; is it up?", 1))
        return None

    def _exit_codes(self) -> list[tuple[Worker, int | None]]:
        assert isinstance(self._pcontext, SubprocessContext)
        processes = self._pcontext.subprocess_handlers
        return [(rank, processes[rank.local_rank].proc.poll()) for rank in self._worker_group.workers]

    def _describe(self, rank: Worker, exit_code: int) -> Failure:
        record = read_record(self._ranks.record_of(rank.global_rank))
        return Failure(
            rank=rank.global_rank,
            world_size=rank.world_size,
            host=self._host,
            pid=rank.id,
            exit_code=exit_code,
            log=str(self._ranks.log_of(rank.global_rank)),
            **record,
        )

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # The round is the number of restarts of the whole job: every host must give its ranks the same
        self._remaining_restarts = worker_group.spec.max_restarts - self._muster.round
        self._ranks.endpoints = self._muster.endpoints
        if self._muster.round == 0 and self._muster.node_rank == 0:
            forget_logs(self._ranks.log_dir, "rank", beyond=len(self._muster.endpoints))
            forget_logs(self._ranks.log_dir, "server", beyond=0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with signals_held():
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._sessions = list(pids.values())
            self._guard.watch(self._sessions)
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE, **_: Any) -> None:
        """Ask all ranks to end, kill those that do not, then whatever they left running in their sessions."""
        with signals_held():
            if self._pcontext is not None:
                self._pcontext.close(death_sig, GRACE)  # torch's own call would wait 30 s, in 2.11 always
            super()._shutdown(death_sig)
            if not self._succeeded:
                end_sessions(self._sessions)
                self._sessions = []


def host_failure(host: str, message: str, exit_code: int) -> Failure:
    return Failure(-1, 0, host, 0, exit_code, time.time(), message=message)
