"""``echelon plan``: make a PlanReport from command-line options and output it as tables, HTML, JSON or plan.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from echelon.base.errors import EchelonError, UsageError
from echelon.tools.plan_report import plan_page, plan_tables
from echelon.tools.plan_report.make_report import make_report
from echelon.tools.plan_report.model_source import DESCRIBED, find_source, is_script
from echelon.tools.plan_report.plan_options import PlanOptions, PlanReportOptions
from echelon.tools.plan_report.plan_script import ask_script
from echelon.tools.plan_report.report_data import PlanReport


class NothingFits(EchelonError):
    """Raised if no plan fits in the memory of the devices."""


def run_plan(options: PlanOptions, *, explain: str | None, html: str | None, as_json: bool, save: str | None) -> None:
    """Find the plan and output it; the options must have passed ``check_plan_options``."""
    orders = PlanReportOptions(sizes=as_json or html is not None, save=save, explain=explain)
    if is_script(options.model):
        report = ask_script(options, orders)
    else:
        cluster = options.machines()
        report = make_report(options, cluster, find_source(options, cluster), orders)
    _put_out(report, html, as_json)
    if not report.options:
        raise NothingFits(f"no plan of {report.model} fits on {report.machines.name}: {report.reason}")
    if save:
        print(f"saved: {save}; {_use_of(save, options.model)}", file=sys.stderr)


def _use_of(path: str, model: str) -> str:
    if model.partition(":")[0] in DESCRIBED:
        return f"'echelon plan --explain {path}' explains it (a plan to run needs the model itself as MODEL)"
    return f"'echelon run --plan {path} SCRIPT' runs it"


def _put_out(report: PlanReport, html: str | None, as_json: bool) -> None:
    if html is not None:
        try:
            Path(html).write_text(plan_page.render(report), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html '{html}' cannot be written: {error.strerror}; give another path") from None
        print(f"page: {html}", file=sys.stderr)
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    elif sys.stdout.isatty():
        plan_tables.on_terminal(report)
    else:
        print(plan_tables.plain(report))
