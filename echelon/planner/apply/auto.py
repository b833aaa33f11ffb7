"""``Strategy(auto=True)``: at the first batch, rank 0 profiles the model and searches, and all ranks run its plan.

Plans have the precision and the compilation of a run without a strategy (see DefaultRun), and one is taken only if it
is faster than that run, or if that run does not fit (see DefaultComparison).

The source of the batch limits the plans. With ``sample=`` or a data set (``engine.loader``), any mesh is possible,
because batches come from loaders that know the plan. If user code passes each rank its own batch, every rank keeps it:
plans with splits or stages are left out, and a log line says so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.environment import PLAN
from echelon.base.errors import EchelonError, UsageError
from echelon.base.formatting import duration, size
from echelon.checkpoint.training_state import random_state, restore_random_state
from echelon.data import Loader
from echelon.data.sampling import batches_of
from echelon.distributed.collectives import gather_json, json_to_tensor, tensor_to_json
from echelon.distributed.world import World
from echelon.fastpath.inspect import choose_for_saved_plan, machine_of
from echelon.nn.moe import MoE
from echelon.parallel.objective import LossFunction, as_batch, count_samples
from echelon.plan import Plan
from echelon.plan.batch_norms import batch_norm_names
from echelon.plan.draft import Draft
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.apply.realize import realize
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.default_run import FP32_EAGER, DefaultRun, find_default_run
from echelon.strategy import Auto, Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.slices import Slices
from echelon.strategy.combine import set_options

if TYPE_CHECKING:
    from echelon.planner.apply.default_comparison import DefaultComparison
    from echelon.planner.plan_search.search_result import PlanChoice, SearchResult

#: A plan predicted to take this many times the best plan's time is not preferred for trials: errors are smaller.
HOPELESS = 3.0


def find_saved(given: Plan | SavedPlan | str | Path | None) -> SavedPlan | None:
    """Return the saved plan of ``distribute(plan=...)`` or of ``echelon run --plan``, or None.

    Raises UsageError if both are given.
    """
    path = os.environ.get(PLAN)
    if path is not None and given is not None:
        raise UsageError(f"distribute(plan=...) and 'echelon run --plan {path}' are two plans; leave one of them out")
    if path is not None:
        return SavedPlan.load(path)
    return SavedPlan.load(given) if isinstance(given, str | Path) else given if isinstance(given, SavedPlan) else None


def origin_of(given: Plan | SavedPlan | str | Path | None) -> str:
    """Return the origin of a saved plan as text."""
    return os.environ.get(PLAN) or (str(given) if isinstance(given, str | Path) else "distribute(plan=...)")


def refuse_settings_beside_plan(
    strategy: Strategy, marks: ModelMarks, slices: Slices | None, served: bool, planned: bool
) -> None:
    """Raise UsageError if a script has settings beside a saved plan or auto, which would be ignored or conflict."""
    what = "the saved plan" if planned else "auto"
    beside = [name for name in set_options(strategy) if name != "auto"]  # ``fast`` and ``amp=False`` are respected
    if beside:
        options = ", ".join(f"{name}=" for name in beside)
        raise UsageError(f"{what} says how to train, and Strategy sets {', '.join(beside)}; remove {options} from it")
    if marks.units or marks.splits or marks.replicates or marks.pipeline or marks.default:
        raise UsageError(f"{what} says where parts of the model run, and the model has marks; remove the marks")
    if slices is not None:
        raise UsageError(f"{what} says which ranks make up a copy of the model; remove cluster= from distribute()")
    if served:
        raise UsageError(f"{what} is for jobs without parameter servers, and this one has them; remove {what}")


#: A plan, the marks of the model, and the saved plan that it was made from.
ChosenPlan = tuple[Plan, ModelMarks, SavedPlan]


class AutoPlanner:
    """Chooses the plan of a run. All ranks must call the same methods together.

    say:      writes a line to the log
    strategy: the user's; besides ``auto`` it may have ``fast`` and ``amp=False``
    """

    def __init__(
        self,
        auto: Auto | None,
        world: World,
        model: nn.Module,
        loss: LossFunction | None,
        optimizers: Mapping[str, torch.optim.Optimizer],
        say: Callable[[str], None],
        strategy: Strategy,
    ) -> None:
        self._say, self._strategy = say, strategy
        self._auto = auto
        self._world = world
        self._model = model
        self._loss = loss
        self._optimizers = optimizers

    def by_sample(self, batch: Any) -> ChosenPlan:
        """Choose a plan from a batch as one rank gets it, if loaders will distribute the data."""
        return self._find(lambda: batch, self._total(count_samples(batch)), own_batches=False)

    def plan_from_batch(self, batch: Any) -> ChosenPlan:
        """Choose a plan from the first batch that user code passes to every rank."""
        return self._find(lambda: batch, self._total(count_samples(batch)), own_batches=True)

    def plan_from_data(
        self, dataset: Any, batch_size: int | None, global_batch: int | None, options: Mapping[str, Any]
    ) -> ChosenPlan:
        """Choose a plan from the first samples of a data set.

        batch_size:   samples of each rank, because the number of replicas is not known yet
        global_batch: samples of all ranks; exactly one of the two must be given
        options:      options of the loader
        """
        if "batch_sampler" in options:
            batch_size, global_batch = None, batches_of(options["batch_sampler"])
        if (batch_size is None) == (global_batch is None):
            raise UsageError("loader() takes either batch_size (for each rank) or global_batch (for all together)")
        total = global_batch if global_batch is not None else (batch_size or 1) * self._world.size
        rows = max(1, total // self._world.size)

        def first() -> Any:
            wanted = {name: options[name] for name in ("collate", "lengths", "pad_value") if name in options}
            loader = Loader(dataset, batch_size=rows, shuffle=False, device=self._world.device, **wanted)
            return as_batch((next(iter(loader)),), {}, self._world.device)

        rows_of_all = len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, tuple) else 0
        return self._find(first, total, own_batches=False, steps=rows_of_all // total)

    def realized(self, saved: SavedPlan, origin: str = "") -> ChosenPlan:
        """Return the plan of a saved plan; ``origin``: text about its source for a log line, "" for no line."""
        if origin:
            self._say(f"plan: from {origin}: {saved.draft}")
        saved.check_model(self._model)
        place = self._world.place
        plan, marks = realize(saved, self._model, self._optimizers, self._world.size, place.local_world_size)
        plan = choose_for_saved_plan(
            plan, saved.draft, self._strategy, self._world, self._model, self._optimizers, self._loss
        )
        return plan, marks, saved

    def _total(self, samples: int) -> int:
        control = self._world.control
        return samples if control is None else sum(gather_json(samples, control))

    def _find(self, sample: Callable[[], Any], total: int, *, own_batches: bool, steps: int = 0) -> ChosenPlan:
        """Choose a plan for ``total`` samples a step; ``steps``: steps that will surely follow."""
        assert self._auto is not None
        message: dict[str, Any] = {}
        machine = machine_of(self._world)
        # on every rank, because a part of ``fast`` that is impossible must be refused on every rank
        usual = find_default_run(self._model, self._loss, self._optimizers, machine, self._strategy)
        if self._world.rank == 0:
            message = self._search(sample, PlanTask(total, usual, own_batches, steps))
        message = from_first(message, self._world)
        if "error" in message:
            raise UsageError(message["error"])
        for line in message["lines"]:
            self._say(line)
        plans = [SavedPlan.from_json(text) for text in message["plans"]]
        if message["measure"] and len(plans) > 1:
            from echelon.planner.apply.trial import find_quickest_plan

            plans = [find_quickest_plan(plans, self._world, self._model, self._say)]
        return self.realized(plans[0])

    def _search(self, sample: Callable[[], Any], task: PlanTask) -> dict[str, Any]:
        """Return, on rank 0, the message to all ranks with plans or an error.

        The other ranks wait for the message, so every exception is turned into an error in it.
        """
        assert self._auto is not None
        before = random_state(0, self._world.device)
        try:
            found = find_plans(self._auto, self._model, self._loss, sample(), task, self._world, self._optimizers)
        except EchelonError as error:
            return {"error": str(error)}
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return {
                "error": f"auto could not profile the model ({reason}); choose a Strategy by hand, or mark the model"
            }
        finally:
            restore_random_state(0, self._world.device, before)
        return found


@dataclass(frozen=True)
class PlanTask:
    """The training that a plan is for.

    samples:     samples of a step, of all ranks together
    usual:       precision and compilation of a run without a strategy
    own_batches: True if user code passes each rank its own batch, so that plans cannot cut the model
    steps:       steps that will surely follow; 0 if unknown
    """

    samples: int
    usual: DefaultRun = FP32_EAGER
    own_batches: bool = False
    steps: int = 0


def find_plans(
    auto: Auto,
    model: nn.Module,
    loss: LossFunction | None,
    sample: Any,
    task: PlanTask,
    world: World,
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> dict[str, Any]:
    """Return the plans to run or to measure, as JSON, and log lines about them. Raises UsageError if no plan fits."""
    from echelon.base.quantities import quantity
    from echelon.planner.apply.default_comparison import (
        compare_with_default,
        default_choice,
        doubt_of,
        is_measured,
        with_rivals,
    )
    from echelon.planner.cluster.cluster import with_memory_limit
    from echelon.planner.plan_search.search import search
    from echelon.planner.profiling.profile import profile

    cluster = _cluster(auto, world)
    memory = None if auto.memory is None else quantity(auto.memory, "bytes", "Auto(memory=...)")
    looked = profile(model, sample, loss=loss)
    fixed, stepping = _fixed(model, task.own_batches), _optimizer(optimizers, model, task.usual)
    answer = search(
        looked,
        cluster,
        batch=task.samples,
        allow=auto.allow,
        memory=memory,
        fixed=fixed,
        devices=world.size,
        usual=task.usual,
        **stepping,
        keep=50,  # plans on different meshes may be far apart in the ranking
    )
    if not answer.best:
        raise UsageError(_nothing_fits(answer))
    plain = default_choice(looked, with_memory_limit(cluster, memory), task.samples, task.usual, stepping)
    against = compare_with_default(answer.best[0], plain, task.steps, measured=is_measured(cluster))
    candidates = trial_candidates(answer, against, auto, world.size, fixed)
    if auto.measure is None:
        against = with_rivals(against, candidates, task.steps, doubt_of(cluster))
    choices = candidates if auto.measure else against.choices
    plans = [
        make_saved_plan(choice.draft, looked, model=model, cluster=str(cluster), prediction=choice.prediction).to_json()
        for choice in choices
    ]
    first = f"auto: planned for {task.usual}, as a run without a strategy"
    lines = [first, *_lines(answer, against), *_skipped(task, fixed)]
    measure = against.measure if auto.measure is None else auto.measure
    return {"plans": plans, "lines": lines, "measure": measure}


def _skipped(task: PlanTask, fixed: Mapping[str, object]) -> Iterator[str]:
    """Yield lines about the means that plans of this task must do without."""
    if task.own_batches:
        yield "auto: stages and splits skipped: each rank keeps its own batch; engine.loader() allows them"
    if "micro_batches" in fixed:
        yield "auto: micro-batches skipped: batch norm or experts depend on whole batches"


def trial_candidates(
    answer: SearchResult, against: DefaultComparison, auto: Auto, ranks: int, fixed: Mapping[str, object]
) -> list[PlanChoice]:
    """Return the plans to measure, ``auto.trials`` in all: what the comparison takes, the best of each mesh, others."""
    others = [*answer.best, *answer.as_quick, *_neighbours(answer, auto, ranks, fixed)]
    return _different(_once([*against.choices, *others]), auto.trials)


def _once(choices: Iterable[PlanChoice]) -> list[PlanChoice]:
    return list({choice.draft: choice for choice in choices}.values())


def _different(best: Sequence[PlanChoice], count: int) -> list[PlanChoice]:
    """Return the best plan, then the best of each other mesh, then the rest, ``count`` in all.

    Prediction errors correlate within a mesh, so trials on different meshes tell more.
    """
    first: dict[tuple[int, ...], PlanChoice] = {}
    for choice in best:
        first.setdefault((choice.draft.replicate, choice.draft.stage, choice.draft.split), choice)
    ahead = [choice for choice in first.values() if choice.seconds < HOPELESS * best[0].seconds]
    return [*ahead, *(choice for choice in best if choice not in ahead)][:count]


def _neighbours(answer: SearchResult, auto: Auto, ranks: int, fixed: Mapping[str, object]) -> list[PlanChoice]:
    """Return the neighbors of the best plan that are allowed to run; on one device, there are no other plans to try."""
    from echelon.planner.plan_search.search_result import PlanChoice

    def may_run(draft: Draft) -> bool:
        means = {"amp": draft.amp, "fp16_allreduce": draft.comm_dtype, draft.approximate: draft.approximate}
        allowed = all(name in auto.allow for name, value in means.items() if value)
        return allowed and draft.ranks == ranks and all(getattr(draft, name) == value for name, value in fixed.items())

    known = {choice.draft for choice in answer.best}
    found = [
        PlanChoice(each.draft, each.prediction) for each in answer.rejected if each.prediction and may_run(each.draft)
    ]
    fitting = [choice for choice in found if choice.prediction.fits and choice.draft not in known]
    return sorted(fitting, key=lambda choice: choice.seconds)


def _fixed(model: nn.Module, own_batches: bool) -> dict[str, object]:
    """Return the fixed fields of a draft: no stages or splits with own batches, no micro-batches if results change."""
    axes: dict[str, object] = {"stage": 1, "split": 1} if own_batches else {}
    return axes | ({"micro_batches": 1} if _looks_over_batch(model) else {})


def _looks_over_batch(model: nn.Module) -> bool:
    """Return True if results depend on the micro-batch size: through batch norm's statistics or experts' capacity."""
    return bool(batch_norm_names(model)) or any(isinstance(module, MoE) for module in model.modules())


def from_first(message: Any, world: World) -> Any:
    """Broadcast rank 0's ``message`` and return it on every rank."""
    if world.control is None:
        return message
    data = json_to_tensor(message if world.rank == 0 else None)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, 0, group=world.control)
    data = data if world.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=world.control)
    return tensor_to_json(data)


