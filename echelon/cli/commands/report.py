"""The implementations of ``echelon report`` and ``echelon watch``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.observability.runlog.run_directory import existing_directory
from echelon.tools.report.page_server import link, open_server
from echelon.tools.report.run_files import RunFiles, gather
from echelon.tools.report.run_page import render
from echelon.tools.report.runs_page import render_runs, runs_below

#: Names of the pages in the directory of a run, in a directory of runs, and of several runs.
PAGE, INDEX, COMPARISON = "report.html", "index.html", "compare.html"


def report(directory: str, out: str | None) -> Path:
    """Write the HTML page of a run, or the index of a directory of runs, and return its path."""
    gathered = gather(existing_directory(directory))
    if gathered.run.empty and (below := runs_below(Path(directory))):
        return _index(Path(directory), below, out)
    if gathered.run.empty:
        raise UsageError(
            f"there is no run in '{directory}': no metrics.jsonl, run.json, rank-N.jsonl, server-N.jsonl or "
            "events.jsonl can be read there; name the log directory of a run ('echelon run --log-dir', Log(dir=...)), "
            "or a directory of such directories"
        )
    return _write_page(gathered, Path(out) if out is not None else gathered.run.directory / PAGE)


def compare(directories: Sequence[str], out: str | None) -> Path:
    """Write a page that compares several runs and return its path."""
    found = [gather(existing_directory(directory)) for directory in directories]
    if missing := [repr(name) for name, each in zip(directories, found, strict=True) if each.run.empty]:
        raise UsageError(f"there is no run in {', '.join(missing)}; name log directories of runs")
    runs = list({each.run.directory.resolve(): each.run for each in found}.values())
    path = Path(out or COMPARISON)
    return _write(path, render_runs(runs, f"{len(runs)} runs compared", path, time.time()))


def _index(directory: Path, below: Sequence[Path], out: str | None) -> Path:
    """Write the index of a directory of runs, and the page of each of them."""
    found = [gather(each) for each in below]
    for each in found:
        _write_page(each, each.run.directory / PAGE)
    path = Path(out) if out is not None else directory / INDEX
    many = "1 run" if len(found) == 1 else f"{len(found)} runs"
    return _write(path, render_runs([each.run for each in found], f"{many} in {directory}", path, time.time()))


def _write_page(gathered: RunFiles, path: Path) -> Path:
    return _write(path, render(gathered, time.time(), out=path))


def _write(path: Path, page: str) -> Path:
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
