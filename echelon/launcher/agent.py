"""``HostAgent``: starts the ranks of one host, watches them and the other hosts, ends or restarts them together."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from echelon.base.console import say
from echelon.base.environment import REQUEUE
from echelon.base.errors import PeerLost
from echelon.base.poll_interval import PollInterval
from echelon.launcher.agent_plugin import AgentPlugin
from echelon.launcher.failure import Failure, first_cause, read_record
from echelon.launcher.graceful_stop import GracefulStopMarkers, request_graceful_stop
from echelon.launcher.job import Job
from echelon.launcher.orphan_reaper import OrphanReaper, end_sessions
from echelon.launcher.rank_environment import RankEnvironment, forget_logs
from echelon.launcher.rendezvous.handler import LauncherRendezvous, RoundEnded
from echelon.launcher.rendezvous.messages import RoundOutcome, host_failure
from echelon.launcher.rendezvous.store_client import StoreLost
from echelon.launcher.signals import StopNotice, signals_held
from echelon.observability.runlog.events import Kind, note_beside

#: Seconds between SIGTERM and SIGKILL. NO_GRACE: for ranks that save on SIGTERM, when saving is no longer possible.
GRACE, NO_GRACE = 5, 1
#: Seconds between two checks of the ranks, and between two checks of the other hosts.
LOOK, ASK = 0.1, 0.5
#: Seconds to wait for the host that stopped its ranks to announce it, when this host's ranks left with them.
WORD_OF_LEAVING = 3.0


def stopped_host(host: str, number: signal.Signals) -> Failure:
    return host_failure(host, f"was stopped by {number.name}", -number)


class JobFailed(Exception):
    """The job has failed; ``failure`` is the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure


class HostPreempted(Exception):
    """This host was preempted, and its ranks have saved. ``goes_on``: the job continues without it."""

    def __init__(self, number: signal.Signals, goes_on: bool) -> None:
        super().__init__(number.name)
        self.number, self.goes_on = number, goes_on


