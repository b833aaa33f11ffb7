"""``ShardPersistence``: keeps a shard's state beyond its process by journal, background snapshots and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from echelon.base.console import say
from echelon.base.errors import CheckpointError, EchelonError, PeerLost, UsageError, nearest
from echelon.checkpoint.os_errors import cannot_write
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint, check, fill, save_part
from echelon.parameter_server.persistence.file_record import encode
from echelon.parameter_server.persistence.journal import JournalSegment, segments
from echelon.parameter_server.persistence.ownership import DirectoryOwnership
from echelon.parameter_server.persistence.replication import RemoteReplica, ReplicaHost
from echelon.parameter_server.persistence.restore import Manifest, RestorableShard, SnapshotChainFile, restore
from echelon.parameter_server.persistence.snapshot import write
from echelon.parameter_server.persistence.table_export import TableExport, merge_delta_chain, write_table
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.parameter_server.protocol.job_spec import PersistenceSettings
from echelon.parameter_server.protocol.message import WireMessage

#: Most deltas in a chain, however small they are; then a new base is written.
MAX_DELTAS = 256
#: Seconds until a replica that fell behind is updated again.
CATCH_UP = 1.0
#: Seconds before a failed snapshot is tried again.
AFTER_FAILURE = 5.0


def home_of(state: Path, session: str, server: int) -> Path:
    """Return the directory in which a server keeps the state of a session."""
    return state / f"{stable_hash(session):016x}" / f"server-{server}"


def make_home(home: Path) -> None:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(cannot_write(home, error)) from None


class ShardPersistence:
    """The persistent state of one shard under ``directory``.

    mirror:         function that sends a message to the next server, which keeps the replica if ``settings.replica``
    journal_limit:  bytes of journal that trigger an early snapshot; default ``settings.journal_mb``
    fsync:          sync every record to disk before it is answered, which survives a power cut and costs milliseconds;
                    default False
    epoch:          number of this process among those that have kept the directory; default: one above the manifest's
    """

    def __init__(
        self,
        shard: RestorableShard,
        directory: Path,
        settings: PersistenceSettings,
        mirror: Callable[[WireMessage], WireMessage] | None = None,
        *,
        journal_limit: int | None = None,
        fsync: bool = False,
        epoch: int = 0,
    ) -> None:
        self._shard, self._directory, self._settings = shard, directory, settings
        self._limit, self._fsync = journal_limit or settings.journal_mb << 20, fsync
        self._manifest: Manifest | None = None
        self._segment: JournalSegment | None = None
        self._next_segment = 1
        self._skip = 0  # numbers of files to leave to an earlier process of the directory
        self._rebase = True  # the next snapshot cannot be a delta
        self._one_at_a_time = threading.RLock()  # taken before the shard's lock, never after
        self._due, self._stopped, self._closed = threading.Event(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._mirrors = ReplicaHost(directory)
        self._owner = DirectoryOwnership(directory, shard.server, epoch)
        session = shard.job.session
        self._replica = RemoteReplica(mirror, shard.server, directory, session) if mirror and settings.replica else None

    # ---- start and end ----

    def start(self) -> bool:
        """Restore the state in the directory, or begin a new one, and start periodic snapshots.

        The result is True if a state was restored.
        """
        make_home(self._directory)
        self._owner.lock()
        try:
            return self._start()
        except BaseException:
            self._owner.release()
            raise

    def _start(self) -> bool:
        if self._replica is not None:
            self._replica.fetch(self._stopped)
        manifest = self._owner.take(Manifest.read(self._directory))
        if self._replica is not None:
            self._replica.epoch = self._owner.epoch
        if manifest is not None:
            restore(self._shard, self._directory, manifest)
            self._manifest, self._rebase = manifest, False
        self._skip = 0 if self._owner.is_alone else 1  # what an earlier process begins now may still come to be
        self._next_segment = max(segments(self._directory), default=0) + 1
        self._sweep(starting=True)
        with self._shard.lock:
            for _ in range(1 + self._skip if self._settings.journal else 0):
                self._rotate()
        if manifest is not None and not self._owner.is_alone:
            self.snapshot(base=True)
        elif manifest is None or self._replica is not None:
            self.snapshot()
        self._thread = threading.Thread(target=self._watch, name="snapshots", daemon=True)
        self._thread.start()
        return manifest is not None

    def close(self) -> None:
        """Stop the snapshots; the journal stays in place.

        The caller may hold the shard's lock, because the snapshot thread stops waiting for it.
        """
        self._closed = True
        self._stopped.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()
        with self._shard.lock:
            self._stop_journal()
        self._owner.release()

    @contextmanager
    def _held(self) -> Iterator[RestorableShard]:
        """Hold the shard's lock inside the context.

        Raises ``CheckpointError`` if this object is closed, because the shard may then have another job.
        """
        while not self._shard.lock.acquire(timeout=0.1):
            self._check_open()
        try:
            self._check_open()
            if self._shard.broken:  # the journal has the correct state, and a restart replays it
                raise CheckpointError(f"server {self._shard.server} has stopped saving its state: {self._shard.broken}")
            yield self._shard
        finally:
            self._shard.lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("the job whose state was saved has ended")

    # ---- every change ----

    def append(self, frame: WireMessage) -> None:
        """Journal a change before it is applied. The caller holds the shard's lock."""
        if self._closed:
            raise PeerLost(f"server {self._shard.server} is shutting down; the request was not journaled")
        if self._segment is None:
            return
        self._check_owner()
        offset, buffers = self._segment.size, encode(self._shard.lsn + 1, frame)
        self._segment.append(buffers)
        if not self._owner.is_alone:
            self._check_owner()  # a later process may have read the journal just before this record
        if self._replica is not None:
            self._replica.append(self._segment.path.name, offset, buffers)
        if self._segment.size > self._limit:
            self._due.set()

    def handle(self, frame: WireMessage) -> WireMessage:
        """Answer ``mirror`` and ``mirrored`` of another server. The caller does not hold the shard's lock."""
        return self._mirrors.handle(frame)

    # ---- snapshots ----

    def snapshot(self, base: bool | None = None) -> int:
        """Take a snapshot now and return its number.

        base:  write a base instead of a delta; None (default): choose by size. The first snapshot is always a base
        """
        with self._one_at_a_time:
            self._check_owner()
            base = self._too_many_deltas() if base is None else base
            earlier = self._manifest.chain if self._manifest is not None and not (base or self._rebase) else ()
            number = self._manifest.number + 1 + self._skip if self._manifest is not None else 1
            with self._held() as shard:
                lsn, facts, segment = shard.lsn, list(shard.facts()), self._rotate()
            self._rebase = True  # until this snapshot is complete, the rows that it marks as saved are not saved
            about = {"kind": "delta" if earlier else "base", "number": number, **self._about()}
            path = self._directory / f"snapshot-{number:08d}.rec"
            written = write(self._held, path, about, facts, lsn=lsn, delta=bool(earlier), clean=True)
            bridge = not self._settings.journal
            self._publish(Manifest(number, lsn, segment, bridge, (*earlier, SnapshotChainFile.of(number, written))))
            return number

    def _check_owner(self) -> None:
        """Raise, and stop serving, if another process has taken over the directory."""
        if (reason := self._owner.lost()) is not None:
            self._shard.stop_serving(reason)
            raise CheckpointError(reason)

    def _publish(self, manifest: Manifest) -> None:
        self._check_owner()
        manifest = self._owner.write(manifest)
        self._manifest, self._rebase, self._skip = manifest, False, 0
        if not self._settings.journal:
            with self._held():
                self._stop_journal()
        self._sweep()
        if self._replica is not None:
            self._replica.follow(manifest)

    def _rotate(self) -> int:
        """Continue in a new journal segment and return its number. The caller holds the shard's lock.

        If the journal is off, there is a segment only while a snapshot is taken: its replay brings the buckets, which
        are copied at different times, to one state.
        """
        earlier, self._segment = self._segment, JournalSegment(self._directory, self._next_segment, fsync=self._fsync)
        if earlier is not None:
            earlier.close()
        self._next_segment += 1
        if self._replica is not None:
            self._replica.begin()
        return self._segment.number

    def _stop_journal(self) -> None:
        """Close the journal segment. The caller holds the shard's lock."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _about(self) -> dict[str, Any]:
        return {"server": self._shard.server, "job": self._shard.job.to_json()}

    def _too_many_deltas(self) -> bool:
        """Return True if a new base is better: deltas larger than the base cost more to restore and to store."""
        if self._manifest is None:
            return True
        base, *deltas = self._manifest.chain
        return len(deltas) >= MAX_DELTAS or sum(part.bytes for part in deltas) > base.bytes

    def _sweep(self, starting: bool = False) -> None:
        """Remove snapshots and segments that the manifest no longer needs.

        Other files are left alone, and those with higher numbers: they are of a later process that has taken over.

        starting:  remove higher numbers, too, and files of interrupted writes
        """
        manifest = self._manifest
        keep = {part.file for part in manifest.chain} if manifest is not None else set()
        newest = manifest.chain[-1].file if manifest is not None and not starting else "snapshot-~"
        for path in self._directory.glob("snapshot-*.rec"):
            if path.name not in keep and path.name < newest:
                path.unlink(missing_ok=True)
        for path in self._directory.glob(".*.writing") if starting else ():
            path.unlink(missing_ok=True)
        newest_segment = self._next_segment - (0 if starting else 1)
        for number, path in segments(self._directory).items():
            if number < newest_segment and not (manifest is not None and manifest.needs(number)):
                path.unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._closed:
            behind = self._replica is not None and self._replica.behind
            self._due.wait(min(CATCH_UP, self._settings.snapshot_every) if behind else self._settings.snapshot_every)
            self._due.clear()
            if not self._closed:
                self._take()

    def _take(self) -> None:
        behind = self._replica is not None and self._replica.behind
        unchanged = self._manifest is not None and self._shard.lsn == self._manifest.lsn
        if self._shard.broken or (unchanged and not behind):
            return
        try:
            self.snapshot()
        except EchelonError as error:
            if not self._closed:
                say(f"server {self._shard.server} could not write a snapshot: {error}")
                self._stopped.wait(AFTER_FAILURE)

    # ---- checkpoints ----

    def save(self, path: Path, step: int) -> None:
        """Write this server's part of a checkpoint while training may continue.

        If a step of a synchronous job is applied meanwhile, the file mixes two versions: then it is written again while
        changes are blocked. In the other modes updates are not synchronized, and each bucket has its own version.
        """
        with self._one_at_a_time:
            if self._save(path, step) or self._shard.job.mode != "sync":
                return
            with self._held():
                self._save(path, step)

    def _save(self, path: Path, step: int) -> bool:
        """Write this server's part, and return True if the version stayed the same."""
        with self._held() as shard:
            lsn, version, facts = shard.lsn, shard.version, list(shard.facts())
        save_part(self._held, path, shard.server, shard.job, step, facts, lsn)
        return shard.version == version

    def load(self, path: Path) -> int:
        """Replace the shard's state by its part of a checkpoint, and return the checkpoint's step.

        The checkpoint may be of any number of servers.
        """
        with self._one_at_a_time, ServerCheckpoint(path) as saved:
            check(self._shard, saved)
            saved.verify()
            with self._held() as shard:
                fill(shard, saved)
            self.snapshot(base=True)
            return saved.step

    def export(
        self, path: Path, table: str, format: str, since: int | None = None, base: bool = True
    ) -> tuple[int, int]:
        """Write a table, or its changes since snapshot ``since``; return the row count and the snapshot's number.

        base: begin a new chain of snapshots with a whole table; False keeps earlier exports' versions known

        With several servers ``path`` becomes a directory with one part per server.
        """
        if table not in self._shard.tables:
            raise UsageError(f"no table '{table}' to export{nearest(table, self._shard.tables)}")
        if self._shard.job.servers == 1 and path.suffix != f".{format}":
            raise UsageError(f"cannot export to '{path}'; the name of a {format} file must end in .{format}")
        with ExitStack() as stack:
            with self._one_at_a_time:
                # a base costs as much as writing the table, and later exports can be deltas to it
                number = self.snapshot(base=base and since is None)
                assert self._manifest is not None
                # an open file stays readable when a later snapshot removes it
                chain = self._manifest.opened(self._directory, stack, since)
            servers = self._shard.job.servers
            out = path if servers == 1 else path / f"part-{self._shard.server}-of-{servers}.{format}"
            spec = self._shard.tables[table].spec
            made = TableExport(spec, merge_delta_chain(chain, table), delta=since is not None, version=number)
            return write_table(made, out, format), number
