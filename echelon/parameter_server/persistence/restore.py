"""The manifest of a server's directory, and the restoration of a shard from it.

    manifest.json             the snapshot files of the state, and the first journal segment to replay
    snapshot-00000007.rec     a base or a delta
    journal-00000012.seg      changes since the snapshot
    mirror-of-2/              the same files of server 2, whose replica this server stores

The manifest is replaced by a rename, so a kill at any moment leaves the earlier state or the later one, and the journal
for both. Files that the manifest does not name are leftovers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.json_head import MalformedHeadError, parse_object
from echelon.checkpoint.directory import sync_directory
from echelon.checkpoint.os_errors import cannot_read, cannot_write, open_regular
from echelon.parameter_server.persistence.file_record import write_all
from echelon.parameter_server.persistence.journal import replay
from echelon.parameter_server.persistence.snapshot import PersistableShard, SnapshotFile, SnapshotFileStats
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.table import BucketRows
from echelon.parameter_server.table.row_table import RowTable

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SnapshotChainFile:
    """A snapshot file of a chain."""

    number: int
    bytes: int
    index: int
    rows: int

    @classmethod
    def of(cls, number: int, written: SnapshotFileStats) -> SnapshotChainFile:
        return cls(number, written.bytes, written.index, written.rows)

    @property
    def file(self) -> str:
        return f"snapshot-{self.number:08d}.rec"


@dataclass(frozen=True)
class Manifest:
    """The newest complete snapshot: its LSN, the segment that follows it, and the chain of its base and deltas.

    bridge:  the journal is off except for this segment, whose replay brings all buckets to one state
    epoch:   number of the process that owns the directory; each process that starts takes a higher one than all before
    """

    number: int
    lsn: int
    segment: int
    bridge: bool
    chain: tuple[SnapshotChainFile, ...]
    epoch: int = 0

    def needs(self, segment: int) -> bool:
        """Return True if a restore replays the segment with this number."""
        return segment == self.segment if self.bridge else segment >= self.segment

    def write(self, directory: Path) -> None:
        """Write this manifest as the current one of the directory."""
        write_json(directory / MANIFEST, dataclasses.asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        path = directory / MANIFEST
        return cls.of_file(path) if path.exists() else None

    @classmethod
    def of_file(cls, path: Path) -> Manifest:
        plain = read_json(path)
        try:
            chain = tuple(SnapshotChainFile(**part) for part in plain.pop("chain"))
            figures = [value for each in (plain, *map(vars, chain)) for name, value in each.items() if name != "bridge"]
            if not chain or any(type(value) is not int or value < 0 for value in figures):
                raise TypeError
            return cls(**plain, chain=chain)
        except (TypeError, KeyError):
            raise CheckpointError(f"{path} is not a manifest of Echelon; restore it from a copy") from None

    def opened(self, directory: Path, stack: ExitStack, since: int | None = None) -> list[SnapshotFile]:
        """Open the files of the chain, or those after snapshot ``since``, and check their size and index."""
        if since is not None and not self.chain[0].number <= since < self.number:
            raise UsageError(
                f"changes since snapshot {since} are not known: this server has the changes from snapshot "
                f"{self.chain[0].number} to {self.number}; export the whole table"
            )
        parts = [part for part in self.chain if since is None or part.number > since]
        return [stack.enter_context(SnapshotFile(directory / part.file, part.bytes, part.index)) for part in parts]


def write_json(path: Path, plain: dict[str, Any]) -> None:
    """Write a small JSON file with a checksum atomically."""
    text = json.dumps(plain, separators=(",", ":"), sort_keys=True)
    aside = path.with_name(f".{path.name}.writing")
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            write_all(handle, [f"{zlib.crc32(text.encode()):08x} {text}\n".encode()])
            os.fsync(handle)
        finally:
            os.close(handle)
        aside.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            crc, _, text = file.read().decode(errors="replace").rstrip("\n").partition(" ")
    except OSError as error:
        raise cannot_read(path, error) from None
    if crc != f"{zlib.crc32(text.encode()):08x}":
        raise CheckpointError(f"{path} is damaged: it does not match its checksum; restore the file from a copy")
    try:
        return parse_object(text)
    except MalformedHeadError as error:
        raise CheckpointError(f"{path} is damaged: {error}; restore the file from a copy") from None


class RestorableShard(PersistableShard, Protocol):
    """Interface of a shard that can be restored."""

    @property
    def lock(self) -> Any: ...

    @property
    def server(self) -> int: ...

    @property
    def job(self) -> JobSpec: ...

    @property
    def version(self) -> int: ...

    @property
    def broken(self) -> str:
        """Reason why the state does not match its journal; '' if it does."""
        ...

    def stop_serving(self, reason: str) -> None:
        """Answer every request of the job with ``reason`` from now on."""

    def facts(self) -> Sequence[WireMessage]:
        """Return the state except rows and dense blocks: version, sequence numbers, members, pending pushes, ..."""
        ...

    def restore_facts(self, facts: Sequence[WireMessage]) -> None: ...

    def load_facts(self, facts: Sequence[WireMessage]) -> None:
        """Load the part of a checkpoint's facts that belongs to its rows and blocks, such as table steps."""
        ...

    def set_floors(self, floors: Mapping[str, Mapping[int, int]], dense: int) -> None:
        """Skip changes up to these LSNs in each bucket and in the dense blocks, because they are restored already."""

    def apply(self, frame: WireMessage) -> Any:
        """Apply a change from the journal, with the same result as the first time."""

    def forget(self) -> None:
        """Drop all rows and blocks, as if the job had just opened."""


