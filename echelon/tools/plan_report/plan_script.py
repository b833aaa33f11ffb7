"""Planning for a training script: it runs as it is, alone, up to its first batch, and then plans instead of training.

``echelon plan train.py`` starts it in a child process with the question in a file; ``distribute()`` sees the variable
and returns a stand-in for the engine (planning_engine.py). The answer goes back as JSON.
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


def ask_script(asked: PlanOptions, orders: PlanReportOptions) -> PlanReport:
    """Run the script until it has shown its model and a batch; what was planned for them."""
    if not Path(asked.model).is_file():
        raise UsageError(f"MODEL: no file at '{asked.model}'")
    asked.machines()  # a slip in the cluster is told before the script has run for minutes
    wanted = {"asked": asked.to_dict(), "orders": dataclasses.asdict(orders)}
    return PlanReport.from_dict(ask(asked.model, asked.arguments, wanted)["report"])


def ask(script: str, arguments: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    """What the script's own process answers to such a question, once it has shown its model and a batch."""
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as room:
        told, answer, output = (Path(room, name) for name in ("question.json", "answer.json", "output.txt"))
        told.write_text(json.dumps({**question, "answer": str(answer)}), encoding="utf-8")
        environment = {**os.environ, PLAN_ONLY: str(told)}
        # What the script itself prints is shown where it fails; beside the answer it would be in the way.
        with output.open("wb") as file:
            words = [sys.executable, script, *arguments]
            ended = subprocess.run(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
            )
        if not answer.exists():
            *said, last = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
            sys.stderr.write("".join(said))
            if ended.returncode and last.startswith("echelon: "):  # the script's own mistake, with its place
                raise UsageError(last.removeprefix("echelon: ").rstrip())
            sys.stderr.write(last)
            raise UsageError(_silent(script, ended.returncode))
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise UsageError(found["error"])
    return found


def _silent(script: str, code: int) -> str:
    if code:
        return f"'{script}' failed with exit code {code} before it had shown a batch; what it said is above"
    return (
        f"'{script}' ended before it had shown a batch; what is asked of it takes its distribute() and first step(), "
        "or distribute(sample=batch)"
    )
