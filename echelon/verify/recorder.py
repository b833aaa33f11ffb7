"""In the script's own run: every rank trains as its plan says, and what it does is written down."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from echelon.data import Loader
from echelon.errors import DataError
from echelon.nn.moe import MoE
from echelon.plan.make import batch_norm_names
from echelon.verify.batches import describe, write_batch
from echelon.verify.drift import drifted
from echelon.verify.events import Intake, follow
from echelon.verify.expected import expected
from echelon.verify.follow import Listener
from echelon.verify.outputs import Outputs, added_up
from echelon.verify.question import Question, leave
from echelon.verify.witness import INITIAL, Witness, gathered, mean_loss

if TYPE_CHECKING:
    from echelon.verify.engine import Witnessed


BOTH = "the script trains by engine.step() and by engine.backward(); verify follows one of the two: verify them apart"


class Recorder(Witness):
    """On every rank of the script's own plan."""

    def __init__(self, question: Question, silenced: list[str]) -> None:
        self.question, self._silenced = question, silenced
        self._calls: list[list[list[float]]] = []  # for each pass, which replica counted for how much
        self._losses: list[list[float]] = []  # of the passes of the update at hand: loss and samples
        self._steps: list[dict[str, Any]] = []
        self._rates: dict[str, float] = {}
        self._options: dict[int, list[dict[str, Any]]] = {}  # of each update that took place
        self._outputs: Outputs | None = None
        self._found: dict[str, Any] = {}
        self._loop = Listener(question)
        self._listening = contextlib.ExitStack()  # to a loop of its own, from the beginning to the first update
        self._intake: Intake | None = None
        self._own_loop, self._added, self._updated = False, 0.0, ""
        self._shares: list[list[float]] = []  # of the replicas: rows of the last batch, and samples they count for

    # ---- a loop of its own ----

    def begin(self, engine: Witnessed) -> None:
        if engine.allows_own_loop:
            self._store(engine, INITIAL, engine.whole_weights())
            self._outputs = Outputs(engine.model, engine.counts_outputs)
            self._listening.enter_context(self._outputs.listening())
            self._intake = Intake(self._loop, self.question.wide)
            self._intake.open()

    def loader(self, loader: Loader) -> Loader:
        return follow(loader, self._loop, self.question.wide)

    def backward(self, engine: Witnessed, loss: Tensor) -> Tensor:
        if self._calls:
            self.question.refuse(BOTH)
        self._own_loop = True
        self._loop.write(engine.replica if engine.speaks else None)
        self._added += float(loss.detach())
        return loss

    def update(self, engine: Witnessed, optimizer: str | None, samples: float | None) -> None:
        own = [self._added, 1.0 if samples is None else samples, self._loop.rows]
        known = [one for one in gathered(engine, own if engine.speaks else None) if one]
        if engine.plan.reduce_op == "sum":
            known = [[sum(loss for loss, _, _ in known), 1.0, None]]
        self._losses = [mean_loss([one[:2] for one in known])]
        self._updated = "" if optimizer is None or len(engine.optimizers) == 1 else optimizer
        self._shares = [[rows, count] for _, count, rows in known]
        self._added = 0.0
        self._listening.close()
        if self._outputs is not None:
            self._found, self._outputs = added_up(gathered(engine, self._outputs.found())), None

    def _no_loop_of_its_own(self) -> None:
        if self._own_loop:
            self.question.refuse(BOTH)
        self._listening.close()
        self._loop.stop()
        if self._intake is not None:
            self._intake.close()
        self._intake = None

    # ---- engine.step ----

    def batch(self, engine: Witnessed, inputs: Any, count: float) -> tuple[Any, float]:
        if not self._calls:
            self._no_loop_of_its_own()
            self._store(engine, INITIAL, engine.whole_weights())
            self._outputs = Outputs(engine.model, engine.counts_outputs)
        try:
            describe(inputs)
        except DataError as error:
            self.question.refuse(str(error))
        at, mine = len(self._calls), engine.replica
        if engine.speaks and count:
            write_batch(self.question.file(f"batch-{at}-{mine}.safetensors"), inputs)
        self._calls.append(sorted(one for one in gathered(engine, [mine, count] if engine.speaks else None) if one))
        return inputs, count

    def listening(self) -> AbstractContextManager[None]:
        return self._outputs.listening() if self._outputs else contextlib.nullcontext()

    def loss(self, engine: Witnessed, loss: Tensor, count: float) -> None:
        own = [float(loss), count if engine.speaks else 0.0]
        known = gathered(engine, own) if engine.steps_alone else [[own[0], sum(c for _, c in self._calls[-1])]]
        self._losses.append(mean_loss(known))
        if self._outputs is not None:
            self._found = added_up(gathered(engine, self._outputs.found()))
            self._outputs = None

    # ---- both ----

    def gradients(self, engine: Witnessed, optimizers: Sequence[str]) -> bool:
        self._options[len(self._steps)] = [_numbers(group) for group in engine.groups()]
        self._store(engine, f"gradients-{len(self._steps)}.safetensors", engine.whole_gradients(optimizers))
        return True

    def rate(self, step: int, factor: float) -> float:
        self._rates[str(step)] = factor
        return factor

    def applied(self, engine: Witnessed) -> None:
        self._store(engine, f"weights-{len(self._steps)}.safetensors", engine.whole_weights())
        told = {"optimizer": self._updated, "shares": self._shares, "drift": self._drift(engine)}
        self._steps.append({"loss": mean_loss(self._losses)[0], **told})
        self._losses = []
        if engine.world.rank == 0:
            self.question.note("steps", len(self._steps))
        if len(self._steps) == self.question.steps:
            self._end(engine)

    def _drift(self, engine: Witnessed) -> list[Any] | None:
        """Where ranks that hold the same weights hold different ones after this update."""
        if engine.steps_alone:  # as they should
            return None
        return drifted(gathered(engine, engine.held_sums()), len(self._steps) + 1)

    def _store(self, engine: Witnessed, name: str, tensors: dict[str, Tensor]) -> None:
        if engine.world.rank == 0:
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, self.question.file(name))

    def _end(self, engine: Witnessed) -> None:
        plan, model = engine.plan, engine.model
        looks_around = bool(batch_norm_names(model)) or any(isinstance(module, MoE) for module in model.modules())
        found = {
            "steps": self._steps,
            "calls": self._calls,
            "rates": self._rates,
            "options": [self._options.get(at, []) for at in range(len(self._steps))],
            "outputs": self._found,
            "silenced": self._silenced,
            "expected": [dataclasses.asdict(one) for one in expected(plan, model, len(self._steps))],
            "mesh": plan.mesh,
            "ranks": plan.ranks,
            "replicas": plan.replicas,
            "apart": plan.reduce_op == "sum",
            "own_loop": self._own_loop,
            "events": self._loop.kinds,
            "stray": sorted(self._loop.stray),
            "micro": plan.pipeline.micro_batches if plan.pipeline and looks_around else 1,
        }
        if engine.world.rank == 0:
            self.question.answer(found)
        if engine.world.control is not None:
            dist.barrier(engine.world.control)  # whoever leaves first hangs up on the others
        leave()


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """What a schedule may change."""
    return {name: value for name, value in group.items() if type(value) in (int, float) and name != "initial_lr"}
