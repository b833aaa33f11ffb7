"""The ``echelon`` command: a list of subcommands, each importing its implementation only when it is called."""

from echelon.cli.app import app
from echelon.cli.entry_point import main
from echelon.cli.run_command import checked_job

__all__ = ["app", "checked_job", "main"]
