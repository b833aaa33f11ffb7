"""The command ``echelon version`` and the option ``echelon --version``."""

from __future__ import annotations

import platform

import typer

from echelon.base.version import __version__


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


def show_version(asked: bool) -> None:
    """Print the versions and exit if ``--version`` was given."""
    if asked:
        version()
        raise typer.Exit
