"""``echelon export --servable``: write a checkpoint as a servable directory."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.base.object_path import callable_at, user_code
from echelon.parameter_server.servable.export_servable import export_servable


def export_for_serving(checkpoint: str, out: str, model: str | None, rows: str, ema: bool) -> None:
    """Write the servable and print what it holds.

    model: FILE.py:CALLABLE, which returns the model and sample inputs; None for weights without a program
    """
    made, inputs = (None, None) if model is None else _made(model)
    head = export_servable(checkpoint, out, made, inputs, rows=rows, ema=ema)
    where = f"on {', '.join(head.servers)}" if head.servers else f"in {rows} files"
    dense = "programs of torch.export" if head.dense == "program" else "weights (load_servable needs model=...)"
    tables = ", ".join(f"'{table.name}'" for table in head.tables)
    say(f"step {head.step} written to {out}: {dense}; rows of {tables} {where}", stdout=True)


def _made(place: str) -> tuple[nn.Module, tuple[Any, ...]]:
    make = callable_at(place, "--model")
    with user_code("--model", place):
        made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"--model '{place}' gave {type(made).__name__}; return (model, (input, ...)) with two samples")
    model, inputs = made
    return model, tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
