"""First run of ``echelon verify``: every rank trains by the script's own plan, and its results are written to disk."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from echelon.base.errors import DataError
from echelon.data import Loader
from echelon.nn.moe import MoE
from echelon.parallel.data.global_loss import GlobalLoss, PipelineGlobalLoss
from echelon.plan.batch_norms import batch_norm_names
from echelon.tools.verify.batches import describe, write_batch
from echelon.tools.verify.denominators import denominators
from echelon.tools.verify.expected_differences import expected
from echelon.tools.verify.loop_events import LoopInputMode, RandomDrawMode, follow
from echelon.tools.verify.loop_replay import LoopRecorder
from echelon.tools.verify.module_outputs import ModuleOutputSums, added_up
from echelon.tools.verify.observer import INITIAL, VerifyObserver, gather_from_ranks, mean_loss, share
from echelon.tools.verify.random_draws import DrawWriter, write_draws
from echelon.tools.verify.replica_drift import find_drift
from echelon.tools.verify.samples import SampleWriter
from echelon.tools.verify.unsharded_data import ALL_OF_IT
from echelon.tools.verify.verify_request import VerifyRequest, leave

if TYPE_CHECKING:
    from echelon.distributed.world import World
    from echelon.tools.verify.verify_engine import VerifyEngine


BOTH = "the script trains by engine.step() and by engine.backward(); verify follows one of the two: verify them apart"


class VerifyRecorder(VerifyObserver):
    """The observer on every rank of the script's own plan."""

    def __init__(self, question: VerifyRequest, silenced: list[str]) -> None:
        self.question, self._silenced = question, silenced
        self._calls: list[list[list[float]]] = []  # for each pass: replica, samples, True if the script gave samples=
        self._losses: list[list[float]] = []  # (loss, samples) of each pass of the current update
        self._steps: list[dict[str, Any]] = []
        self._rates: dict[str, float] = {}
        self._options: dict[int, list[dict[str, Any]]] = {}  # optimizer options of each update that was not skipped
        self._outputs: ModuleOutputSums | None = None
        self._found: dict[str, Any] = {}
        self._loop = LoopRecorder(question)
        self._listening = contextlib.ExitStack()  # output hooks in a custom loop, from the start to the first update
        self._intake: LoopInputMode | None = None
        self._own_loop, self._added, self._updated = False, 0.0, ""
        self._marks: list[int] = []  # custom loop: number of events before each pass
        self._updated_at: list[int] = []  # custom loop: number of passes before each update
        self._loaders, self._draws = 0, DrawWriter()
        self._counts: dict[str, float] = {}  # possible denominators of the current batch's loss
        self._passes: list[list[dict[str, Any]]] = []  # for each pass of the current update: the replicas' shares
        self._shares: list[list[float]] = []  # for each replica: rows of the last batch, and samples they count for

    # ---- custom loop ----

    def begin(self, engine: VerifyEngine) -> None:
        if engine.allows_own_loop:
            self._store(engine, INITIAL, engine.whole_weights())
            self._outputs = ModuleOutputSums(engine.model, engine.counts_outputs)
            self._listening.enter_context(self._outputs.listening())
            self._intake = LoopInputMode(self._loop, self.question.wide)
            self._intake.open()

    def loader(self, world: World, loader: Loader) -> Loader:
        self._loaders += 1
        samples = SampleWriter(self.question, self._loaders, world.data_rank)
        return follow(loader, self._loop, self.question.wide, samples)

    def backward(self, engine: VerifyEngine, loss: Tensor) -> Tensor:
        if self._calls:
            self.question.refuse(BOTH)
        self._own_loop = True
        self._loop.write(engine.replica if engine.contributes else None)
        self._added += float(loss.detach())
        self._marks.append(len(self._loop.kinds))
        return loss

    def update(self, engine: VerifyEngine, optimizer: str | None, samples: float | None) -> None:
        own = [self._added, 1.0 if samples is None else samples, self._loop.rows, self._loop.counts]
        known = [one for one in gather_from_ranks(engine, own if engine.contributes else None) if one]
        self._passes = [[share(loss, count, counts) for loss, count, _, counts in known]]
        if engine.plan.reduce_op == "sum":
            known = [[sum(loss for loss, *_ in known), 1.0, None, {}]]
        self._losses = [mean_loss([one[:2] for one in known])]
        self._updated = "" if optimizer is None or len(engine.optimizers) == 1 else optimizer
        self._shares = [[rows, count] for _, count, rows, _ in known]
        self._added = 0.0
        self._updated_at.append(len(self._marks))
        self._listening.close()
        if self._outputs is not None:
            self._found, self._outputs = added_up(gather_from_ranks(engine, self._outputs.found())), None

    def _no_loop_of_its_own(self) -> None:
        if self._own_loop:
            self.question.refuse(BOTH)
        self._listening.close()
        self._loop.stop()
        if self._intake is not None:
            self._intake.close()
        self._intake = None

    # ---- engine.step ----

    def batch(self, engine: VerifyEngine, inputs: Any, count: float) -> tuple[Any, float]:
        if not self._calls:
            self._no_loop_of_its_own()
            self._store(engine, INITIAL, engine.whole_weights())
            self._outputs = ModuleOutputSums(engine.model, engine.counts_outputs)
        try:
            describe(inputs)
        except DataError as error:
            self.question.refuse(str(error))
        at, own_share = len(self._calls), engine.replica
        if engine.contributes and count:
            write_batch(self.question.file(f"batch-{at}-{own_share}.safetensors"), inputs)
        self._counts = denominators(inputs)
        own = [own_share, count, engine.weighed] if engine.contributes else None
        self._calls.append(sorted(one for one in gather_from_ranks(engine, own) if one))
        return inputs, count

    def listening(self, engine: VerifyEngine) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if self._outputs is not None:
            stack.enter_context(self._outputs.listening())
        if engine.shows_draws:
            stack.enter_context(RandomDrawMode(self._draws))
        return stack

    def loss(self, engine: VerifyEngine, global_loss: GlobalLoss | PipelineGlobalLoss, count: float) -> None:
        draws = self._draws.take()
        if engine.contributes and count:
            write_draws(self.question, len(self._calls) - 1, engine.replica, draws)
        own = [float(global_loss.loss), count if engine.contributes else 0.0]
        counted = count if isinstance(global_loss, PipelineGlobalLoss) else float(global_loss.count)
        own_share = (
            [engine.replica, share(float(global_loss.local), counted, self._counts)]
            if engine.contributes and count
            else None
        )
        shares = dict(each for each in gather_from_ranks(engine, own_share) if each)
        self._passes.append([shares[replica] for replica in sorted(shares)])
        known = (
            gather_from_ranks(engine, own) if engine.steps_alone else [[own[0], sum(c for _, c, _ in self._calls[-1])]]
        )
        self._losses.append(mean_loss(known))
        if self._outputs is not None:
            self._found = added_up(gather_from_ranks(engine, self._outputs.found()))
            self._outputs = None

    # ---- both ----

    def gradients(self, engine: VerifyEngine, optimizers: Sequence[str]) -> bool:
        self._options[len(self._steps)] = [_numbers(group) for group in engine.groups()]
        self._store(engine, f"gradients-{len(self._steps)}.safetensors", engine.whole_gradients(optimizers))
        return True

    def rate(self, step: int, factor: float) -> float:
        self._rates[str(step)] = factor
        return factor

    def applied(self, engine: VerifyEngine) -> None:
        self._store(engine, f"weights-{len(self._steps)}.safetensors", engine.whole_weights())
        figures = {"optimizer": self._updated, "shares": self._shares, "drift": self._drift(engine)}
        figures |= {"passes": self._passes}
        self._steps.append({"loss": mean_loss(self._losses)[0], **figures})
        self._losses, self._passes = [], []
        if engine.world.rank == 0:
            self.question.note("steps", len(self._steps))
        if len(self._steps) == self.question.steps:
            self._end(engine)

    def _drift(self, engine: VerifyEngine) -> list[Any] | None:
        """Return the first parameter that differs between ranks with the same weights; None if there is none."""
        if engine.steps_alone:  # weights differ between averaging rounds by design (LocalSGD)
            return None
        return find_drift(gather_from_ranks(engine, engine.held_sums()), len(self._steps) + 1)

    def _store(self, engine: VerifyEngine, name: str, tensors: dict[str, Tensor]) -> None:
        if engine.world.rank == 0:
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, self.question.file(name))

    def _reads_all(self, engine: VerifyEngine) -> bool:
        """Return True if every replica reads the same whole data set. All ranks call it."""
        own = self._loop.read_whole[0] if self._loop.read_whole else None
        read = dict(gather_from_ranks(engine, [engine.replica, own]))
        return len(read) > 1 and None not in read.values() and len(set(read.values())) == 1

    def _end(self, engine: VerifyEngine) -> None:
        plan, model = engine.plan, engine.model
        looks_around = bool(batch_norm_names(model)) or any(isinstance(module, MoE) for module in model.modules())
        found = {
            "steps": self._steps,
            "calls": self._calls,
            "rates": self._rates,
            "options": [self._options.get(at, []) for at in range(len(self._steps))],
            "outputs": self._found,
            "doubts": [ALL_OF_IT] if self._reads_all(engine) else [],
            "silenced": self._silenced,
            "expected": [dataclasses.asdict(one) for one in expected(plan, model, len(self._steps))],
            "mesh": plan.mesh,
            "ranks": plan.ranks,
            "replicas": plan.replicas,
            "gradient_merge": plan.gradient_merge,
            "apart": plan.reduce_op == "sum",
            "own_loop": self._own_loop,
            "events": self._loop.kinds,
            "marks": self._marks,
            "passes": [now - before for before, now in itertools.pairwise([0, *self._updated_at])],
            "stray": sorted(self._loop.stray | self._draws.stray),
            "micro": plan.pipeline.micro_batches if plan.pipeline and looks_around else 1,
        }
        if engine.world.rank == 0:
            self.question.answer(found)
        if engine.world.control is not None:
            dist.barrier(engine.world.control)  # a rank that exits early would close its connections to the others
        leave()


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numeric options of a parameter group, which a learning rate schedule may change."""
    return {name: value for name, value in group.items() if type(value) in (int, float) and name != "initial_lr"}
