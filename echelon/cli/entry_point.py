"""The entry point of ``echelon``: prints errors in one line and sets the exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from echelon.base.console import say
from echelon.base.errors import EchelonError, UsageError
from echelon.base.user_traceback import format_error
from echelon.cli.app import app
from echelon.cli.completion import COMPLETE, candidates
from echelon.cli.usage_errors import explain

#: click's UsageError. Newer versions of typer contain a copy of click, older ones depend on click; this works for both.
ParseError: type[Any] = typer.BadParameter.__base__ or Exception


def main() -> None:
    """Run the command line; a usage error prints one line on stderr, without a traceback, and exits with code 2."""
    if os.environ.get(COMPLETE):
        print("\n".join(candidates(typer.main.get_command(app), sys.argv[1:])))
        return
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        return int(app(prog_name="echelon", standalone_mode=False) or 0)
    except ParseError as error:
        say(explain(error))
        return 2
    except EchelonError as error:
        print(format_error(error), end="", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, typer.Abort):
        say("stopped by SIGINT")
        return 130
