"""Bugs of one line that the simulation must find: make simulate RUN="mutants.py [--lives N] [WORDS]"

Each mutant changes the source of one function of Echelon. Some are bugs that Echelon had. Without arguments every
mutant lives from seed 0 on until a life breaks a law; ``seeds.py`` keeps the seeds that find them, for the tests.
"""

from __future__ import annotations

from mutation import Mutant, search
from seeds import FOUND_BY
from server_life import live, simulated_servers

from echelon.parameter_server.persistence import (
    checkpoint,
    file_record,
    journal,
    ownership,
    persistence,
    replication,
    restore,
    snapshot,
)
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.server import membership_coordinator, modes, monotonic_time, shard, state, store
from echelon.parameter_server.worker import client, server_connections

MUTANTS: dict[str, Mutant] = {
    "no dedup of pushes": Mutant(shard.ServerShard, "push", "push.seq <= membership.seq", "push.seq < membership.seq"),
    "gap between pushes accepted": Mutant(
        shard.ServerShard,
        "_check_order",
        "push.seq != membership.seq + 1",
        "push.seq < membership.seq",
        ("disk error",),
    ),
    "change applied and not journaled when large": Mutant(
        persistence.ShardPersistence,
        "append",
        "if self._segment is None",
        "if self._shard.lsn % 7 == 5 or self._segment is None",
    ),
    "one segment too many swept": Mutant(
        restore.Manifest, "needs", "segment >= self.segment", "segment > self.segment"
    ),
    "no floors at a restore": Mutant(
        restore, "restore", "set_floors(_floors(newest), newest.dense_lsn)", "set_floors({}, 0)"
    ),
    "snapshot not synced before its manifest": Mutant(
        snapshot.RecordFileWriter, "sync", "os.fsync(self._handle)", "None", ("power cut",)
    ),
    "manifest not synced before its rename": Mutant(restore, "write_json", "os.fsync(handle)", "None", ("power cut",)),
    "record not synced with fsync": Mutant(
        journal.JournalSegment, "append", "if self._fsync:", "if False:", ("power cut",)
    ),
    "failed write left in the journal": Mutant(
        journal.JournalSegment,
        "_undo",
        "os.ftruncate(self._handle, self.size)",
        "None",
        ("disk error", "kill a server"),
    ),
    "torn tail not cut off": Mutant(
        journal, "_cut", "os.ftruncate(handle, offset)", "None", ("die at a disk operation",)
    ),
    "short write taken for a whole one": Mutant(file_record, "write_all", "left[0] = left[0][wrote:]", "left.pop(0)"),
    "delta after a snapshot that failed": Mutant(
        persistence.ShardPersistence, "snapshot", "self._rebase = True ", "pass ", ("disk error", "kill a server")
    ),
    "step settled without commits": Mutant(modes.SyncMode, "_waits_for", "return late | unsure", "return late"),
    "dropped worker's last step taken from one server": Mutant(
        membership_coordinator.MembershipCoordinator, "_drop", "max(int(", "min(int(", ("kill a worker",)
    ),
    "pushes of a dropped worker kept": Mutant(
        modes.SyncMode, "discard", "if step > after", "if step > after + 1", ("kill a worker",)
    ),
    "held pushes left out of snapshots": Mutant(
        state.ServerState, "pending", "return self.mode.pending()", "return []"
    ),
    "commits left out of the journal": Mutant(
        shard.ServerShard, "_commit", "self.change(self.stamped(", "self.apply(self.stamped("
    ),
    "failed change taken for an applied one": Mutant(
        state.ServerState, "_break", "self.broken = self.broken or (", "_ = (", ("exception in apply", "audit")
    ),
    "state after a failed change saved": Mutant(
        persistence.ShardPersistence, "_held", "if self._shard.broken:", "if False:", ("exception in apply", "audit")
    ),
    "joining while steps go on": Mutant(modes.SyncMode, "settle", "not self.frozen and ", "", ("kill a worker",)),
    "requests lost with their connection": Mutant(
        ServerChannel, "_drop", "self.break_off()", "self.break_off(); self._waiting.clear()"
    ),
    "replica's gap not noticed": Mutant(
        replication.ReplicaHost, "_write", "if size < offset:", "if False:", ("kill a server", "lose a disk")
    ),
    "replica not brought up to date": Mutant(
        replication.RemoteReplica, "_follow", "self._send_file(part.file)", "pass", ("kill a server", "lose a disk")
    ),
    "replay below the floor": Mutant(store.ServerStore, "_above_floor", "< self._lsn", "<= self._lsn"),
    # what the simulation has found
    "two states of a worker kept": Mutant(
        state.ServerState, "_apply_push", "1 - BLOBS", "2 - BLOBS", ("disk full", "kill a server")
    ),
    "server without values taken for the known one": Mutant(
        server_connections.ServerConnections,
        "_greet",
        'known.get("begun") or not',
        "True or not",
        ("power cut", "lose a disk"),
    ),
    "lost state not named to a worker": Mutant(
        client.ParameterServerClient,
        "last_push",
        "if most - least >= BLOBS",
        "if False",
        ("lose a disk", "restart all"),
    ),
    "lost push of a dropped worker waited for": Mutant(
        modes.SyncMode, "discard", "if lost is not None:", "if False:", ("power cut",)
    ),
    "zeros taken for records that a replica has": Mutant(
        replication.RemoteReplica, "_lost", "sound_size(path) if later else", "", ("power cut",)
    ),
    # what the review found
    "later process of a directory not noticed": Mutant(
        ownership.DirectoryOwnership,
        "lost",
        "manifest.epoch <= self.epoch",
        "True",
        ("start a second process", "kill a server"),
    ),
    "rows expire by the host's clock": Mutant(
        monotonic_time.MonotonicTime, "now", "self._base + self._clock() - self._since", "self._wall()", ("clock jump",)
    ),
    "rows of one server alone loaded by another number": Mutant(
        checkpoint.ServerCheckpoint, "bucket", "for part in self.parts", "for part in self.parts[:1]", ("audit",)
    ),
    "empty state begun while the replica does not answer": Mutant(
        replication.RemoteReplica,
        "fetch",
        "if isinstance(error, PeerLost) and",
        "if False and",
        ("lose a disk", "restart all"),
    ),
    "failed change not marked": Mutant(
        state.ServerState, "apply", "self._break(frame, error)", "pass", ("exception in apply", "audit")
    ),
}


def main() -> int:
    with simulated_servers():
        return search(MUTANTS, FOUND_BY, live)


if __name__ == "__main__":
    raise SystemExit(main())
