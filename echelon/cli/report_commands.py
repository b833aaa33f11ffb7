"""Commands that show the records of a run: ``echelon timeline``, ``report`` and ``watch``."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.base.console import say
from echelon.cli.options import AsJson
from echelon.observability.runlog.run_directory import newest_run_directory

_NEWEST = "the newest in runs"
RunDirectory = Annotated[
    str | None, typer.Argument(metavar="DIR", help="The log directory of a run.", show_default=_NEWEST)
]


def timeline(
    directory: RunDirectory = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Summarize the steps that 'echelon run --timeline' has recorded, and merge all ranks into one trace."""
    from echelon.observability.trace.trace_report import timeline_words

    print(timeline_words(directory or newest_run_directory(), as_json))


def report(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR...", help="Log directory of a run, of several, or a directory of runs.", show_default=_NEWEST
        ),
    ] = None,
    *,
    out: Annotated[str | None, typer.Option(help="The page to write.", show_default="DIR/report.html")] = None,
) -> None:
    """Make one page of a run, a comparison of several runs, or an index of a directory of runs."""
    from echelon.cli.commands.report import compare
    from echelon.cli.commands.report import report as write

    first, *more = directories or [newest_run_directory()]
    say(f"{compare([first, *more], out) if more else write(first, out)} written", stdout=True)


def watch(
    directory: RunDirectory = None,
    *,
    port: Annotated[int, typer.Option(help="Port of the page; 0: any free one.")] = 7171,
    host: Annotated[str, typer.Option(help="Address to listen on; a token protects all but loopback.")] = ("127.0.0.1"),
) -> None:
    """Serve the page of a run while it goes on."""
    from echelon.cli.commands.report import watch as serve_page

    serve_page(directory or newest_run_directory(), host, port)