def restore(shard: RestorableShard, directory: Path, manifest: Manifest) -> int:
    """Restore the shard from ``directory``, completely or not at all; return the number of replayed changes."""
    try:
        with shard.lock, ExitStack() as stack:
            files = manifest.opened(directory, stack)
            for file in files:
                _put(shard.tables, file)
            newest = files[-1]
            shard.dense.from_arrays(dict(newest.dense()))
            shard.restore_facts(newest.facts())
            shard.set_floors(_floors(newest), newest.dense_lsn)
            count = 0
            for record in replay(directory, manifest.segment, manifest.lsn, only_first=manifest.bridge):
                shard.apply(record.frame)
                if shard.lsn != record.lsn:
                    raise CheckpointError(
                        f"a record of {directory} is change {record.lsn}, but is in the place of change {shard.lsn}; "
                        "restore the directory from a copy"
                    )
                count += 1
            shard.set_floors({}, 0)
            return count
    except BaseException:
        shard.forget()
        raise


def _put(tables: Mapping[str, RowTable], file: SnapshotFile) -> None:
    """Put the rows of a base or a delta into the tables, and mark them as saved."""
    for name, places in file.places.items():
        if name not in tables:
            raise CheckpointError(
                f"{file.path} holds a table '{name}' that the job does not have; remove its directory"
            )
        table = tables[name]
        for bucket in places:
            if (rows := file.rows(name, bucket)) is not None:
                put_rows(table, name, bucket, rows, file.path)
            table.mark_clean(bucket)


def put_rows(table: RowTable, name: str, bucket: int, rows: BucketRows, path: Path) -> None:
    """Put rows of a file into a table. Raises ``CheckpointError`` if they have another shape."""
    if rows.records.ndim != 2 or rows.records.shape[1] != table.words or len(rows.records) != len(rows.ids):
        raise CheckpointError(
            f"{path} holds rows of {rows.records.shape[1:]} words for the table '{name}', which has {table.words}; "
            "use the dim and optimizer that it was saved with"
        )
    table.put_rows(bucket, rows)


def _floors(file: SnapshotFile) -> dict[str, dict[int, int]]:
    return {name: {bucket: place.lsn for bucket, place in places.items()} for name, places in file.places.items()}
