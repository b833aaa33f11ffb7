"""Rendering of a run as one self-contained HTML page, without external fonts or scripts.

The Content-Security-Policy of the page allows only its own script and no loading, so that text of a run that got past
the escaping could still do no harm.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from echelon.base import formatting
from echelon.observability.runlog.step_phases import BETWEEN, PHASES
from echelon.tools.html.templates import templates
from echelon.tools.report.figures.curves import figure
from echelon.tools.report.figures.gantt import gantts
from echelon.tools.report.figures.placement_figure import placement
from echelon.tools.report.run_files import RunFiles
from echelon.tools.report.sections import (
    memory_section,
    overview,
    rank_section,
    server_section,
    setup,
    time_section,
    training,
)
from echelon.tools.report.sections.html_table import sampled

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
#: Address of the trace on a served page.
TRACE_ADDRESS = "trace.json.gz"


def render(gathered: RunFiles, now: float, live: float | None = None, out: Path | None = None) -> str:
    """Render the page as HTML text.

    now:  current time, in seconds since the epoch
    live: seconds between two refreshes of the page; default None: no refresh
    out:  file of the page, from which links lead to the trace; default: report.html in the run's directory
    """
    view = _view(gathered, now, live) | page_script(live is not None)
    return page_environment().get_template("page.html.j2").render(**view, trace=_trace(gathered, live, out))


def page_environment() -> Environment:
    """Return the environment of the pages of runs."""
    found = templates(HERE)
    found.filters.update(kind=_kind, figure=figure)
    return found


def page_script(live: bool) -> dict[str, Any]:
    """Return the script of a page and the policy that allows it, for the template."""
    from markupsafe import Markup

    script = script_text()
    return {"script": Markup(script), "policy": policy(script, live)}  # the script contains no data of a run


def _trace(gathered: RunFiles, live: float | None, out: Path | None) -> str | None:
    """Return the address of the trace, relative to the page; None without a trace."""
    if gathered.trace is None or live is not None:
        return None if gathered.trace is None else TRACE_ADDRESS
    return quote(os.path.relpath(gathered.trace, out.parent if out is not None else gathered.run.directory))


def _kind(name: str) -> str:
    """Return the CSS class of a bar segment; names come from files, so unknown ones become "other"."""
    return name.replace(" ", "-") if name in _KNOWN else "other"


_KNOWN = {*PHASES, *BETWEEN, "held", *memory_section.KINDS}


def policy(script: str, live: bool) -> str:
    """Return the Content-Security-Policy: the page's own script and styles, and nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    talk = "'self'" if live else "'none'"
    own = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; connect-src {talk}"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def script_text() -> str:
    """Return all scripts as one that defines no global names, in a form valid in both HTML and XML."""
    parts = [(HERE / name).read_text(encoding="utf-8") for name in ("charts.js", "refresh.js")]
    return "\n".join(['//<![CDATA[\n(() => {\n"use strict";', *parts, "})();\n//]]>"])


def _view(gathered: RunFiles, now: float, live: float | None) -> dict[str, Any]:
    run = gathered.run
    view: dict[str, Any] = {
        "directory": str(run.directory),
        "made": overview.moment(now),
        "live": live,
        "head": overview.overview(gathered, now),
        "empty": run.empty,
        "sampled": sampled,
        "seconds": formatting.duration,
        "milliseconds": lambda value: formatting.duration(value / 1e3),
    }
    return view | _measured(gathered) | _set_up(gathered)


def _measured(gathered: RunFiles) -> dict[str, Any]:
    run = gathered.run
    return {
        "curves": training.charts(run),
        "gantts": gantts(gathered),
        "times": time_section.times(run),
        "summary": time_section.summary(gathered.summary),
        "compared": time_section.compared(gathered),
        "ranks": rank_section.ranks(run),
        "memory": memory_section.make_memory_section(run),
        "servers": server_section.serving(run),
    }


def _set_up(gathered: RunFiles) -> dict[str, Any]:
    facts = gathered.run.facts
    return {
        "placement": placement(facts) if facts else None,
        "stages": setup.stages(facts) if facts else None,
        "settings": setup.settings(facts) if facts else None,
        "said": list(facts.said) if facts else [],
        "plan": setup.plan_text(facts) if facts else "",
        "environment": setup.environment(facts) if facts else [],
        "variables": sorted(facts.environment.items()) if facts else [],
        "events": setup.events(gathered.run.events),
    }
