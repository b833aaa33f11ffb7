"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="A script's own arguments, after --.")]
Inputs = Annotated[
    str | None,
    typer.Option("--input", help="One sample, for a model without a batch: 3x224x224, int64:128:30522."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AllAsJson = Annotated[bool, typer.Option("--json", help="Print the full result as JSON.")]
LogDirectory = Annotated[str, typer.Argument(metavar="DIR", help="The log directory of a run.")]
