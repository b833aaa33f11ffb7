"""The head of a servable directory: a small JSON file that names its version, inputs and tables.

    servable.json       this head
    lookups.pt2         program of torch.export: inputs -> the ids of every lookup
    dense.pt2           program of torch.export: inputs and looked-up rows -> predictions
    dense.safetensors   in place of both programs: the weights, for a module that the reader has
    rows-0.parquet      ids and weights of the first table; a directory if several servers wrote it

A delta has the changed rows and the whole dense weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from echelon.base.config import build, strict
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.json_head import MalformedHeadError, parse_object
from echelon.checkpoint.directory import remove_tree
from echelon.checkpoint.directory_swap import staging_path, swap_in
from echelon.checkpoint.os_errors import cannot_read, cannot_write, open_regular
from echelon.checkpoint.tensorfile import write_whole
from echelon.parameter_server.protocol.job_spec import Initializer, RowDtype, TableSpec
from echelon.strategy.sparse_update_rules import Sgd

HEAD, LOOKUPS, DENSE, WEIGHTS = "servable.json", "lookups.pt2", "dense.pt2", "dense.safetensors"
#: Largest head that is read.
_MOST_BYTES = 16 << 20


@strict
class ServedInput:
    """An input tensor: its dtype, and its shape, whose first dimension -1 is the batch."""

    dtype: str
    shape: tuple[int, ...]


@strict
class ServedTable:
    """A table of a servable: what gives the rows of unknown ids, and the file or directory of the known ones.

    rows:  name in the servable's directory; "" if servers hold the rows
    dtype: format in which a reader keeps the weights in memory, without a further rounding
    """

    name: str
    dim: int
    seed: int
    initializer: Initializer
    rows: str = ""
    dtype: RowDtype = "float32"

    @classmethod
    def of(cls, spec: TableSpec, rows: str = "") -> ServedTable:
        return cls(
            name=spec.name, dim=spec.dim, seed=spec.seed, initializer=spec.initializer, rows=rows, dtype=spec.dtype
        )

    @property
    def spec(self) -> TableSpec:
        """The table without what only training needs: optimizer state, admission, capacity, expiry."""
        return TableSpec(
            name=self.name, dim=self.dim, seed=self.seed, initializer=self.initializer, rule=Sgd(), dtype=self.dtype
        )


@strict
class ServableHead:
    """The content of ``servable.json``.

    lineage: identity that a servable and its deltas share
    version: number of this servable, or of the one that a delta leads to
    since:   version that a delta begins from; None for a whole servable
    dense:   "program" for torch.export's programs, "weights" for weights alone
    lookups: table of each lookup, in the order in which the model makes them
    servers: endpoints of the read-only servers that hold the rows; empty if files hold them
    """

    tables: tuple[ServedTable, ...]
    lineage: str
    version: int = 0
    since: int | None = None
    step: int = 0
    dense: Literal["program", "weights"] = "weights"
    inputs: tuple[ServedInput, ...] = ()
    lookups: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    format: Literal[1] = 1


def read_servable_head(path: Path) -> ServableHead:
    """Return the head of a servable directory. Raises ``CheckpointError`` if there is none, or a damaged one."""
    file = path / HEAD
    if not file.exists():
        raise CheckpointError(f"no servable at {path}: there is no {HEAD}; write one by 'echelon export --servable'")
    try:
        with open_regular(file) as opened:
            return build(ServableHead, parse_object(opened.read(_MOST_BYTES)))
    except OSError as error:
        raise cannot_read(file, error) from None
    except (MalformedHeadError, UsageError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; export it again") from None


def write_servable(out: Path, fill: Callable[[Path], ServableHead]) -> ServableHead:
    """Write a servable directory atomically: ``fill`` writes the files and returns the head."""
    aside = staging_path(out)
    try:
        aside.mkdir(parents=True)
        head = fill(aside)
        plain: dict[str, Any] = dataclasses.asdict(head)
        write_whole(aside / HEAD, json.dumps(plain, indent=1).encode() + b"\n")
        swap_in(aside, out)
        return head
    except OSError as error:
        raise CheckpointError(cannot_write(out, error)) from None
    finally:
        if aside.exists():
            remove_tree(aside)
