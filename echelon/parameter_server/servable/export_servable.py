"""Writes a checkpoint as a servable directory; the work of ``echelon export --servable``."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.base.endpoints import parse_endpoints
from echelon.base.errors import CheckpointError, UsageError, one_line
from echelon.checkpoint import Stored, find
from echelon.checkpoint.weights import export as export_weights
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint
from echelon.parameter_server.persistence.table_export import TableExport, write_table
from echelon.parameter_server.servable.export_programs import described, export_programs, table_names
from echelon.parameter_server.servable.servable_head import (
    DENSE,
    LOOKUPS,
    WEIGHTS,
    ServableHead,
    ServedTable,
    write_servable,
)

#: Formats of the files of rows.
FORMATS = ("parquet", "safetensors")


def export_servable(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    model: nn.Module | None = None,
    inputs: Sequence[Any] | None = None,
    *,
    rows: str = "safetensors",
    ema: bool = False,
) -> ServableHead:
    """Write a checkpoint as a servable directory, which ``load_servable`` answers from, and return its head.

    checkpoint: checkpoint, or a directory of checkpoints, of which the newest is taken
    out:        directory to write; an earlier one is replaced when the new one is complete
    model:      a new instance of the model, which becomes programs of torch.export; None (default): the directory has
                the weights only, for a reader that has the module
    inputs:     with ``model``, sample inputs of its forward, two samples or more
    rows:       "safetensors" (default) or "parquet", or "HOST:PORT,...": the read-only servers that hold the rows
    ema:        True for the averaged weights

    >>> head = echelon.export_servable("ckpt", "servable")
    """
    stored = Stored(find(checkpoint))
    part = stored.facts.get("servers")
    if not isinstance(part, str):
        raise CheckpointError(
            f"{stored.path} has no sparse tables; export its weights by 'echelon export' without --servable"
        )
    servers = () if rows in FORMATS else parse_endpoints(rows)

    def fill(aside: Path) -> ServableHead:
        export_weights(stored.path, aside / WEIGHTS, ema=ema)
        with ServerCheckpoint(stored.path.parent / Path(part).name) as saved:
            tables = _write_tables(saved, aside, rows, bool(servers))
            head = ServableHead(tables=tables, lineage=secrets.token_hex(8), step=saved.step, servers=servers)
        return head if model is None else write_programs(aside, head, model, inputs)

    return write_servable(Path(out), fill)


def _write_tables(saved: ServerCheckpoint, aside: Path, form: str, on_servers: bool) -> tuple[ServedTable, ...]:
    tables = []
    for number, spec in enumerate(saved.jobs[0].tables):
        name = "" if on_servers else f"rows-{number}.{form}"
        if name:
            write_table(TableExport(spec, saved.buckets(spec.name), version=saved.step), aside / name)
        tables.append(ServedTable.of(spec, name))
    return tuple(tables)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a servable's dense weights into its module. Raises ``UsageError`` if they do not fit."""
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise UsageError(
            f"{type(model).__name__} is not the model of {path.parent}: {one_line(error, 300)}; build it as it was"
        ) from None


def write_programs(
    aside: Path,
    head: ServableHead,
    model: nn.Module,
    inputs: Sequence[Any] | None,
) -> ServableHead:
    """Replace the weights in the directory by the programs of ``model``; return the head with inputs and lookups."""
    if inputs is None:
        raise UsageError("torch.export needs sample inputs of the model; give inputs=(...) with two samples or more")
    unknown = sorted(set(table_names(model).values()) - {table.name for table in head.tables})
    if unknown:
        raise UsageError(f"{type(model).__name__} reads table '{unknown[0]}', which the checkpoint does not have")
    load_weights(model, aside / WEIGHTS)
    with torch.no_grad():
        lookups, dense, tables = export_programs(model.eval(), tuple(inputs))
    torch.export.save(lookups, aside / LOOKUPS)
    torch.export.save(dense, aside / DENSE)
    (aside / WEIGHTS).unlink()
    return dataclasses.replace(head, dense="program", inputs=described(tuple(inputs)), lookups=tables)
