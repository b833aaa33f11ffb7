"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="A script's own arguments, after --.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AllAsJson = Annotated[bool, typer.Option("--json", help="Print the full result as JSON.")]
