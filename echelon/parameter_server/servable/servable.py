"""``Servable``: a function from raw ids and numbers to predictions, which takes updates while it answers."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.base.errors import CheckpointError, DataError, UsageError, one_line
from echelon.parameter_server.servable.export_programs import GivenRows, table_names
from echelon.parameter_server.servable.export_servable import load_weights
from echelon.parameter_server.servable.servable_head import (
    DENSE,
    LOOKUPS,
    WEIGHTS,
    ServableHead,
    read_servable_head,
)
from echelon.parameter_server.servable.served_rows import LocalRows, RemoteRows, RowReader, load_layers, load_tables
from echelon.parameter_server.table import dedupe
from echelon.parameter_server.worker.sparse_embedding import SparseEmbedding

#: Names of the directories that ``ServableWriter`` makes, by version.
WHOLE_NAME, DELTA_NAME = "servable-{:08d}", "delta-{:08d}"


@dataclass
class ServedVersion:
    """One version of a servable, as a request sees it from its beginning to its end."""

    number: int
    rows: RowReader
    dense: nn.Module
    readers: int = field(default=0)


class Servable:
    """A trained model that answers requests: ``servable(*inputs)`` returns the output of the model's forward.

    Any number of threads may call it. Each call sees one version, before or after an update, never parts of both.

    version: number of the last update; 0 in a servable that was written from a checkpoint
    step:    training step of the version
    """

    def __init__(self, path: Path, head: ServableHead, model: nn.Module | None, timeout: float) -> None:
        self._path, self.head, self._timeout = path, head, timeout
        self._names = table_names(model) if model is not None else {}
        self._lookups = _program(path / LOOKUPS) if head.dense == "program" else None
        if head.dense == "weights" and model is None:
            raise UsageError(
                f"{path} holds weights without a program; give the module: load_servable(..., model=Model())"
            )
        dense = _program(path / DENSE) if head.dense == "program" else _loaded_copy(model, path / WEIGHTS)
        self._now = ServedVersion(head.version, _rows(path, head, timeout), dense)
        self._changed, self._updating = threading.Condition(), threading.Lock()
        self.step = head.step

    @property
    def version(self) -> int:
        return self._now.number

    def __call__(self, *inputs: Any) -> Any:
        """Return the model's output for a batch.

        inputs: tensors or numpy arrays, as the model's forward takes them
        """
        with self._reading() as version, torch.no_grad():
            if self._lookups is None:
                return _run_module(version, self._names, tree_map(_as_tensor, inputs))
            given = self._checked(inputs)
            ids = self._lookups(given)
            rows, indices = _look_up(version.rows, self.head.lookups, ids)
        with torch.no_grad():
            return version.dense(given, rows, indices)

    def update(self, path: str | os.PathLike[str]) -> int:
        """Apply a delta, or change to another whole servable, and return the new version.

        Requests go on meanwhile, with the version before. Raises ``UsageError`` for a delta of another servable, an
        old one, and one before which others are missing; the servable then stays as it is.

        path: directory of the delta or servable, as ``ServableWriter`` wrote it
        """
        given = Path(path)
        head = read_servable_head(given)
        with self._updating:
            self._check_successor(given, head)
            if isinstance(self._now.rows, RemoteRows):
                raise UsageError(
                    f"the rows of {self._path} are on read-only servers, which take no updates; start them with a new "
                    "checkpoint, and load a servable of the same one"
                )
            dense = self._new_dense(given, head)
            if head.since is None:
                self._swap(ServedVersion(head.version, LocalRows(load_tables(given, head.tables)), dense), head.step)
                return head.version
            layered = LocalRows(self._now.rows.tables, load_layers(given, head.tables))  # type: ignore[attr-defined]
            self._swap(ServedVersion(head.version, layered, dense), head.step)
            self._swap(ServedVersion(head.version, layered.fold(), dense), head.step)
            return head.version

    def follow(self, directory: str | os.PathLike[str]) -> int:
        """Apply what a ``ServableWriter`` has added to its directory, and return the number of updates.

        If deltas are missing, or many, the newest whole servable there is taken first.
        """
        place, applied = Path(directory), 0
        newest = max(_versions(place, WHOLE_NAME), default=0)
        while True:
            following = place / DELTA_NAME.format(self.version + 1)
            if newest > self.version:
                following = place / WHOLE_NAME.format(newest)
            if not following.is_dir():
                return applied
            self.update(following)
            applied += 1

    def close(self) -> None:
        """Close the connections to servers, if there are any."""
        if isinstance(self._now.rows, RemoteRows):
            self._now.rows.close()

    # ---- versions ----

    @contextlib.contextmanager
    def _reading(self) -> Iterator[ServedVersion]:
        with self._changed:
            version = self._now
            version.readers += 1
        try:
            yield version
        finally:
            with self._changed:
                version.readers -= 1
                if not version.readers:
                    self._changed.notify_all()

    def _swap(self, version: ServedVersion, step: int) -> None:
        """Make ``version`` the one that requests see, and wait for the requests that see the one before."""
        with self._changed:
            before, self._now, self.step = self._now, version, step
            while before.readers:
                self._changed.wait()

    def _check_successor(self, path: Path, head: ServableHead) -> None:
        if head.lineage != self.head.lineage:
            raise UsageError(f"{path} belongs to another run than {self._path}; load it with load_servable")
        if head.version <= self.version:
            raise UsageError(
                f"{path} leads to version {head.version}; the servable is at version {self.version} already"
            )
        if head.since is not None and head.since != self.version:
            missing = ", ".join(DELTA_NAME.format(number) for number in range(self.version + 1, head.since + 1)[:5])
            raise UsageError(
                f"{path} leads from version {head.since} to {head.version}, and the servable is at {self.version}; "
                f"apply {missing or 'the deltas between'} first, or load a newer whole servable"
            )

    def _new_dense(self, path: Path, head: ServableHead) -> nn.Module:
        if head.since is None and head.dense == "program":
            return _program(path / DENSE)
        return _loaded_copy(self._now.dense, path / WEIGHTS, self.head.dense == "program")

    def _checked(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inputs as tensors. Raises ``DataError`` if they are not those of the head."""
        given: tuple[Any, ...] = tree_map(_as_tensor, tuple(inputs))
        leaves, known = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)], self.head.inputs
        if len(leaves) != len(known):
            raise DataError(f"the servable takes {len(known)} inputs, and {len(leaves)} were given")
        for number, (leaf, wanted) in enumerate(zip(leaves, known, strict=True)):
            fits = leaf.dim() == len(wanted.shape) and tuple(leaf.shape[1:]) == wanted.shape[1:]
            if str(leaf.dtype) != f"torch.{wanted.dtype}" or not fits:
                raise DataError(
                    f"input {number} is {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}; the servable takes "
                    f"{wanted.dtype}{list(wanted.shape)}, where -1 is the batch"
                )
        return given


