"""``echelon verify`` inside a test: both runs of a training function, and the verdict."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from harness import Died, run_raw

import echelon
from echelon.base.environment import VERIFY
from echelon.tools.verify.float64 import TOLERANCE
from echelon.tools.verify.verdict import Verdict, compare_runs
from echelon.tools.verify.verify_request import VerifyRequest

STEPS = 2


def script(question: str, body: Callable[[], None]) -> None:
    os.environ[VERIFY] = question
    echelon.init(seed=0)
    body()


def recorded(body: Callable[[], None], directory: Path, steps: int = STEPS, wide: bool = False) -> VerifyRequest:
    directory.mkdir(exist_ok=True)
    question = VerifyRequest(str(directory), "plan", steps, wide)
    ends = run_raw(script, question.ask()[VERIFY], body, ranks=2)
    assert ends == [Died(0)] * 2, ends
    return question


def verified(body: Callable[[], None], directory: Path, steps: int = STEPS, wide: bool = False) -> Verdict:
    question = recorded(body, directory, steps, wide)
    plan = question.answered("plan")
    assert plan is not None
    alone = dataclasses.replace(question, role="reference")
    for _ in range(2):
        [end] = run_raw(script, alone.ask()[VERIFY], body, ranks=1)
        assert end == Died(0), end
        passes = int(alone.noted("passes") or 0)
        if passes == alone.passes:
            break
        alone = dataclasses.replace(alone, passes=passes)
    reference = alone.answered("reference")
    assert reference is not None
    return compare_runs(plan, reference, TOLERANCE if wide else None)
