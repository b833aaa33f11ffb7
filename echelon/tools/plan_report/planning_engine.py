"""A stand-in for the engine in a script run by ``echelon plan``: it plans at the first batch and ends the script."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from echelon.base.config import build
from echelon.base.environment import PLAN_ONLY
from echelon.base.errors import EchelonError
from echelon.distributed import world as worlds
from echelon.engine.engine import Engine
from echelon.planner.profiling.optimizer_state import optimizer_name
from echelon.strategy import Strategy
from echelon.tools.plan_report.plan_options import PlanOptions, PlanReportOptions


def make_planning_engine(
    model: nn.Module,
    *,
    optimizer: Any,
    loss: Any,
    scheduler: Any,
    strategy: Any,
    plan: Any,
    cluster: Any,
    sample: Any,
) -> Any:
    """Return the engine for a script that is only planned; ``distribute()`` returns it in place of a real one.

    It plans at its first batch, or at once if there is a ``sample``.
    """
    worlds.current()  # called while PLAN_ONLY is set: one process, which waits for no other trainers
    question = json.loads(Path(os.environ.pop(PLAN_ONLY)).read_text(encoding="utf-8"))
    if "footprint" in question:
        from echelon.tools.memory_profile.footprint_engine import FootprintEngine

        engine: PlanningEngine = FootprintEngine(question, model, optimizer, loss, scheduler, strategy, plan, cluster)
    else:
        engine = PlanningEngine(question, model, optimizer, loss, scheduler, strategy)
    if sample is not None:
        engine.step(sample)
    return engine


def as_engine(method: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., Any]:
    """Give the method the signature of the Engine method of the same name; it receives the bound arguments."""
    original = getattr(Engine, method.__name__)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def called(self: PlanningEngine, *args: Any, **named: Any) -> Any:
        return method(self, signature.bind(self, *args, **named).arguments)

    return called


class PlanningEngine:
    """Wraps a single-process engine: ``step`` plans and ends the script, other attributes come from that engine."""

    def __init__(
        self,
        question: dict[str, Any],
        model: nn.Module,
        optimizer: Any,
        loss: Any,
        scheduler: Any = None,
        strategy: Strategy | None = None,
    ) -> None:
        from echelon.api.distribute import distribute
        from echelon.observability.metrics import Log

        self._question = question
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._strategy = strategy or Strategy()
        self._engine = distribute(model, optimizer=optimizer, loss=loss, scheduler=scheduler, log=Log(console=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @as_engine
    def step(self, given: dict[str, Any]) -> NoReturn:
        from echelon.parallel.objective import as_batch

        self._look_at(as_batch(given.get("batch", ()), given.get("named", {}), torch.device("cpu")))

    @as_engine
    def backward(self, given: dict[str, Any]) -> NoReturn:
        self._refuse_own_loop()

    @as_engine
    def update(self, given: dict[str, Any]) -> NoReturn:
        self._refuse_own_loop()

    @as_engine
    def resume(self, given: dict[str, Any]) -> None:
        """Do nothing: planning needs no checkpoint."""

    def _refuse_own_loop(self) -> NoReturn:
        self._answer({"error": _OWN_LOOP})

    def _look_at(self, batch: Any) -> NoReturn:
        from echelon.tools.plan_report.make_report import make_report
        from echelon.tools.plan_report.model_source import ModelSource, profile_model

        self._refuse_tables()
        try:
            options, orders = self._options(), build(PlanReportOptions, self._question["orders"], "orders")
            cluster = options.machines()
            profile = profile_model(self._model, batch, self._loss, name=Path(options.model).stem, cluster=cluster)
            report = make_report(
                options, cluster, ModelSource(profile, self._model, self._optimizer, self._strategy), orders
            )
        except EchelonError as error:
            self._answer({"error": str(error)})
        if options.batch is None:
            report = dataclasses.replace(report, notes=(*report.notes, _ONE_PROCESS))
        self._answer({"report": report.to_dict()})

    def _refuse_tables(self) -> None:
        from echelon.nn import SparseEmbedding

        if any(isinstance(module, SparseEmbedding) for module in self._model.modules()):
            self._answer({"error": "sparse tables live on parameter servers, which plans do not cover; use 'run'"})

    def _options(self) -> PlanOptions:
        options = build(PlanOptions, self._question["options"], "options")
        return options if options.optimizer else dataclasses.replace(options, optimizer=optimizer_name(self._optimizer))

    def _answer(self, found: dict[str, Any]) -> NoReturn:
        Path(self._question["answer"]).write_text(json.dumps(found), encoding="utf-8")
        raise SystemExit(0)  # so that the script's cleanup code runs, but not its training


_ONE_PROCESS = "the batch is the one that the script gives one process; --global-batch sets its size for all together"
_OWN_LOOP = "a custom loop (engine.backward and engine.update) shows no forward pass to profile; use engine.step(batch)"
