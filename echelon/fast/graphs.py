"""CUDA graphs: where the host is slower than the device, forward and backward are launched as one.

The first steps are watched: how long the host takes to hand forward and backward to the device, and how long the device
takes for them. Where that is nearly the same, the device waits for the host, and a step is captured, after it has been
rehearsed. A graph that does something else (see Proof) or turns out no quicker is dropped. What is captured is a fixed
program (see Signature, Readings), and a step that differs from it runs as it is written; where all steps do from then
on, all begins again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.fast.captured import Backward, Captured, Rehearsal, Run, has_room
from echelon.fast.chosen import WHOLE, Chosen
from echelon.fast.compiled import Say
from echelon.fast.left_behind import has_gradient_hooks, left_behind, look_at
from echelon.fast.proof import Proof
from echelon.fast.readings import Readings
from echelon.fast.signature import draws, is_plain
from echelon.plan import Plan

SETTLING = 6  #: steps that compile, allocate and choose kernels
WATCHED = 6  #: steps that are timed after those
REHEARSED = 2
PATIENCE = 50  #: steps in a row that do not fit, after which a graph is given up
TRIES = 3  #: graphs, one after another
HELD_UP = 0.85  #: the host's part of a step's time, from which on the device is taken to wait for it


class Graphs:
    """Watches steps, captures one, and replays it. Each phase runs a step and says when the next one begins."""

    def __init__(self, plan: Plan, model: nn.Module, loss: Callable[..., Any] | None, say: Say) -> None:
        self._model, self._loss, self._say, self._merges = model, loss, say, plan.gradient_merge > 1
        self._phase: Callable[[Any, Run], tuple[Tensor, Backward]] | None = self._settle
        self._steps = self._misses = 0
        self._tries = TRIES
        self._advice = _advice(plan.fast)
        self._plain_laps: list[_Lap] = []
        self._laps: list[_Lap] = []
        self._rehearsal = Rehearsal()
        self._readings: Readings | None = None
        self._device = next(model.parameters()).device
        self._captured: Captured | None = None  # and proved
        self._proof: Proof | None = None

    def run(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        if self._captured is not None:
            if self._fits(self._captured, batch):
                return self._replay(self._captured, batch)
            self._miss()
            return plain(batch)
        return plain(batch) if self._phase is None else self._phase(batch, plain)

    def _settle(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        self._steps += 1
        if self._steps == SETTLING:
            self._phase = self._watch
        return plain(batch)

    def _watch(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        if len(self._plain_laps) < WATCHED:
            return _timed(plain, batch, self._plain_laps)
        if not self._plain_laps[-1].is_over():
            return plain(batch)
        held_up = _host(self._plain_laps) >= HELD_UP * _device(self._plain_laps)
        self._phase, self._steps = self._examine if held_up else None, 0
        return plain(batch)

    def _examine(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        """A step as it is written, and what speaks against a graph of it."""
        self._phase = self._rehearse
        self._readings = Readings(self._model, self._loss)
        before, modules = draws(), look_at(self._model)
        taken = plain(batch)
        left = left_behind(modules, look_at(self._model))
        if not is_plain(batch):
            self._leave_out("batches hold more than tensors")
        elif before != draws():
            self._leave_out("forward draws random numbers on the host")
        elif left is not None:
            self._leave_out(f"forward sets {left} of the model, which a graph would not")
        elif has_gradient_hooks(self._model):
            self._leave_out("hooks on gradients are Python, which a graph would not run")
        elif self._readings.too_many:
            self._leave_out("forward and loss can read more Python values than could be watched in every step")
        elif not has_room(self._device):
            self._leave_out("a graph keeps its memory, and no step would fit beside it")
        return taken

    def _rehearse(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        self._steps += 1
        if self._steps <= REHEARSED:
            return self._rehearsal.run(batch, plain)
        self._phase = None
        assert self._readings is not None
        changed = self._readings.changed()
        if self._rehearsal.waits:
            self._leave_out("forward or backward waits for the device (reads a value of it)")
        elif changed is not None:
            self._leave_out(f"forward or loss may read {changed}, which changes from step to step")
        else:
            return self._capture(batch, plain, self._readings)
        return plain(batch)

    def _capture(self, batch: Any, plain: Run, readings: Readings) -> tuple[Tensor, Backward]:
        captured = Captured(self._model, batch, readings, plain, self._merges)
        try:
            captured.capture()
        except Exception as error:
            self._leave_out(f"a step could not be captured: {str(error).strip().partition(chr(10))[0]}")
            return plain(batch)
        self._proof = Proof(self._model, captured, self._rehearsal.weight)
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
        self._captured = proof.captured
        return self.run(batch, plain)

    def _fits(self, captured: Captured, batch: Any) -> bool:
        fits = captured.fits(batch)
        self._misses = 0 if fits else self._misses + 1
        return fits

    def _miss(self) -> None:
        """Where no step has fitted for long, memory is given back, and another step is captured."""
        if self._misses < PATIENCE:
            return
        self._captured = self._proof = None
        self._plain_laps, self._laps = [], []
        self._tries -= 1
        self._phase, self._steps, self._misses = self._settle if self._tries else None, 0, 0
        self._say(f"fast: no step has been like the captured one for {PATIENCE} steps, so the CUDA graph is given up")

    def _replay(self, captured: Captured, batch: Any) -> tuple[Tensor, Backward]:
        captured.take(batch)
        if not self._plain_laps:
            return captured.loss, captured.replay
        if len(self._laps) < WATCHED:
            return _timed(lambda _: (captured.loss, captured.replay), batch, self._laps)
        if self._laps[-1].is_over():
            self._judge()
        return captured.loss, captured.replay

    def _judge(self) -> None:
        """Keep the graph if it is quicker than the steps before it."""
        before, after = (1e3 * _device(laps) for laps in (self._plain_laps, self._laps))
        self._plain_laps, self._laps = [], []
        if after < before:
            self._say(
                f"fast: forward and backward are one CUDA graph now: {after:.1f} ms where they took {before:.1f}; "
                "Fast(graphs=False) switches it off"
            )
        else:
            self._captured = None
            self._leave_out(f"as a graph, forward and backward take {after:.1f} ms where they took {before:.1f}")

    def _leave_out(self, reason: str) -> None:
        self._phase = None
        self._say(f"fast: CUDA graphs left out: {reason}{self._advice}")


def _advice(chosen: Chosen) -> str:
    """Each compiled block is called from Python; a whole leaves less to the host."""
    blocks = chosen.compiled not in ((), (WHOLE,))
    return "; the host holds up the step: Fast(compile='whole') starts later and may be quicker" if blocks else ""


class _Lap:
    """One forward and backward pass: seconds until the host had handed it over, and until the device had done it."""

    def __init__(self) -> None:
        self.host = 0.0
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begin.record()
        self._since = time.perf_counter()

    def end(self) -> None:
        self.host = time.perf_counter() - self._since
        self._end.record()

    def is_over(self) -> bool:
        return self.host > 0 and bool(self._end.query())  # type: ignore[no-untyped-call]

    def device(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


def _timed(run: Run, batch: Any, laps: list[_Lap]) -> tuple[Tensor, Backward]:
    lap = _Lap()
    laps.append(lap)
    loss, inner = run(batch)

    def backward(weight: Tensor | float) -> None:
        inner(weight)
        lap.end()

    return loss, backward


def _host(laps: Sequence[_Lap]) -> float:
    return statistics.median(lap.host for lap in laps)


def _device(laps: Sequence[_Lap]) -> float:
    return statistics.median(lap.device() for lap in laps)
