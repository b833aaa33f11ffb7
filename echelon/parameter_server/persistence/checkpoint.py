"""A checkpoint of all servers in one directory, for any number of servers to load.

    server-0-of-2.rec    state of server 0 of 2: its buckets, its dense blocks, its facts
    server-0-of-2.json   marker of that file: exists when the file is complete

Each server writes a temporary file, renames it, and then writes the marker; the checkpoint is complete when all markers
of one step exist. Buckets keep their numbers for any number of servers, and dense blocks are cut again by parameter and
offset, with the state of an element-wise optimizer beside the values that it belongs to.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.base.console import say
from echelon.base.errors import CheckpointError
from echelon.checkpoint.directory import sync_directory
from echelon.checkpoint.os_errors import cannot_write
from echelon.parameter_server.persistence.restore import RestorableShard, put_rows, read_json, write_json
from echelon.parameter_server.persistence.snapshot import Held, SnapshotFile, write
from echelon.parameter_server.protocol.job_spec import DenseBlock, JobSpec, TableSpec, job_from_json
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.table import BucketRows, converted
from echelon.strategy.sparse_update_rules import state_width

_MARKER = re.compile(r"server-(\d{1,6})-of-(\d{1,6})\.json")


def save_part(
    held: Held, path: Path, server: int, job: JobSpec, step: int, facts: Sequence[WireMessage], lsn: int
) -> None:
    """Write this server's part of the checkpoint in ``path``. An earlier part of the same name is replaced."""
    name = f"server-{server}-of-{job.servers}"
    aside, final, marker = path / f".{name}.writing", path / f"{name}.rec", path / f"{name}.json"
    about = {"kind": "checkpoint", "server": server, "step": step, "job": job.to_json()}
    try:
        path.mkdir(parents=True, exist_ok=True)
        written = write(held, aside, about, facts, lsn=lsn, delta=False, clean=False)
        marker.unlink(missing_ok=True)
        aside.replace(final)
        sync_directory(path)
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from None
    finally:
        aside.unlink(missing_ok=True)
    write_json(marker, {"bytes": written.bytes, "index": written.index, "step": step, "time": time.time()})


class ServerCheckpoint:
    """A complete checkpoint, open for reading: ``with ServerCheckpoint(path) as saved``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._markers = _complete(self.path)
        self.servers = len(self._markers)
        self.step = int(self._markers[0]["step"])

    def __enter__(self) -> ServerCheckpoint:
        with ExitStack() as stack:
            self.parts = [
                stack.enter_context(SnapshotFile(self._file(i), marker["bytes"], marker["index"]))
                for i, marker in enumerate(self._markers)
            ]
            self._stack = stack.pop_all()
        self.jobs = [job_from_json(part.about["job"]) for part in self.parts]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _file(self, server: int) -> Path:
        return self.path / f"server-{server}-of-{self.servers}.rec"

    def verify(self) -> None:
        """Read and check the whole checkpoint, so that no part of a damaged checkpoint is loaded."""
        for part in self.parts:
            part.verify()

    def tables(self) -> list[str]:
        return list(self.parts[0].places)

    def bucket(self, table: str, bucket: int) -> BucketRows | None:
        """Return a bucket's rows from the server that held it; None if there are none."""
        return next((rows for part in self.parts if (rows := part.rows(table, bucket)) is not None), None)

    def buckets(self, table: str) -> Iterator[BucketRows]:
        """Yield all rows of a table, one bucket at a time."""
        for part in self.parts:
            for bucket in part.places.get(table, {}):
                if (rows := part.rows(table, bucket)) is not None:
                    yield rows

    def count(self, table: str) -> int:
        return sum(place.rows for part in self.parts for place in part.places.get(table, {}).values())

    def facts(self) -> list[WireMessage]:
        """Return the facts of server 0, which are valid for all servers."""
        return self.parts[0].facts()

    def dense(self, blocks: Sequence[DenseBlock]) -> dict[str, NDArray[Any]]:
        """Return the state of ``blocks`` in the form of ``DenseShard.to_arrays``, assembled from the saved blocks."""
        pieces, found = self._pieces(), {}
        for number, block in enumerate(blocks):
            stored = pieces.get(block.parameter, [])
            names = stored[0][1].keys() if stored else ("values",)
            for name in names:
                found[f"{number}/{name}"] = self._cut(block, name, stored)
        found["groups"] = next(array for name, array in self.parts[0].dense() if name == "groups")
        return found

    def _pieces(self) -> dict[str, list[tuple[DenseBlock, dict[str, NDArray[Any]]]]]:
        """Return the saved blocks and their arrays by parameter."""
        pieces: dict[str, list[tuple[DenseBlock, dict[str, NDArray[Any]]]]] = {}
        for server, part in enumerate(self.parts):
            blocks = [block for block in self.jobs[0].blocks if block.server == server]
            arrays: list[dict[str, NDArray[Any]]] = [{} for _ in blocks]
            for key, array in part.dense():
                number, slash, name = key.partition("/")
                if slash:
                    arrays[int(number)][name] = array
            for block, own in zip(blocks, arrays, strict=True):
                pieces.setdefault(block.parameter, []).append((block, own))
        return pieces

    def _cut(
        self, block: DenseBlock, name: str, stored: list[tuple[DenseBlock, dict[str, NDArray[Any]]]]
    ) -> NDArray[Any]:
        """Return the part of ``block`` of one array of its parameter."""
        first = stored[0][1][name] if stored and name in stored[0][1] else None
        if first is not None and (first.size != stored[0][0].length or name == "step"):
            return first  # one number for the whole parameter
        whole, filled = np.empty(block.length, np.float32), 0
        for old, arrays in stored:
            begin, end = max(block.offset, old.offset), min(block.offset + block.length, old.offset + old.length)
            if begin < end and name in arrays:
                whole[begin - block.offset : end - block.offset] = arrays[name].reshape(-1)[
                    begin - old.offset : end - old.offset
                ]
                filled += end - begin
        if filled != block.length:
            raise CheckpointError(
                f"{self.path} has {filled} of {block.length} entries of '{block.parameter}' from {block.offset} on; "
                "load it into the model that it was saved from"
            )
        return whole


