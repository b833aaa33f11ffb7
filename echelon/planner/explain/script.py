"""Planning for a training script: it runs as it is, alone, up to its first batch, and then plans instead of training.

``echelon plan train.py`` starts it in a child process with the question in a file; ``distribute()`` sees the variable
and returns a stand-in for the engine. The answer goes back as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from echelon.environment import PLAN_ONLY
from echelon.errors import EchelonError, UsageError
from echelon.planner.explain.asked import Asked, Orders
from echelon.planner.explain.report import Report
from echelon.strict import build


def ask_script(asked: Asked, orders: Orders) -> Report:
    """Run the script until it has shown its model and a batch; what was planned for them."""
    if not Path(asked.model).is_file():
        raise UsageError(f"MODEL: no file at '{asked.model}'")
    asked.machines()  # a slip in the cluster is told before the script has run for minutes
    wanted = {"asked": asked.to_dict(), "orders": dataclasses.asdict(orders)}
    return Report.from_dict(ask(asked.model, asked.arguments, wanted)["report"])


def ask(script: str, arguments: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    """What the script's own process answers to such a question, once it has shown its model and a batch."""
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as room:
        told, answer = Path(room, "question.json"), Path(room, "answer.json")
        told.write_text(json.dumps({**question, "answer": str(answer)}), encoding="utf-8")
        environment = {**os.environ, PLAN_ONLY: str(told)}
        # to stderr: what the script itself prints is no part of the tables, or of the JSON
        ended = subprocess.run([sys.executable, script, *arguments], env=environment, stdout=2, check=False)
        if not answer.exists():
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


# ---- in the child ----


def listen(model: nn.Module, *, optimizer: Any, loss: Any, strategy: Any, plan: Any, cluster: Any, sample: Any) -> Any:
    """What ``distribute()`` returns to a script that is only planned: an engine that plans at its first batch."""
    question = json.loads(Path(os.environ.pop(PLAN_ONLY)).read_text(encoding="utf-8"))
    if "footprint" in question:
        from echelon.footprint.script import Weighing

        waiting: Waiting = Weighing(question, model, optimizer, loss, strategy, plan, cluster)
    else:
        waiting = Waiting(question, model, optimizer, loss)
    if sample is not None:
        waiting.step(sample)
    return waiting


class Waiting:
    """Stands in for the engine of one process, which it asks for all but training."""

    def __init__(self, question: dict[str, Any], model: nn.Module, optimizer: Any, loss: Any) -> None:
        from echelon.distribution import distribute
        from echelon.watch import Log

        self._question, self._model, self._optimizer, self._loss = question, model, optimizer, loss
        self._engine = distribute(model, optimizer=optimizer, loss=loss, log=Log(console=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *batch: Any, samples: float | None = None, **named: Any) -> NoReturn:
        from echelon.objective import as_batch

        self._look_at(as_batch(batch, named, torch.device("cpu")))

    def backward(self, loss: Any) -> NoReturn:
        self._answer({"error": "a loop of its own (backward and update) cannot be planned; use engine.step(batch)"})

    def update(self, *_: Any, **__: Any) -> NoReturn:
        self.backward(None)

    def resume(self) -> None:
        """There is nothing to go on with."""

    def _look_at(self, batch: Any) -> NoReturn:
        from echelon.planner.explain.command import make_report
        from echelon.planner.explain.source import Source, profile_model

        self._refuse_tables()
        try:
            asked, orders = self._asked(), build(Orders, self._question["orders"], "orders")
            cluster = asked.machines()
            profile = profile_model(self._model, batch, self._loss, name=Path(asked.model).stem, cluster=cluster)
            report = make_report(asked, cluster, Source(profile, self._model), orders)
        except EchelonError as error:
            self._answer({"error": str(error)})
        if asked.batch is None:
            report = dataclasses.replace(report, notes=(*report.notes, _ONE_PROCESS))
        self._answer({"report": report.to_dict()})

    def _refuse_tables(self) -> None:
        from echelon.nn import SparseEmbedding

        if any(isinstance(module, SparseEmbedding) for module in self._model.modules()):
            self._answer({"error": "sparse tables live on parameter servers, whose work plan does not know; use 'run'"})

    def _asked(self) -> Asked:
        asked = build(Asked, self._question["asked"], "asked")
        return asked if asked.optimizer else dataclasses.replace(asked, optimizer=kind_of(self._optimizer))

    def _answer(self, found: dict[str, Any]) -> NoReturn:
        Path(self._question["answer"]).write_text(json.dumps(found), encoding="utf-8")
        raise SystemExit(0)  # the script's own clean-up runs; its training does not


_ONE_PROCESS = "the batch is the one that the script gives one process; --batch says how large it is for all together"


def kind_of(optimizer: Any) -> str:
    """What the cost of an update goes by: ``adamw``, ``momentum``; the first's where there are several."""
    listed = list(optimizer.values()) if isinstance(optimizer, Mapping) else optimizer
    first = listed[0] if isinstance(listed, list | tuple) else listed
    name = type(first).__name__.lower()
    return "momentum" if name == "sgd" and first.defaults.get("momentum") else name