class HostAgent(LocalElasticAgent):
    """Uses torch's agent to start and end processes; this class decides which failure counts, and what follows."""

    def __init__(
        self,
        job: Job,
        rendezvous: LauncherRendezvous,
        ranks: RankEnvironment,
        reaper: OrphanReaper,
        host: str,
        marks: GracefulStopMarkers,
        plugins: Sequence[AgentPlugin] = (),
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.procs,
            entrypoint=sys.executable,
            # torch substitutes ${...}, so a dollar must be escaped
            args=tuple(word.replace("$", "$$") for word in job.command),
            rdzv_handler=rendezvous,
            max_restarts=job.max_restarts,
            monitor_interval=LOOK,
        )
        super().__init__(spec, ranks)
        self._launcher_rendezvous, self._ranks, self._reaper, self._host = rendezvous, ranks, reaper, host
        self._marks, self._plugins, self._grace = marks, plugins, job.options.grace
        self._sessions: list[int] = []
        self._succeeded = False
        self._notice = StopNotice()
        self._left_since: float | None = None
        self._pace = PollInterval(ASK if job.nnodes > 1 else 0.0)
        self._polls = PollInterval(ASK)

    def _invoke_run(self, role: str = "") -> RunResult:
        """Run until every rank of every host is done; raises ``JobFailed`` when a failure is final."""
        outcome = None
        while True:
            try:
                self._begin(outcome)
                with self._notice.handled():
                    outcome = self._watch()
                    if outcome is None:
                        self._end_plugins()
                        return self._success()
                    self._announce(outcome)
                    self._end(outcome)
            except StoreLost as error:
                outcome = self._launcher_rendezvous.recover_lost_store(error)
                self._announce(outcome)
                self._end(outcome)
            except RoundEnded as end:
                outcome = end.outcome
            except SignalException as stop:
                self._leave_round(stop)
                raise
            if not outcome.again:
                raise JobFailed(outcome.failure)
            if self._succeeded:
                return self._success()
            self._launcher_rendezvous.accept(outcome)

    def _success(self) -> RunResult:
        return RunResult(WorkerState.SUCCEEDED, {rank.global_rank: None for rank in self._worker_group.workers})

    def _begin(self, outcome: RoundOutcome | None) -> None:
        before = self._launcher_rendezvous.members
        if self._notice.given is not None:  # the signal arrived while another cause ended the ranks
            raise SignalException(f"stopped by {self._notice.given.name}", self._notice.given)
        self._initialize_workers(self._worker_group)
        if changes := self._launcher_rendezvous.members.changes(
            before, self._host, outcome.failure if outcome else None
        ):
            say(changes)
            self.note("notice", changes)
        pids = {rank.global_rank: int(rank.id) for rank in self._worker_group.workers}
        for plugin in self._plugins:
            plugin.begin(self._round, pids)

    def _watch(self) -> RoundOutcome | None:
        """Watch until the round is over; return its outcome, None if all ranks have succeeded."""
        while True:
            time.sleep(LOOK)
            if self._notice.given is not None:
                self._leave(self._notice.given)
            outcome = self._local_verdict() or self._others_verdict()
            if outcome is not None or self._succeeded:
                return outcome

    def _local_verdict(self) -> RoundOutcome | None:
        codes = self._exit_codes()
        failures = [self._describe(rank, code) for rank, code in codes if code and not self._has_left(rank, code)]
        if failures:
            cause = first_cause(failures)
            lost = self._launcher_rendezvous.find_lost() if cause.secondary else None
            return lost or self._launcher_rendezvous.settle(cause)
        if any(code == REQUEUE for _, code in codes):
            return self._left_unasked([code for _, code in codes])
        if self._polls.due():
            for plugin in self._plugins:
                if (result := plugin.poll()) is not None:
                    return self._launcher_rendezvous.settle(result, "stuck")
        return None

    def _others_verdict(self) -> RoundOutcome | None:
        """Return the outcome that other hosts report; also detect that the whole job is done."""
        if not self._pace.due():
            return None
        if (outcome := self._launcher_rendezvous.outcome()) is not None:
            return outcome
        if all(code == 0 for _, code in self._exit_codes()):
            self._launcher_rendezvous.finish()
            self._succeeded = self._launcher_rendezvous.all_finished()
        return None if self._succeeded else self._launcher_rendezvous.changed_hosts()

    # Preemption

    def _leave(self, number: signal.Signals) -> None:
        """Leave the job after a signal. Ranks that can save get the time for it; a second signal ends that."""
        if not self._can_leave():
            raise SignalException(f"stopped by {number.name}", number)
        leaving = host_failure(self._host, f"is leaving ({number.name})", REQUEUE)
        try:
            outcome = self._launcher_rendezvous.leave_rendezvous(leaving)
        except StoreLost:
            outcome = RoundOutcome(leaving, again=False, cause="leaving")
        if not self._end(outcome, requested=True):
            raise SignalException(f"stopped by {number.name}", number)
        raise HostPreempted(number, goes_on=outcome.again)

    def _leave_round(self, stop: SignalException) -> None:
        """Leave the round before its ranks are ended: the others would take their loss for a failure."""
        if self._launcher_rendezvous.hosts:
            with contextlib.suppress(PeerLost):
                self._launcher_rendezvous.leave_rendezvous(stopped_host(self._host, stop.sigval))

    def _left_unasked(self, codes: list[int | None]) -> RoundOutcome | None:
        """Decide the round whose ranks left without a request of this host: another host's, or a signal to a rank."""
        now = time.monotonic()
        self._left_since = self._left_since or now
        waited = now - self._left_since
        if waited < WORD_OF_LEAVING or (None in codes and waited < self._grace):
            return None
        return self._launcher_rendezvous.settle(
            host_failure(self._host, "has saved and requests a restart", REQUEUE), "left"
        )

    def _can_leave(self) -> bool:
        return any(self._marks.has(rank.global_rank) for rank in self._worker_group.workers)

    def _has_left(self, rank: Worker, code: int) -> bool:
        return code == REQUEUE and self._marks.has(rank.global_rank)

    def _end(self, outcome: RoundOutcome, requested: bool = False) -> bool:
        """End the ranks of this round; return True if all have saved and exited by themselves."""
        left = False
        if (outcome.soft or requested) and self._can_leave():
            running = [int(rank.id) for rank, code in self._exit_codes() if code is None]
            left = request_graceful_stop(running, lambda: [code for _, code in self._exit_codes()], self._grace)
            if left and outcome.again and not any(code for _, code in self._exit_codes()):
                self._finish_all()
        self._stop_workers(self._worker_group)
        self._worker_group.state = WorkerState.STOPPED
        self._end_plugins()
        with contextlib.suppress(StoreLost):
            self._launcher_rendezvous.ended()
            if left and (requested or not outcome.again):
                self._launcher_rendezvous.wait_for_other_hosts(self._grace)
        return left

    def _end_plugins(self) -> None:
        for plugin in self._plugins:
            plugin.end()

    def _finish_all(self) -> None:
        """Finish the job if all hosts' ranks were already done when they were asked to stop."""
        self._launcher_rendezvous.finish()
        deadline = time.monotonic() + GRACE
        while not self._succeeded and time.monotonic() < deadline:
            time.sleep(LOOK)
            self._succeeded = self._launcher_rendezvous.all_finished()

    # Log lines

    def note(self, kind: Kind, text: str, failure: Failure | None = None) -> None:
        """Write an event to the run log, with the failed rank. One host writes for all, as hosts may share the log."""
        if self._launcher_rendezvous.is_first:
            rank, details = (None, {}) if failure is None else (failure.of_rank, failure.details)
            note_beside(kind, text, rank, **details)

    def _announce(self, outcome: RoundOutcome) -> None:
        if outcome.again and outcome.counted:
            restart = f"restart {self._launcher_rendezvous.restarts + 1} of {self._worker_group.spec.max_restarts}"
            cause = f"{outcome.failure.who} {outcome.failure.how}"
            say(f"restarting all ranks ({restart}) because {cause}")
            self.note("restart", f"restarting all ranks ({restart}) because {cause}", outcome.failure)

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

    # Overridden methods of torch's agent

    def _exit_codes(self) -> list[tuple[Worker, int | None]]:
        if self._pcontext is None:
            return []
        assert isinstance(self._pcontext, SubprocessContext)
        processes = self._pcontext.subprocess_handlers
        return [(rank, processes[rank.local_rank].proc.poll()) for rank in self._worker_group.workers]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # torch derives the restart count from it: the round's number, which must be the same on every host
        self._remaining_restarts = worker_group.spec.max_restarts - self._launcher_rendezvous.members.number
        self._round = self._launcher_rendezvous.as_round(self._ranks.log_dir)
        self._ranks.endpoints = self._launcher_rendezvous.endpoints
        self._ranks.more = dict(self._marks.environment)
        for plugin in self._plugins:
            self._ranks.more |= plugin.environment(self._round)
        if self._launcher_rendezvous.members.number == 0 and self._launcher_rendezvous.is_first:
            forget_logs(self._ranks.log_dir, "rank", beyond=len(self._launcher_rendezvous.endpoints))
            forget_logs(self._ranks.log_dir, "server", beyond=0)

    def _assign_worker_ranks(self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec) -> Any:
        """Assign ranks by the hosts' endpoints, one per rank. torch's own method waits in the store for every host."""
        counts = [len(host.endpoints) for host in self._launcher_rendezvous.hosts]
        first, world = sum(counts[:group_rank]), sum(counts)
        return [Worker(local, first + local, first + local, world, world) for local in range(counts[group_rank])]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._marks.clear()
        self._left_since = None
        with signals_held():
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._sessions = list(pids.values())
            self._reaper.watch(self._sessions)
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE, **_: Any) -> None:
        """Terminate all ranks, kill those that remain, then kill other processes in their sessions."""
        with signals_held():
            if self._pcontext is not None:
                patience = NO_GRACE if self._can_leave() else GRACE
                self._pcontext.close(death_sig, patience)  # torch's own call would wait 30 s (in 2.11 always)
            super()._shutdown(death_sig)
            if not self._succeeded:
                end_sessions(self._sessions)
                self._sessions = []
