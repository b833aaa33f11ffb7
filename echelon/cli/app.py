"""The list of commands, in the order in which ``--help`` shows them."""

from __future__ import annotations

import functools
import platform
from typing import Annotated, Any

import typer

from echelon.base.version import __version__
from echelon.cli.check_commands import doctor, verify
from echelon.cli.completion import completion
from echelon.cli.file_commands import export, fetch_data, tokenize
from echelon.cli.model_commands import train, zoo
from echelon.cli.parsing import EchelonCommand, EchelonGroup, RunCommand
from echelon.cli.plan_commands import bench, explain, memory, plan
from echelon.cli.report_commands import report, timeline, watch
from echelon.cli.run_command import run
from echelon.cli.server_commands import serve
from echelon.cli.submit_commands import submit


def version() -> None:
    """Print the versions of Echelon, torch and Python."""
    print(version_line())


def version_line() -> str:
    """Return the versions in one line; the version of torch is read without importing torch."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        torch = f"torch {version_of('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"echelon {__version__} ({torch}, Python {platform.python_version()})"


def show_version(requested: bool) -> None:
    """Print the versions and exit if ``--version`` was given."""
    if requested:
        version()
        raise typer.Exit


app = typer.Typer(
    cls=EchelonGroup,
    help="Distributed training engine for PyTorch, numerically equivalent to one process.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Arguments after the script belong to the script; with _READ_ELSEWHERE, another parser reads the unknown options.
_SCRIPT_IS_LAST = {"allow_interspersed_args": False}
_READ_ELSEWHERE = {"ignore_unknown_options": True}

_command = functools.partial(app.command, cls=EchelonCommand)


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare the options that come before any command."""


app.command(cls=RunCommand, context_settings=_SCRIPT_IS_LAST)(run)
_command(add_help_option=False, context_settings=_READ_ELSEWHERE | _SCRIPT_IS_LAST)(train)
app.add_typer(zoo, name="zoo")
app.add_typer(submit, name="submit")
_command()(serve)
_command()(export)
_command()(explain)
_command()(plan)
_command()(memory)
_command()(bench)
_command(context_settings=_READ_ELSEWHERE | {"allow_extra_args": True})(doctor)
_command(context_settings={"allow_interspersed_args": True})(verify)
_command()(timeline)
_command()(report)
_command()(watch)
_command(name="fetch-data")(fetch_data)
_command()(tokenize)
_command()(completion)
_command()(version)


@functools.cache
def run_command() -> Any:
    """Return the click command of ``echelon run``."""
    return typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