def _cluster(auto: Auto, world: World) -> Any:
    from echelon.planner.cluster.cluster import Cluster

    one_host = world.place.one_host
    cluster = Cluster.parse(auto.cluster or (f"{world.size}xhere" if one_host else "here"))
    if cluster.size != world.size:
        raise UsageError(
            f"Auto(cluster='{auto.cluster}') has {cluster.size} devices, and this job has {world.size} processes; "
            f"describe {world.size}, or start {cluster.size}"
        )
    return cluster


def _optimizer(optimizers: Mapping[str, torch.optim.Optimizer], model: nn.Module, usual: DefaultRun) -> dict[str, Any]:
    """Return the optimizer's name and a system with its state bytes; Adam's if they cannot be measured."""
    from echelon.planner.cost.system import ECHELON, STATE
    from echelon.planner.profiling.optimizer_state import optimizer_name, with_state_of

    name = optimizer_name(optimizers)
    try:
        system = with_state_of(ECHELON, optimizers, model)
    except UsageError:
        system = dataclasses.replace(ECHELON, state={**STATE, name: STATE["adam"]})
    return {"optimizer": name, "system": usual.runtime(system)}


def _lines(answer: SearchResult, against: DefaultComparison) -> Iterator[str]:
    best = answer.best[0]
    full = best.prediction.fullest
    yield (
        f"auto: {best.draft}: predicted {duration(best.seconds)} a step and {size(full.total)} on a device, the best "
        f"of {answer.considered} plans ({answer.seconds:.1f} s)"
    )
    if against.line:
        yield f"auto: {against.line}"
    if len(answer.best) > 1:
        second = answer.best[1]
        yield f"auto: the next best, {second.draft}, would take {duration(second.seconds)} ({_more(second, best)})"
    for each in answer.would_help:
        yield f"auto: {each}"
    for note in answer.notes:
        yield f"auto: {note}"


def _more(second: PlanChoice, best: PlanChoice) -> str:
    return f"{second.seconds / best.seconds - 1:+.0%}"


def _nothing_fits(answer: SearchResult) -> str:
    near = f"; the nearest is {answer.nearest.draft}: {answer.nearest.reason}" if answer.nearest else ""
    return f"auto found no plan that fits{near}"
