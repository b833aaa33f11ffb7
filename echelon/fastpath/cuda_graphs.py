"""Runs forward and backward as one CUDA graph if the host is slower than the device.

In these modules an eager step is a step without a graph, even if its blocks are compiled.

The first steps are timed. If the device finishes forward and backward as soon as the host has launched them, the step
is host-bound, and a step is captured after some warm-up steps. A graph with other results (see GraphValidation) or
without a gain in time (see GraphTimingComparison) is dropped. A graph is a fixed program (see StepSignature,
PythonGuards): a step that differs from it runs eagerly, and if no step fits for a long time, the graph is dropped and
another step is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from echelon.fastpath.compile import Say
from echelon.fastpath.cuda_graph_capture import (
    Backward,
    CapturedStep,
    Run,
    WarmupStep,
    draws,
    find_side_effect,
    has_gradient_hooks,
    has_room,
    is_plain,
    snapshot_attributes,
)
from echelon.fastpath.graph_validation import GraphValidation
from echelon.fastpath.guards import PythonGuards
from echelon.fastpath.pass_timing import EagerTiming, GraphTimingComparison
from echelon.plan import Plan
from echelon.strategy.fastpath_choice import WHOLE, FastPathChoice

WARM_UP = 6  #: first steps, which compile, allocate and choose kernels
REHEARSED = 2
PATIENCE = 50  #: consecutive steps that do not fit, after which a graph is dropped
TRIES = 3  #: number of graphs that are tried one after another


class CudaGraphRunner:
    """Times steps, captures one, and replays it. Each phase runs a step and sets the next phase when it is done."""

    def __init__(self, plan: Plan, model: nn.Module, loss: Callable[..., Any] | None, say: Say) -> None:
        self._model, self._loss, self._say, self._merges = model, loss, say, plan.gradient_merge > 1
        self._phase: Callable[[Any, Run], tuple[Tensor, Backward]] | None = self._warm_up
        self._steps = self._misses = 0
        self._tries = TRIES
        self._advice = _advice(plan.fast)
        self._watching: EagerTiming | None = None
        self._contest: GraphTimingComparison | None = None
        self._rehearsal = WarmupStep()
        self._readings: PythonGuards | None = None
        self._device = next(model.parameters()).device
        self._captured: CapturedStep | None = None  # set after validation
        self._proof: GraphValidation | None = None

    def run(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        if self._captured is not None:
            if self._fits(self._captured, batch):
                return self._replay(self._captured, batch, plain)
            self._miss()
            return plain(batch)
        return plain(batch) if self._phase is None else self._phase(batch, plain)

    def _warm_up(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        self._steps += 1
        if self._steps == WARM_UP:
            self._phase = self._watch
        return plain(batch)

    def _watch(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        self._watching = self._watching or EagerTiming()
        if not self._watching.is_full:
            return self._watching.run(batch, plain)
        if self._watching.is_over():
            self._phase, self._steps = self._examine if self._watching.is_host_bound() else None, 0
            self._watching = None
        return plain(batch)

    def _examine(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        """Run a step eagerly, and check for reasons against a graph of it."""
        self._phase = self._rehearse
        self._readings = PythonGuards(self._model, self._loss)
        before, modules = draws(), snapshot_attributes(self._model)
        taken = plain(batch)
        left = find_side_effect(modules, snapshot_attributes(self._model))
        if not is_plain(batch):
            self._leave_out("batches hold more than tensors")
        elif before != draws():
            self._leave_out("forward draws random numbers on the host")
        elif left is not None:
            self._leave_out(f"forward sets {left} of the model, which a graph would not")
        elif has_gradient_hooks(self._model):
            self._leave_out("hooks on gradients are Python, which a graph would not run")
        elif self._readings.too_many:
            self._leave_out("forward and loss can read more Python values than guards can check in every step")
        elif not has_room(self._device):
            self._leave_out("the memory of a graph would leave no room for an eager step")
        return taken

    def _rehearse(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        self._steps += 1
        if self._steps <= REHEARSED:
            return self._rehearsal.run(batch, plain)
        self._phase = None
        assert self._readings is not None
        changed = self._readings.changed()
        if self._rehearsal.waits and not self._rehearsal.claimed:
            self._rehearsal, self._phase, self._steps = WarmupStep(claimed=True), self._rehearse, 0
        elif self._rehearsal.waits:
            self._leave_out("forward or backward synchronizes with the device (reads a value of it)")
        elif changed is not None:
            self._leave_out(f"forward or loss may read {changed}, which changes from step to step")
        else:
            return self._capture(batch, plain, self._readings)
        return plain(batch)

    def _capture(self, batch: Any, plain: Run, readings: PythonGuards) -> tuple[Tensor, Backward]:
        captured = CapturedStep(self._model, batch, readings, plain, self._merges, self._rehearsal.claimed)
        try:
            captured.capture()
        except Exception as error:
            self._leave_out(f"a step could not be captured: {str(error).strip().partition(chr(10))[0]}")
            return plain(batch)
        self._proof = GraphValidation(self._model, captured, self._rehearsal.weight)
        self._phase = self._prove
        return self._prove(batch, plain)

    def _prove(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        assert self._proof is not None
        if not self._proof.is_over:
            if self._fits(self._proof.captured, batch):
                return self._proof.run(batch, lambda given: self._rehearsal.run(given, plain))
            self._miss()
            return plain(batch)
        proof, self._proof, self._phase = self._proof, None, None
        objection = proof.objection()
        if objection is not None:
            self._leave_out(objection)
            return plain(batch)
        self._captured, self._contest = proof.captured, GraphTimingComparison()
        return self.run(batch, plain)

    def _fits(self, captured: CapturedStep, batch: Any) -> bool:
        fits = captured.fits(batch)
        self._misses = 0 if fits else self._misses + 1
        return fits

    def _miss(self) -> None:
        """Drop the graph and its memory if no step has fitted for long; then another step is captured."""
        if self._misses < PATIENCE:
            return
        self._captured = self._proof = self._contest = None
        self._rehearsal = WarmupStep()
        self._tries -= 1
        self._phase, self._steps, self._misses = self._warm_up if self._tries else None, 0, 0
        self._say(f"fast: CUDA graph disabled: no step has matched the captured one for {PATIENCE} steps")

    def _replay(self, captured: CapturedStep, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        if self._contest is not None and not self._contest.is_full:
            return self._contest.run(batch, plain, captured.run)
        if self._contest is not None and self._contest.is_over():
            self._choose_faster(*(1e3 * seconds for seconds in self._contest.seconds()))
        return captured.run(batch)

    def _choose_faster(self, written: float, captured: float) -> None:
        """Keep the graph if it is faster, given the milliseconds of an eager and of a captured pass."""
        self._contest = None
        if captured < written:
            self._say(
                f"fast: forward and backward are one CUDA graph now: {captured:.1f} ms where they took {written:.1f}; "
                "Fast(graphs=False) switches it off"
            )
        else:
            self._captured = None
            self._say(
                f"fast: CUDA graphs disabled: as a graph, forward and backward take {captured:.1f} ms where they take "
                f"{written:.1f}"
            )

    def _leave_out(self, reason: str) -> None:
        self._phase = None
        self._say(f"fast: CUDA graphs disabled: {reason}{self._advice}")


def _advice(chosen: FastPathChoice) -> str:
    """Return advice to compile the whole model: each compiled block is called from Python, which costs host time."""
    blocks = chosen.compiled not in ((), (WHOLE,))
    return "; the host limits the step: Fast(compile='whole') starts later and may be quicker" if blocks else ""
