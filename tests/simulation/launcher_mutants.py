"""Bugs of one line in launchers that lives must find: make simulate RUN="launcher_mutants.py [--lives N] [WORDS]"

The last ones are bugs that Echelon had until a life found them.
"""

from __future__ import annotations

from launcher_life import live
from mutation import Mutant, search
from seeds import LAUNCHER_FOUND_BY
from simulated_launchers import simulated_launchers

from echelon.launcher import agent, failure, launch_job
from echelon.launcher.rendezvous import coordinator, handler, open_rendezvous, participant

MUTANTS = {
    "restarts not counted": Mutant(
        participant.RendezvousParticipant, "accept", "restarts + outcome.counted", "restarts", ("kill a rank",)
    ),
    "one restart too many": Mutant(
        handler.LauncherRendezvous, "_may_go_again", "restarts < self", "restarts <= self", ("kill a rank",)
    ),
    "explained failure tried again": Mutant(
        handler.LauncherRendezvous,
        "_may_go_again",
        'cause == "left" or',
        'cause == "left" or False and',
        ("explained failure",),
    ),
    "every host with an outcome of its own": Mutant(
        handler.LauncherRendezvous,
        "settle",
        'self._client.compare_set(self._key("verdict"), "", proposal.to_json())',
        "proposal.to_json().encode()",
    ),
    "lost host not noticed": Mutant(
        handler.LauncherRendezvous,
        "changed_hosts",
        "if silent :=",
        "if False and (silent := 0) or (silent := None) and",
        ("lose a host",),
    ),
    "newcomers not noticed": Mutant(
        coordinator.RoundCoordinator,
        "joiners",
        "return waiting[:room] if called_last else []",
        "return []",
        ("kill a launcher",),
    ),
    "lost peer taken for a failure": Mutant(
        handler.LauncherRendezvous, "find_lost", "while unheard:", "while False:", ("kill a launcher",)
    ),
    "secondary failure named": Mutant(
        failure, "first_cause", "end.secondary,", "not end.secondary,", ("kill a rank", "fail a rank")
    ),
    "ranks of a lost round not ended": Mutant(
        agent.HostAgent, "_end", "self._stop_workers(self._worker_group)", "pass", ("cut a link", "lose a host")
    ),
    "done when the own ranks are done": Mutant(
        agent.HostAgent,
        "_others_verdict",
        "self._succeeded = self._launcher_rendezvous.all_finished()",
        "self._succeeded = True",
        ("kill a rank",),
    ),
    "number of the round not counted": Mutant(
        coordinator.RoundCoordinator, "_line_up", "number = 1 + max", "number = max"
    ),
    "more hosts than asked for": Mutant(coordinator.RoundCoordinator, "_line_up", "[: self._config.most]", "[:]"),
    "spare not told that the job is over": Mutant(
        participant.RendezvousParticipant, "depart", 'self.client.set("moved" if goes_on else "over", line)', "pass"
    ),
    "exit code 1 for every failure": Mutant(
        launch_job, "_run_agent", "return end.failure.status", "return 1", ("kill a rank",)
    ),
    # what lives have found
    "ranks ended before the others know": Mutant(
        agent.HostAgent, "_leave_round", "if self._launcher_rendezvous.hosts:", "if False:", ("signal a launcher",)
    ),
    "lone launcher waits at its own store": Mutant(
        open_rendezvous.MasterEndpoints, "has_moved", "if at != self._at and", "if False and", ("cut a link",)
    ),
    "old token at a store come back to": Mutant(
        participant.RendezvousParticipant, "_enter", ' or self.client.check(f"ready/{token}")', "", ("freeze a host",)
    ),
    "place sought in a round without this host": Mutant(
        handler.LauncherRendezvous,
        "ended",
        "self.members.place_of(self._participant.token)",
        "self.node_rank if self.hosts else None",
        ("cut a link", "freeze a host"),
    ),
    "store lost between rounds counted": Mutant(
        handler.LauncherRendezvous,
        "recover_lost_store",
        "not elastic and self._participant.is_in_round",
        "not elastic",
    ),
}


def main() -> int:
    with simulated_launchers():
        return search(MUTANTS, LAUNCHER_FOUND_BY, live)


if __name__ == "__main__":
    raise SystemExit(main())
