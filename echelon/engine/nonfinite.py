"""``NonfiniteSteps``: what a run does about a step whose loss or gradients are NaN or infinite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.base.console import say as say_here
from echelon.base.errors import LossError, UsageError
from echelon.base.formatting import things
from echelon.distributed.collectives import gather_json
from echelon.engine.on_nonfinite import OnNonfinite
from echelon.observability.metrics.finite_loss import batches_text, ranks_text
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.engine.forward_backward import StepLoss
    from echelon.engine.parallelize import ParallelModel
    from echelon.engine.planned_run import PlannedRun
    from echelon.engine.resume import StateRestorer
    from echelon.engine.run_context import RunContext

REMEDY = "lower the learning rate, clip gradients, or look at that batch"


def refuse_combination(policy: OnNonfinite, plan: Plan, run: RunContext) -> None:
    """Raise ``UsageError`` if steps of this plan cannot be skipped or taken back."""
    if policy.action == "stop":
        return
    why = None
    if run.backend.pushes:
        why = "servers apply the push of each worker by itself, and refuse one that is not finite"
    elif plan.low_memory is not None:
        why = "low_memory applies each gradient while backward runs, before all are known"
    elif policy.action == "rollback":
        why = _refused_rollback(plan, run)
    if why is not None:
        raise UsageError(f"on_nonfinite='{policy.action}': {why}; use on_nonfinite='stop', or change that")


def _refused_rollback(plan: Plan, run: RunContext) -> str | None:
    settings = run.checkpoints.settings
    if settings is None or not settings.every or not settings.resume:
        return "there are no checkpoints to go back to without checkpoint=Checkpoint(dir=..., every=...) and its resume"
    if plan.local is not None:
        return "ranks of localsgd step alone, and one cannot go back without the others"
    if plan.gradient_merge > 1:
        return f"which of {plan.gradient_merge} merged batches has caused it is not known"
    return None


class NonfiniteSteps:
    """Skips or takes back the steps of one engine that are not finite. All ranks that share a loss agree on them."""

    def __init__(self, planned: PlannedRun, parts: ParallelModel, restorer: StateRestorer) -> None:
        self._planned, self._run, self._parts, self._restorer = planned, planned.run, parts, restorer
        self._policy = planned.run.on_nonfinite
        self._goes_back = self._policy.action == "rollback"
        self._buffers = BufferCopies(parts.local_state.model) if self._policy.action == "skip" else None
        self._in_a_row, self._target = 0, -1
        parts.gradients.checks_finite = self._policy.action != "stop"

    def check_loop(self, has_own_loop: bool) -> None:
        """Raise ``UsageError`` if batches do not come from the one loader that a rollback can reposition."""
        if not self._goes_back:
            return
        loaders = self._run.positions.count
        if has_own_loop or loaders != 1:
            found = "engine.update()" if has_own_loop else f"{loaders} loaders"
            raise UsageError(
                f"on_nonfinite='rollback' with {found}: it repositions the one engine.loader() whose batches "
                "engine.step() gets; train so, or use on_nonfinite='skip'"
            )

    def keep(self) -> None:
        """Copy the buffers that the last step has changed, because a skipped step must not change them."""
        if self._buffers is not None:
            self._buffers.refresh()

    def skip(self, step: int, step_loss: StepLoss) -> bool:
        """Return True if nothing of this step is applied; raise ``LossError`` after too many in a row."""
        if self._buffers is None:
            return False
        if not self._parts.gradients.spoiled:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        cause, limit = self._cause(step_loss), self._policy.limit
        if self._in_a_row > limit:
            raise LossError(f"step {step}: {cause}; {limit} steps before it were skipped for the same reason; {REMEDY}")
        self._parts.scaler.skipped += not self._parts.scaler.active
        self._say(f"step {step} is skipped: {cause} ({self._in_a_row} in a row; the run stops after {limit})")
        self._buffers.restore()
        return True

    def go_back(self, step: int, step_loss: StepLoss) -> bool:
        """Return True if the step is not finite and the run went back; raise ``LossError`` if it cannot."""
        if not (self._goes_back and self._parts.gradients.spoiled):
            return False
        loader, cause = self._run.positions.only, self._cause(step_loss)
        if loader is None or loader.latest is None:
            raise LossError(f"step {step}: {cause}; the batch is not from engine.loader() and cannot be left out")
        loader.leave_out(loader.latest)
        found = self._restorer.go_back()
        if found is None:
            raise LossError(f"step {step}: {cause}; there is no checkpoint before it to go back to; {REMEDY}")
        self._in_a_row = self._in_a_row + 1 if found == self._target else 1
        self._target, limit = found, self._policy.limit
        if self._in_a_row > limit:
            raise LossError(f"step {step}: {cause}; the run went back to step {found} {limit} times already; {REMEDY}")
        self._run.progress.resume_at(found)
        self._say(f"step {step}: {cause}; went back to step {found}, and goes on without that batch")
        return True

    def _cause(self, step_loss: StepLoss) -> str:
        """Return what is not finite and in which batch; all ranks call it together, unless each steps alone."""
        batch = self._planned.loaders.batch_text()
        own = [float(step_loss.local), self._bad_gradient(), batch and batch()]
        group, rank = self._run.world.control, self._run.world.rank
        everyone: dict[int, Any] = {rank: own}
        if group is not None and self._parts.local is None:
            everyone = dict(enumerate(gather_json(own, group)))
        merged = self._planned.plan.gradient_merge - 1
        return cause(everyone) + (f", or of the {things(merged, 'batch')} merged before" if merged else "")

    def _bad_gradient(self) -> str | None:
        parameters = self._parts.local_state.parameters.items()
        return next((name for name, p in parameters if p.grad is not None and not _is_finite(p.grad)), None)

    def _say(self, line: str) -> None:
        rank = self._run.world.rank
        if self._parts.local is not None and rank != 0:  # this rank steps alone, and rank 0 does not know of it
            say_here(f"rank {rank}: {line}")
        self._run.say(line, "warning")


def cause(everyone: dict[int, Any]) -> str:
    """Return what is not finite, on which ranks, in which batches.

    everyone: for each rank its loss, the first parameter with a bad gradient, and its batch; None: unknown
    """
    bad = [rank for rank, (loss, _, _) in everyone.items() if not _is_finite(torch.tensor(loss))]
    if bad:
        what = f"the loss is {everyone[bad[0]][0]} on {ranks_text(bad)}"
    else:
        name = next((name for _, name, _ in everyone.values() if name is not None), None)
        what = f"the gradient of '{name}' is not finite" if name else "a gradient is not finite"
    return what + batches_text({rank: everyone[rank][2] for rank in bad or everyone})


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.coalesce().values() if value.is_sparse else value).all())


class BufferCopies:
    """Copies of a model's buffers, such as batch-norm statistics, from before a step.

    All are copied once, and later those again whose version has changed, so a step without changes copies nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._changing: set[str] = set()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the buffers that have changed."""
        for name, buffer in self._model.named_buffers():
            known = self._kept.get(name)
            if known is not None and known[0] is buffer:
                if known[1] != buffer._version or name in self._changing:
                    self._changing.add(name)  # CUDA graphs change a buffer without a new version
                    known[2].copy_(buffer)
                    self._kept[name] = buffer, buffer._version, known[2]
                continue
            self._kept[name] = buffer, buffer._version, buffer.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers the values of the last ``refresh``."""
        for name, buffer in self._model.named_buffers():
            known = self._kept.get(name)
            if known is not None and (known[0] is not buffer or known[1] != buffer._version or name in self._changing):
                buffer.copy_(known[2])