def load_servable(path: str | os.PathLike[str], model: nn.Module | None = None, *, timeout: float = 10.0) -> Servable:
    """Return a function that answers from a servable directory: raw ids and numbers in, predictions out.

    path:    directory that ``echelon export --servable`` or ``ServableWriter`` wrote
    model:   a new instance of the model, for a directory that has weights without a program; default None
    timeout: seconds that read-only servers may be away, if they hold the rows; default 10

    >>> servable = echelon.load_servable("servable", Recommender())
    >>> predictions = servable(ids)
    """
    place = Path(path)
    head = read_servable_head(place)
    if head.since is not None:
        raise UsageError(f"{place} is a delta; load a whole servable, and apply the delta by its update()")
    return Servable(place, head, model, timeout)


def _rows(path: Path, head: ServableHead, timeout: float) -> RowReader:
    if head.servers:
        return RemoteRows(head.servers, head.tables, timeout)
    return LocalRows(load_tables(path, head.tables))


def _program(path: Path) -> nn.Module:
    try:
        module: nn.Module = torch.export.load(path).module()
        return module
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be loaded by torch {torch.__version__}: {one_line(error, typed=True)}; export it again"
        ) from None


def _loaded_copy(model: nn.Module | None, weights: Path, is_program: bool = False) -> nn.Module:
    """Return a copy of the module with the weights of a file."""
    assert model is not None
    with warnings.catch_warnings():  # torch warns of its own classes when it copies a program
        warnings.simplefilter("ignore", FutureWarning)
        made = copy.deepcopy(model)
    load_weights(made.model if is_program else made, weights)  # type: ignore[arg-type]
    return made if is_program else made.eval()


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _look_up(rows: RowReader, tables: Sequence[str], ids: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each lookup the distinct rows of its table, and the index of each of its ids among them."""
    by_table: dict[str, list[int]] = {}
    for number, table in enumerate(tables):
        by_table.setdefault(table, []).append(number)
    unique, inverse = {}, {}
    for table, numbers in by_table.items():
        flat = [ids[number].reshape(-1).numpy() for number in numbers]
        unique[table], inverse[table] = dedupe(np.concatenate(flat) if len(flat) > 1 else flat[0])
    pulled = {name: _tensor(found) for name, found in rows.pull(unique).items()}
    indices: list[Tensor] = [torch.empty(0)] * len(tables)
    for table, numbers in by_table.items():
        begin = 0
        for number in numbers:
            end = begin + ids[number].numel()
            indices[number] = torch.from_numpy(inverse[table][begin:end]).view(ids[number].shape)
            begin = end
    return [pulled[table] for table in tables], indices


def _tensor(rows: Any) -> Tensor:
    if not len(rows):
        return torch.zeros(1, rows.shape[1])  # an empty batch still needs a row for torch's lookup
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


class _DirectLookup:
    """A source of rows for a module that looks ids up as it goes."""

    def __init__(self, rows: RowReader) -> None:
        self._rows = rows

    def lookup(self, table: str, ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, indices = _look_up(self._rows, [table], [ids])
        return GivenRows(rows, indices).lookup(table, ids)


def _run_module(version: ServedVersion, names: dict[str, str], inputs: Any) -> Any:
    """Run the forward of a copy of the module that shares its weights and reads rows of this version."""
    made = copy.deepcopy(version.dense, {id(value): value for value in _weights(version.dense)})
    source = _DirectLookup(version.rows)
    for path, module in made.named_modules():
        if isinstance(module, SparseEmbedding):
            module.connect(names[path], _constant(source))
    return made(*inputs)


def _constant(source: Any) -> Callable[[], Any]:
    return lambda: source


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _versions(place: Path, name: str) -> list[int]:
    prefix = name.partition("{")[0]
    found = [path.name.removeprefix(prefix) for path in place.glob(f"{prefix}*") if path.is_dir()]
    return [int(number) for number in found if number.isdigit()]
