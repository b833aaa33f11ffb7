"""``DeferredEngine``: stands for an engine that needs its first batch, or its first loader, to be created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.data import Loader
from echelon.data.torch_loader import LoaderRequest
from echelon.distributed.activity import calling
from echelon.distributed.world import World
from echelon.engine.collective_calls import collective_call
from echelon.engine.early_calls import EarlyCalls
from echelon.engine.ema import NO_AVERAGE, NO_MODEL, MovingAverage, ema_settings
from echelon.engine.engine import Engine, begin
from echelon.engine.forward_backward import refuse_own_loop
from echelon.engine.planned_run import PlannedRun
from echelon.engine.resume import LoaderRestorer
from echelon.engine.run_context import RunContext
from echelon.engine.run_view import RunView
from echelon.parallel.ema_weights import Ema
from echelon.parallel.evaluate import Metric
from echelon.parallel.objective import as_batch
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan
from echelon.strategy.annotations.annotate import ModelMarks

NO_PLAN = (
    "auto finds its plan with the first batch of engine.loader() or engine.step(), and there was none; "
    "begin with one of them, or give distribute(sample=batch)"
)
NO_BATCH = (
    "the pipeline is cut by its first batch, and there was none; call step() first, or give distribute(sample=batch)"
)

#: A plan, the marks of the model, and the saved plan that it was made from.
ChosenPlan = tuple[Plan, ModelMarks, SavedPlan]


class PlanFinder(Protocol):
    """Finds the plan of a run from its first batch or data set. All ranks call the same method together."""

    def plan_from_batch(self, batch: Any) -> ChosenPlan: ...

    def plan_from_data(
        self, dataset: Any, batch_size: int | None, global_batch: int | None, options: Mapping[str, Any]
    ) -> ChosenPlan: ...


class DeferredEngine(Engine):
    """Creates the engine once, in the first call that has a batch, and passes all calls on to it from then on.

    A pipeline is partitioned with a batch, and ``auto`` finds its plan with a batch or with the data set of the first
    loader. What the script asks for earlier is kept for the engine.

    plan:    plan to show; with ``auto`` another one may be found
    finder:  finds the plan; None if it is known
    planned: the run with its plan; None if it is not known
    """

    def __init__(
        self, run: RunContext, plan: Plan, finder: PlanFinder | None = None, planned: PlannedRun | None = None
    ) -> None:
        self._run, self._first_plan, self._finder = run, plan, finder
        self._known = planned
        self._engine: Engine | None = None
        self._loader_restorer = LoaderRestorer(run)
        self._average = DeferredAverage(run, lambda: self._engine)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine, once it is created."""
        engine = self.__dict__.get("_engine")
        if engine is None:
            raise AttributeError(f"the engine has no '{name}' before its first batch")
        return getattr(engine, name)

    @property
    def _view(self) -> RunView:
        if self._engine is not None:
            return self._engine._view
        if self._known is None:
            raise UsageError(NO_PLAN)
        return RunView(self._known)

    # ---- creation ----

    def _from_batch(self, batch: Any) -> Engine:
        """Return the engine; create it with this batch if there is none."""
        if self._engine is None and self._known is None:
            assert self._finder is not None
            self._use(self._finder.plan_from_batch(batch), batch)
        if self._engine is None:
            assert self._known is not None
            self._engine = self._run.make_engine(self._known, batch, self._early())
            self._engine._start_timeline()
        return self._engine

    def _use(self, chosen: ChosenPlan, batch: Any = None) -> None:
        """Begin the run with this plan."""
        self._known = PlannedRun(self._run, *chosen)
        self._engine = begin(self._known, batch if self._known.plan.mesh.get("stage", 1) > 1 else None, self._early())

    def _early(self) -> EarlyCalls:
        return EarlyCalls(self._loader_restorer.waiting, self._average.settings)

    def _created(self) -> Engine:
        """Return the engine. Raises ``UsageError`` if there was no batch."""
        if self._engine is None:
            raise UsageError(NO_PLAN if self._known is None else NO_BATCH)
        return self._engine

    def _answer_roll(self, call: str, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> None:
        batches = None if self._known is None else self._known.batches
        self._run.checker.answer_roll(call, batches, args, named)

    # ---- calls that create the engine ----

    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        if self._engine is not None:
            return self._engine.step(*batch, samples=samples, outputs=outputs, **named)
        with calling("step", self.steps + 1, "data"):
            self._answer_roll("step", batch, named)
            with self._run.checker.explained():
                engine = self._from_batch(as_batch(batch, named, self._run.world.device))
            return engine.step(*batch, samples=samples, outputs=outputs, **named)

    @collective_call("evaluate")
    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        metrics: Mapping[str, Metric | str] | Sequence[str] = (),
        ema: bool = False,
    ) -> dict[str, float]:
        if self._known is None:
            raise UsageError(NO_PLAN)
        if self._engine is None:
            loaders = self._known.loaders
            loaders.taken()  # discards the sample count of an earlier batch
            first, data = loaders.peek(loaders.evaluation(data, batch_size, collate))
            if first is None:
                raise UsageError(NO_BATCH)
            self._from_batch(as_batch((first,), {}, self._run.world.device))
            batch_size = collate = None
        return self._created().evaluate(data, batch_size=batch_size, collate=collate, metrics=metrics, ema=ema)

    def _open_loader(self, request: LoaderRequest) -> Loader:
        if self._known is None:
            assert self._finder is not None
            self._use(self._finder.plan_from_data(*request[:4]))
        if self._engine is not None:
            return self._engine._open_loader(request)
        assert self._known is not None
        return self._known.loaders.training(request)

    # ---- calls that are kept for the engine ----

    @collective_call("load")
    def load(self, path: str | Path) -> None:
        if self._engine is not None:
            self._engine.load(path)
        else:
            self._run.progress.resume_at(self._loader_restorer.load(path))

    def resume(self) -> None:
        if self._engine is not None:
            self._engine.resume()
        else:
            self._run.progress.resume_at(self._loader_restorer.newest(self.steps))

    @property
    def ema(self) -> MovingAverage:
        average: Any = self._average if self._engine is None else self._engine.ema
        return average  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            return
        if self._known is not None:
            self._known.caches.restore()
        self._run.close()

    # ---- calls that need the engine ----

    def backward(self, loss: Tensor, samples: float | None = None) -> None:
        if self._known is not None:
            refuse_own_loop(self._known.plan, self._run.backend.pushes)
        self._created().backward(loss, samples)

    @collective_call("communicate")
    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        self._created().update(optimizer, samples)

    @collective_call("communicate")
    def reduce(self, optimizer: str | None = None, samples: float | None = None) -> None:
        self._created().reduce(optimizer, samples)

    @collective_call("communicate")
    def grad_norm(self, optimizer: str | None = None) -> Tensor:
        return self._created().grad_norm(optimizer)

    @collective_call("communicate")
    def clip_grad_norm_(self, max_norm: float, optimizer: str | None = None) -> Tensor:
        return self._created().clip_grad_norm_(max_norm, optimizer)

    @collective_call("communicate")
    def clip_grad_value_(self, clip_value: float, optimizer: str | None = None) -> None:
        self._created().clip_grad_value_(clip_value, optimizer)

    @collective_call("save")
    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        return self._created().save(directory, wait=wait)

    @collective_call("save")
    def save_best(
        self, value: float, directory: str | Path | None = None, *, largest: bool = False, wait: bool | None = None
    ) -> Path | None:
        return self._created().save_best(value, directory, largest=largest, wait=wait)

    @collective_call("save")
    def save_pretrained(
        self,
        directory: str | Path,
        *,
        max_shard_size: str | float = "5 GB",
        dtype: torch.dtype | str | None = None,
    ) -> Path:
        return self._created().save_pretrained(directory, max_shard_size=max_shard_size, dtype=dtype)

    @collective_call("communicate")
    def whole_state(self) -> dict[str, Tensor]:
        return self._created().whole_state()

    @collective_call("communicate")
    def synchronize(self) -> None:
        if self._engine is not None:  # before the first batch all replicas are equal
            self._engine.synchronize()

    # ---- state ----

    @property
    def world(self) -> World:
        return self._run.world if self._known is None else self._known.world

    @property
    def plan(self) -> Plan:
        known = self._first_plan if self._known is None else self._known.plan
        return known if self._engine is None else self._engine.plan

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return self._run.optimizers if self._engine is None else self._engine.optimizers

    @property
    def output(self) -> Any:
        return None if self._engine is None else self._engine.output

    @property
    def loss_scale(self) -> float:
        return self._created().loss_scale

    @property
    def skipped(self) -> int:
        return self._created().skipped


class DeferredAverage:
    """The moving average of an engine that waits for its first batch: it keeps the settings of ``engine.ema(...)``.

    find: returns the engine, once it is created
    """

    def __init__(self, run: RunContext, find: Callable[[], Engine | None]) -> None:
        self._run, self._find = run, find
        self.settings: Ema | None = None

    def __call__(self, decay: float = 0.999, **options: Any) -> Any:
        engine = self._find()
        if engine is not None:
            return engine.ema(decay, **options)
        self.settings = ema_settings(decay, options, self._run, self.settings)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        engine = self._find()
        if engine is None:
            raise UsageError(NO_AVERAGE if self.settings is None else NO_MODEL)
        return getattr(engine.ema, name)
