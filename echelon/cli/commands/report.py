"""The implementations of ``echelon report`` and ``echelon watch``."""

from __future__ import annotations

import time
from pathlib import Path

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.observability.runlog.run_directory import existing_directory
from echelon.tools.report.page_server import link, open_server
from echelon.tools.report.run_files import gather
from echelon.tools.report.run_page import render


def report(directory: str, out: str | None) -> Path:
    """Write the HTML page of a run and return its path."""
    gathered = gather(existing_directory(directory))
    if gathered.run.empty:
        raise UsageError(
            f"there is no run in '{directory}': no metrics.jsonl, run.json, rank-N.jsonl, server-N.jsonl or "
            f"events.jsonl can be read there; name the log directory of a run ('echelon run --log-dir', "
            "Log(dir=...))"
        )
    path = Path(out) if out is not None else gathered.run.directory / "report.html"
    page = render(gathered, time.time())
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror}; choose another --out") from None
    return path


def watch(directory: str, host: str, port: int) -> None:
    """Serve the page of a run until Ctrl-C."""
    with open_server(existing_directory(directory), host, port) as server:
        say(f"watching '{directory}' at {link(server, host)} (Ctrl-C ends it)", stdout=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nechelon: no longer watching; the run goes on", flush=True)
