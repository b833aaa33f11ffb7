"""Second run of ``echelon verify``: one process repeats the training of the ranks and measures the differences.

The process is given the initial weights of the ranks and the merged batches of all replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from echelon.api.distribute_args import DistributeArgs
from echelon.data import Loader
from echelon.parallel.data.global_loss import GlobalLoss, PipelineGlobalLoss
from echelon.strategy import Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.slices import Slices
from echelon.tools.verify.accumulation import Accumulation, find_accumulation
from echelon.tools.verify.batches import (
    WeightedBatch,
    WeightedBatches,
    are_same_batches,
    merge_replica_batches,
    on_device,
    read_batch,
)
from echelon.tools.verify.denominators import denominators
from echelon.tools.verify.differences import (
    gradient_differences,
    mostly,
    movement_differences,
    rounding,
    weight_differences,
)
from echelon.tools.verify.expected_differences import LOOSER, TOLERANCE
from echelon.tools.verify.loop_events import LoopInputMode, RandomDrawMode, follow
from echelon.tools.verify.loop_replay import APART, GlobalBatchFollower, LoopReplayer, whole_batch
from echelon.tools.verify.module_outputs import ModuleOutputSums
from echelon.tools.verify.observer import INITIAL, VerifyObserver, mean_loss, share
from echelon.tools.verify.random_draws import Draw, DrawReader, read_draws
from echelon.tools.verify.randomness import measure_randomness
from echelon.tools.verify.samples import SampleReader
from echelon.tools.verify.verify_request import VerifyRequest, leave

if TYPE_CHECKING:
    from echelon.distributed.world import World
    from echelon.tools.verify.verify_engine import VerifyEngine

#: Advice for the user if one process cannot follow the passes of the ranks.
ACCUMULATES = "let both be the same, or the first a multiple of the second with the same draws and batches in each pass"
#: Empty marks and an empty cluster: one process uses neither.
UNMARKED, ALONE = ModelMarks(units={}, splits={}, replicates=(), pipeline=None, default=None), Slices()


class VerifyReplayer(VerifyObserver):
    """The observer in the one process that the ranks are compared with."""

    def __init__(self, question: VerifyRequest) -> None:
        self.question = question
        recorded = question.answered("plan")
        assert recorded is not None, "the plan's own run has answered before this one starts"
        self._recorded = recorded
        self._calls = 0
        self._losses: list[list[float]] = []
        self._steps: list[dict[str, Any]] = []
        self._outputs: ModuleOutputSums | None = None
        self._found: dict[str, Any] = {}
        self._at_hand: dict[str, Any] = {}
        self._initial: dict[str, Tensor] = {}  # parameters before the first update
        self._rounding: dict[str, Tensor] = {}  # masks of parameter entries that are left out: rounding errors only
        self._options = ""  # text: a setting that differs in one process, such as the learning rate
        self._pieces = WeightedBatches(())
        self._alike = True  # the batches of all replicas have been identical so far
        self._loop: LoopReplayer | None = None
        self._listening = contextlib.ExitStack()
        self._added = 0.0
        self._gatherer, self._loaders = GlobalBatchFollower(), 0
        self._passes = 0  # passes of the current update, in a custom loop
        self._accumulation: Accumulation | None = None
        self._draws: list[list[Draw]] = []  # draws of each replica in the current pass
        self._stray: set[str] = set()
        self._shares: list[dict[str, Any]] = []  # one entry per pass of the current update
        self._counts: dict[str, float] = {}  # possible denominators of the global batch's loss
        self._doubts: dict[str, None] = {}  # reasons why the comparison is inconclusive (a dict as an ordered set)

    def terms(self, requested: DistributeArgs) -> DistributeArgs:
        """Return the arguments for one process: only the settings that also apply to one process with the global batch.

        ``gradient_merge`` is taken from the ranks, because a script may divide it by the number of ranks.
        """
        shared = {name: getattr(requested.strategy, name) for name in ("lars", "lamb", "clip")}
        merged = self._recorded["gradient_merge"]
        if merged != requested.strategy.gradient_merge:
            self._options = f"gradient_merge is {merged} on the ranks, {requested.strategy.gradient_merge} in one"
        own = Strategy(**shared, gradient_merge=merged, amp=False, fast=False)
        return DistributeArgs(own, UNMARKED, plan=None, cluster=ALONE, elastic=None)

    # ---- custom loop ----

    def begin(self, engine: VerifyEngine) -> None:
        if not self._recorded["own_loop"]:
            return
        self._begin(engine)
        self._accumulation = self._find_accumulation()
        order = self._accumulation.event if self._accumulation is not None else None
        self._loop = LoopReplayer(
            self.question,
            kinds=self._recorded["events"],
            replicas=self._recorded["replicas"],
            device=engine.world.device,
            order=order,
        )
        self._listening.enter_context(self.listening(engine))
        LoopInputMode(self._loop, self.question.wide).open()

    def loader(self, world: World, loader: Loader) -> Loader:
        self._loaders += 1
        samples = SampleReader(self.question, loader, self._loaders, self._recorded["replicas"], world.device)
        return follow(loader, self._loop or self._gatherer, self.question.wide, samples)

    def backward(self, engine: VerifyEngine, loss: Tensor) -> Tensor:
        loss = loss * self._recorded["replicas"] if self._recorded["apart"] else loss
        self._added += float(loss.detach())
        self._passes += 1
        return loss

    def update(self, engine: VerifyEngine, optimizer: str | None, samples: float | None) -> None:
        self._check_passes()
        self._losses, self._shares, self._added = [[self._added, 1.0]], [share(self._added, 1.0, {})], 0.0
        self._listening.close()
        if self._outputs is not None:
            rounds = 1 if self._accumulation is None else self._accumulation.rounds
            self._found, self._outputs = dict(self._outputs.found(rounds)), None

    def _check_passes(self) -> None:
        """Compare the number of passes of this update with that of the ranks.

        If the numbers differ in the first update, write down the own number and end the process: the command then runs
        the script again with ``VerifyRequest.passes`` set.
        """
        ranks, own, self._passes = self._recorded["passes"][len(self._steps)], self._passes, 0
        if own == (self.question.passes or ranks):
            return
        if not self._steps and not self.question.passes:
            self.question.note("passes", own)
            leave()
        self.question.give_up(f"an update adds up {own} losses in one process and {ranks} on the ranks; {ACCUMULATES}")

    def _find_accumulation(self) -> Accumulation | None:
        own = self.question.passes
        if not own:
            return None
        result = find_accumulation(own, self._recorded["passes"], self._recorded["marks"])
        if result is None:
            ranks = self._recorded["passes"][0]
            self.question.give_up(
                f"an update adds up {own} losses in one process and {ranks} on the ranks; {ACCUMULATES}"
            )
        self._options = f"an update adds up {result.ranks} losses on the ranks, {result.own} in one"
        return result

    # ---- engine.step ----

    def batch(self, engine: VerifyEngine, inputs: Any, count: float) -> tuple[Any, float]:
        if not self._calls:
            self._begin(engine)
        counted = [
            (int(replica), *recorded) for replica, *recorded in self._recorded["calls"][self._calls] if recorded[0]
        ]
        paths = [self.question.file(f"batch-{self._calls}-{replica}.safetensors") for replica, *_ in counted]
        batches = [on_device(read_batch(path), engine.world.device) for path in paths]
        self._alike = self._alike and are_same_batches(batches)
        counts, device = [samples for _, samples, _ in counted], engine.world.device
        self._draws = [read_draws(self.question, self._calls, replica, device) for replica, *_ in counted]
        self._calls += 1
        self._pieces = self._given(inputs, batches, counts, weighed=all(weighed for *_, weighed in counted))
        return self._pieces, sum(counts)

    def _given(self, inputs: Any, batches: list[Any], counts: list[float], *, weighed: bool) -> WeightedBatches:
        """Return the batches that one process computes in place of all replicas.

        weighed: True if the script has passed ``samples=`` for each batch
        """
        apart, micro, self._counts = self._recorded["apart"], self._recorded["micro"], {}
        if not apart and micro == 1:
            whole = whole_batch(batches, inputs, self._gatherer.last)
            if whole is not None:
                self._counts = denominators(whole)
                return WeightedBatches((WeightedBatch(whole, 1.0),))
            if not weighed:
                self._doubts[APART] = None
        return merge_replica_batches(batches, counts, apart=apart, micro=micro)

    def _begin(self, engine: VerifyEngine) -> None:
        self._outputs = ModuleOutputSums(engine.model)
        initial = load_file(self.question.file(INITIAL), device=str(engine.world.device))
        own = engine.model.state_dict()
        different = [name for name in {**own, **initial} if _shape(own.get(name)) != _shape(initial.get(name))]
        if different:
            self.question.refuse(
                f"the script builds another model in one process: '{different[0]}' has shape "
                f"{_shape(own.get(different[0]))} there and {_shape(initial.get(different[0]))} on the ranks; make "
                "it independent of the number of ranks"
            )
        engine.model.load_state_dict(initial, strict=False)  # not strict: the file holds no non-tensor state
        floats = [name for name, value in engine.model.named_parameters() if value.is_floating_point()]
        self._initial = {name: initial[name].cpu() for name in floats if name in initial}

    def listening(self, engine: VerifyEngine) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if self._outputs is not None:
            stack.enter_context(self._outputs.listening())
        if self._loop is None:
            stack.enter_context(self._drawing())
        return stack

    def _drawing(self) -> AbstractContextManager[Any]:
        """Return a context in which the model gets the random numbers that the ranks drew."""
        if not any(self._draws):
            return contextlib.nullcontext()
        pieces = len(self._pieces.pieces)
        if pieces == 1:
            return RandomDrawMode(DrawReader(self._draws, self._stray))
        one_by_one = [draw for draws in self._draws for draw in draws] if pieces == len(self._draws) else []
        return RandomDrawMode(DrawReader([one_by_one], self._stray))

    def loss(self, engine: VerifyEngine, global_loss: GlobalLoss | PipelineGlobalLoss, count: float) -> None:
        self._losses.append([float(global_loss.loss), count])
        self._shares.append(share(float(global_loss.loss), count, self._counts))
        if self._outputs is not None:
            self._found, self._outputs = dict(self._outputs.found()), None

    # ---- both ----

    def gradients(self, engine: VerifyEngine, optimizers: Sequence[str]) -> bool:
        path = self.question.file(f"gradients-{len(self._steps)}.safetensors")
        if not path.exists():  # the ranks have skipped this update because of an fp16 overflow
            return False
        self._take_options(engine)
        own, theirs = engine.whole_gradients(optimizers), load_file(path)
        path.unlink()
        if not theirs:  # the ranks applied and freed the gradients during backward
            return True
        found = self._at_hand["gradients"] = gradient_differences(theirs, own)
        for name, entries in rounding(theirs, own).items():
            # a wrong gradient is not a rounding error, unless the strategy explains the difference
            if self._loosely or found[name].relative <= LOOSER * TOLERANCE:
                self._rounding[name] = entries | self._rounding[name] if name in self._rounding else entries
        return True

    @property
    def _loosely(self) -> bool:
        """True if the strategy is expected to change gradients but weights can still be compared."""
        reasons = self._recorded["expected"]
        return bool(reasons) and all(one["weights"] is not None for one in reasons)

    def _take_options(self, engine: VerifyEngine) -> None:
        """Copy the ranks' numeric optimizer options (such as learning rates) into the own parameter groups.

        A script may compute such options from the number of ranks.
        """
        for at, (theirs, own) in enumerate(
            zip(self._recorded["options"][len(self._steps)], engine.groups(), strict=False)
        ):
            for name, value in theirs.items():
                if name in own and not isinstance(own[name], Tensor) and own[name] != value:
                    self._options = self._options or f"{name} of group {at} is {value} on the ranks, {own[name]} in one"
                    own[name] = value

    def rate(self, step: int, factor: float) -> float:
        return float(self._recorded["rates"].get(str(step), 1.0))

    def applied(self, engine: VerifyEngine) -> None:
        path = self.question.file(f"weights-{len(self._steps)}.safetensors")
        theirs, own = load_file(path), engine.whole_weights()
        path.unlink()
        found = weight_differences(theirs, own, self._rounding)
        self._at_hand["weights"] = {name: value for name, value in found.items() if self._is_comparable(engine, name)}
        updates = len(self._steps) + 1
        self._at_hand["moves"] = movement_differences(theirs, own, self._initial, self._rounding, updates)
        known = {"loss": mean_loss(self._losses)[0], "passes": self._shares, "gradients": {}}
        self._steps.append({**known, **self._at_hand})
        self._losses, self._shares, self._at_hand = [], [], {}
        self.question.note("steps", len(self._steps))
        if len(self._steps) == self.question.steps:
            self._end(engine)

    def _is_comparable(self, engine: VerifyEngine, name: str) -> bool:
        """Return True if a difference in tensor ``name`` is meaningful.

        If the gradient of a parameter is only rounding error (a bias before batch norm), the optimizer still moves that
        parameter, which shifts the running statistics of the next step. Buffers are then not compared.
        """
        shifted = bool(self._steps) and bool(mostly(self._rounding))
        return not shifted or name not in dict(engine.model.named_buffers())

    def _end(self, engine: VerifyEngine) -> None:
        own_loop = self._loop is not None
        restless = (
            0.0 if own_loop else measure_randomness(lambda: self._again(engine), engine.model, engine.world.device)
        )
        kinds = {name: type(module).__name__ for name, module in engine.model.named_modules()}
        self.question.answer(
            {
                "steps": self._steps,
                "outputs": list(self._found.items()),
                "kinds": kinds,
                "unrest": restless,
                "alike": self._alike if self._loop is None else self._loop.alike and self._loop.batches_taken > 0,
                "doubts": list(self._doubts),
                "rounding": mostly(self._rounding),
                "options": self._options,
                "passes": 1 if own_loop else len(self._pieces.pieces),
                "stray": sorted(self._loop.stray if self._loop is not None else self._stray),
            }
        )
        leave()

    def _again(self, engine: VerifyEngine) -> Tensor:
        """Compute the loss of the last batch again and return it."""
        with self._drawing():
            return engine.forward(self._pieces)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