def check(shard: RestorableShard, saved: ServerCheckpoint) -> None:
    """Raise ``CheckpointError`` if a checkpoint lacks a table, or has one of another shape."""
    specs = {spec.name: spec for spec in saved.jobs[0].tables}
    for name, table in shard.tables.items():
        if name not in specs:
            raise CheckpointError(f"{saved.path} has no table '{name}'; it holds {', '.join(sorted(specs)) or 'none'}")
        was, now = _shape(specs[name]), _shape(table.spec)
        if was != now:
            raise CheckpointError(
                f"{saved.path} holds table '{name}' with {was}, the job has it with {now}; "
                "use the dim and optimizer that it was saved with"
            )


def _shape(spec: TableSpec) -> str:
    counts = " and shows and clicks" if spec.score is not None else ""
    state = f"{state_width(spec.rule, spec.dim)} floats of state{counts} a row"
    return f"dim {spec.dim}, {type(spec.rule).__name__} and {state}"


def load_into(shard: RestorableShard, path: str | os.PathLike[str]) -> int:
    """Load a checkpoint into a read-only shard without persistence, and return the checkpoint's step."""
    with ServerCheckpoint(path) as saved:
        check(shard, saved)
        saved.verify()
        with shard.lock:
            fill(shard, saved)
        return saved.step


def fill(shard: RestorableShard, saved: ServerCheckpoint) -> None:
    """Replace a shard's state by its part of a checkpoint, bucket by bucket. The caller holds the shard's lock."""
    dense = saved.dense(shard.dense.blocks)  # may raise, so it comes before anything is dropped
    shard.forget()
    specs = {spec.name: spec for spec in saved.jobs[0].tables}
    for name, table in shard.tables.items():
        was, now = specs[name], table.spec
        if was.dtype != now.dtype and not shard.server:
            rounded = "" if now.dtype == "float32" else ", rounded to the nearest"
            say(f"table '{name}': the checkpoint's {was.dtype} weights are loaded as {now.dtype}{rounded}")
        for bucket in table.buckets:
            if (rows := saved.bucket(name, bucket)) is not None:
                put_rows(table, name, bucket, rows._replace(records=converted(rows.records, was, now)), saved.path)
    shard.dense.from_arrays(dense)
    shard.load_facts(saved.facts())


def _complete(path: Path) -> list[dict[str, Any]]:
    """Return the markers of the newest complete set. Raises ``CheckpointError`` if there is none."""
    found: dict[int, dict[int, Path]] = {}
    for entry in path.iterdir() if path.is_dir() else ():
        if match := _MARKER.fullmatch(entry.name):
            found.setdefault(int(match[2]), {})[int(match[1])] = entry
    if not found:
        raise CheckpointError(f"no checkpoint of servers at {path}: no server-0-of-N.json there; check the path")
    whole = [_markers(owned) for count, owned in found.items() if sorted(owned) == list(range(count))]
    same = [markers for markers in whole if len({marker["step"] for marker in markers}) == 1]
    if not same:
        count, owned = max(found.items())
        missing = next((i for i in range(count) if i not in owned), None)
        why = "its parts are of different steps" if missing is None else f"server-{missing}-of-{count}.json is missing"
        raise CheckpointError(f"{path} is incomplete: {why}; the save was interrupted, use an earlier checkpoint")
    return max(same, key=lambda markers: (markers[0]["step"], max(marker["time"] for marker in markers)))


def _markers(owned: dict[int, Path]) -> list[dict[str, Any]]:
    return [read_json(owned[server]) for server in sorted(owned)]


def locate(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if it holds servers' parts, else the directory below it with the highest step."""
    given = Path(path)
    found = {entry.parent for pattern in ("", "*/", "*/*/") for entry in given.glob(f"{pattern}server-0-of-*.json")}
    return given if given in found or not found else max(found, key=_step)


def _step(path: Path) -> int:
    """Return a checkpoint's step; -1 if its save was interrupted, so that it is chosen only if there is no other."""
    try:
        return int(_complete(path)[0]["step"])
    except CheckpointError:
        return -1
