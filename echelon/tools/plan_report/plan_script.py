"""Plan for an unchanged training script: run it in one process up to its first batch, then plan instead of training.

``echelon plan train.py`` starts the script in a child process and writes the options to a file, whose path is in the
environment variable ECHELON_PLAN_ONLY. ``distribute()`` then returns a PlanningEngine (planning_engine.py) in place of
the engine. The child process writes its answer to a JSON file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.base.environment import PLAN_ONLY
from echelon.base.errors import UsageError
from echelon.tools.plan_report.plan_options import PlanOptions, PlanReportOptions
from echelon.tools.plan_report.report_data import PlanReport


def ask_script(options: PlanOptions, orders: PlanReportOptions) -> PlanReport:
    """Run the script up to its first batch and return the report for its model and batch."""
    if not Path(options.model).is_file():
        raise UsageError(f"MODEL: no file at '{options.model}'")
    options.machines()  # report an invalid cluster before the script runs, which can take minutes
    wanted = {"options": options.to_dict(), "orders": dataclasses.asdict(orders)}
    return PlanReport.from_dict(ask(options.model, options.arguments, wanted)["report"])


def ask(script: str, arguments: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    """Run the script in a child process and return its answer to ``question``.

    Raises UsageError if the script ends before its first batch, or answers with an error.
    """
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as room:
        question_file, answer, output = (Path(room, name) for name in ("question.json", "answer.json", "output.txt"))
        question_file.write_text(json.dumps({**question, "answer": str(answer)}), encoding="utf-8")
        environment = {**os.environ, PLAN_ONLY: str(question_file)}
        # The script's own output would mix with the report, so it is shown only if the script fails.
        with output.open("wb") as file:
            words = [sys.executable, script, *arguments]
            ended = subprocess.run(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
            )
        if not answer.exists():
            *said, last = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
            sys.stderr.write("".join(said))
            if ended.returncode and last.startswith("echelon: "):  # an error in the script, with its location
                raise UsageError(last.removeprefix("echelon: ").rstrip())
            sys.stderr.write(last)
            raise UsageError(_silent(script, ended.returncode))
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise UsageError(found["error"])
    return found


def _silent(script: str, code: int) -> str:
    if code:
        return f"'{script}' failed with exit code {code} before its first batch; its output is above"
    return f"'{script}' ended before its first batch; let it call distribute() and step(), or distribute(sample=batch)"
