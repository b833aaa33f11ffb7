"""The entry point, and what is said of words that are not understood."""

from __future__ import annotations

import sys
from typing import Any

import typer

from echelon.cli.app import app
from echelon.errors import EchelonError, UsageError, nearest

#: click's UsageError. Newer typers carry a copy of click, older ones depend on it; this names the right one.
ParseError: type[Any] = typer.BadParameter.__base__ or Exception


def main() -> None:
    """The entry point: a user's mistake is one line on stderr and exit code 2, never a traceback of ours."""
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        return int(app(prog_name="echelon", standalone_mode=False) or 0)
    except ParseError as error:
        print(f"echelon: {_explain(error)}", file=sys.stderr)
        return 2
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, typer.Abort):
        print("echelon: stopped by SIGINT", file=sys.stderr)
        return 130


#: Commands that take a script among their own options.
WITH_SCRIPTS = ("memory", "plan", "verify")


def _explain(error: Any) -> str:
    """click's complaint as one line, with the nearest name for an option or command that does not exist."""
    command: Any = error.ctx.command if error.ctx else None
    if type(error).__name__ == "NoArgsIsHelpError":
        return f"which command? known: {', '.join(sorted(command.commands))} (see 'echelon --help')"
    if hasattr(error, "option_name") and type(error).__name__ == "NoSuchOption":
        known = [name for param in command.params for name in param.opts if name.startswith("--")]
        after = " (the script's own go behind '--')" if command.name in WITH_SCRIPTS else ""
        told = f"no option '{error.option_name}' for '{error.ctx.command_path}'"
        return f"{told}{nearest(error.option_name, known)}{after}"
    message = " ".join(error.format_message().split())
    if message.startswith("No such command"):
        name = message.split("'")[1]
        return f"no command '{name}'{nearest(name, command.commands)}"
    return message[:1].lower() + message[1:].rstrip(".")
