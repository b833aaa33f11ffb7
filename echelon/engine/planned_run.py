"""``PlannedRun``: a run whose plan is known on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.replicas import broadcast_state
from echelon.distributed.world import seed_for_rank
from echelon.engine.collective_calls import check_same_plan
from echelon.engine.consistency import BatchChecks
from echelon.engine.loaders import LoaderFactory
from echelon.engine.nonfinite import refuse_combination
from echelon.engine.preconditions import refuse_partial_gradients
from echelon.engine.replace_optimizers import replaced_decay
from echelon.engine.run_context import RunContext
from echelon.optim.grad_scaler import check_precision
from echelon.parallel.data.batch_rows import BatchRows
from echelon.parallel.kv_cache import CacheSwitch
from echelon.parallel.objective import Objective
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan
from echelon.strategy.annotations.annotate import ModelMarks

if TYPE_CHECKING:
    from echelon.engine.parallelize import ParallelModel


class PlannedRun:
    """One rank's place in a plan: the mesh, which batches it reads, the loss function and the loaders.

    All ranks create it together: plans are compared, and rank 0's weights are broadcast.

    plan:       plan of the run; that of a pipeline has no stages before its first batch
    marks:      marks of the model
    saved_plan: plan from ``auto`` or a file that ``plan`` was made from; None otherwise
    """

    def __init__(self, run: RunContext, plan: Plan, marks: ModelMarks, saved_plan: SavedPlan | None = None) -> None:
        self.run, self.plan, self.marks, self.saved_plan = run, plan, marks, saved_plan
        check_precision(plan.amp, run.world.device)
        refuse_combination(run.on_nonfinite, plan, run)
        if run.world.control is not None:
            run.metrics.terms = check_same_plan(plan, run.world.control, run.on_nonfinite, run.metrics.terms)
            run.checker.open()
            broadcast_state(run.model, without=run.initial)
            run.initial.agree(run.world.control)
        if run.metrics.has_norms:
            refuse_partial_gradients(plan, "Log(grad_norm=True)")
        self.grid = MeshGroups(plan.mesh, plan.order, run.world.mesh_rank, run.checker.groups)
        self.world = run.world
        if run.world.mesh_size > 1:
            self.world = run.world.reading(self.grid.index(*plan.data_axes), plan.replicas)
        shares = run.world.mesh_size > 1 and not plan.batch_per_split_rank
        #: index of this rank's RNG stream; ranks that share a batch have the same one, so their dropout is equal
        self.stream = self.grid.ranks("split")[0] if shares else run.world.rank
        self.objective = Objective(run.model, run.loss, plan.amp, run.world.device)
        self.loaders = LoaderFactory(run, self.world, plan, self.grid, saved_plan)
        self.batches = BatchChecks(plan, self.grid, self.world.data_rank, self.loaders.is_fed)
        self.rows = BatchRows(plan, self.grid, served=run.world.mesh_size < run.world.size)
        self.caches = CacheSwitch(run.model, plan)
        self.notices = [*replaced_decay(plan, run.optimizers), *self.caches.notices]  #: lines for the startup log
        if saved_plan is not None and saved_plan.predicted is not None:
            held = sum(value.nbytes for value in run.model.parameters())
            predicted = saved_plan.predicted
            here = predicted.memory[self.grid.coords["stage"]]
            run.metrics.note_prediction(predicted.seconds, here, held, graphs=plan.fast.graphs)

    def is_complete(self, batch: Any) -> bool:
        """Return True if the model can be parallelized: a pipeline is partitioned by tracing a batch."""
        return batch is not None or self.plan.mesh.get("stage", 1) == 1

    def loss_ranks(self, parts: ParallelModel) -> list[int] | None:
        """Return the ranks that share this rank's loss; None if it steps alone."""
        stage = ["stage"] if parts.plan.stages else []
        return None if parts.group is None else self.grid.ranks(*parts.plan.data_axes, *stage)

    def seed(self) -> None:
        """Seed this rank's RNG stream."""
        seed_for_rank(self.world.seed, self.stream)
