"""In one process: it is given what the ranks began with and their batches put together, and measures how far it comes
out elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from echelon.annotation import Marks
from echelon.data import Loader
from echelon.slices import Slices
from echelon.strategy import Strategy
from echelon.terms import Terms
from echelon.verify.batches import Pieces, alike, on_device, read_batch, together
from echelon.verify.events import Intake, follow
from echelon.verify.expected import LOOSER, TOLERANCE
from echelon.verify.follow import Repeater
from echelon.verify.measure import (
    gradient_differences,
    mostly,
    movement_differences,
    rounding,
    weight_differences,
)
from echelon.verify.outputs import Outputs
from echelon.verify.question import Question, leave
from echelon.verify.stillness import unrest
from echelon.verify.witness import INITIAL, Witness, mean_loss

if TYPE_CHECKING:
    from echelon.verify.engine import Witnessed

#: What marks and clusters come to in one process: nothing.
UNMARKED, ALONE = Marks(units={}, splits={}, replicates=(), pipeline=None, default=None), Slices()


class Replayer(Witness):
    """In the one process that all is compared with."""

    def __init__(self, question: Question) -> None:
        self.question = question
        told = question.answered("plan")
        assert told is not None, "the plan's own run has answered before this one is asked"
        self._told = told
        self._calls = 0
        self._losses: list[list[float]] = []
        self._steps: list[dict[str, Any]] = []
        self._outputs: Outputs | None = None
        self._found: dict[str, Any] = {}
        self._at_hand: dict[str, Any] = {}
        self._initial: dict[str, Tensor] = {}  # parameters, as they were
        self._rounding: dict[str, Tensor] = {}  # entries of parameters that tell nothing any more
        self._options = ""  # where the script gives one process another learning rate, say
        self._pieces = Pieces(())
        self._alike = True  # the replicas' batches, so far
        self._loop: Repeater | None = None
        self._listening = contextlib.ExitStack()
        self._added = 0.0

    def terms(self, asked: Terms) -> Terms:
        """Of a strategy, what one process with the global batch would do as well."""
        shared = {name: getattr(asked.strategy, name) for name in ("lars", "lamb", "gradient_merge", "clip")}
        own = Strategy(**shared, amp=False, fast=False)
        return Terms(own, UNMARKED, plan=None, cluster=ALONE, elastic=None)

    # ---- a loop of its own ----

    def begin(self, engine: Witnessed) -> None:
        if not self._told["own_loop"]:
            return
        self._begin(engine)
        self._loop = Repeater(self.question, self._told["events"], self._told["replicas"], engine.world.device)
        self._listening.enter_context(self.listening())
        Intake(self._loop, self.question.wide).open()

    def loader(self, loader: Loader) -> Loader:
        return loader if self._loop is None else follow(loader, self._loop, self.question.wide)

    def backward(self, engine: Witnessed, loss: Tensor) -> Tensor:
        loss = loss * self._told["replicas"] if self._told["apart"] else loss
        self._added += float(loss.detach())
        return loss

    def update(self, engine: Witnessed, optimizer: str | None, samples: float | None) -> None:
        self._losses, self._added = [[self._added, 1.0]], 0.0
        self._listening.close()
        if self._outputs is not None:
            self._found, self._outputs = dict(self._outputs.found()), None

    # ---- engine.step ----

    def batch(self, engine: Witnessed, inputs: Any, count: float) -> tuple[Any, float]:
        if not self._calls:
            self._begin(engine)
        counted = [(int(replica), samples) for replica, samples in self._told["calls"][self._calls] if samples]
        paths = [self.question.file(f"batch-{self._calls}-{replica}.safetensors") for replica, _ in counted]
        batches = [on_device(read_batch(path), engine.world.device) for path in paths]
        self._alike = self._alike and alike(batches)
        counts = [samples for _, samples in counted]
        self._calls += 1
        self._pieces = together(batches, counts, apart=self._told["apart"], micro=self._told["micro"])
        return self._pieces, sum(counts)

    def _begin(self, engine: Witnessed) -> None:
        self._outputs = Outputs(engine.model)
        initial = load_file(self.question.file(INITIAL), device=str(engine.world.device))
        own = engine.model.state_dict()
        strangers = [name for name in {**own, **initial} if _shape(own.get(name)) != _shape(initial.get(name))]
        if strangers:
            self.question.refuse(
                f"the script builds another model in one process: '{strangers[0]}' has shape "
                f"{_shape(own.get(strangers[0]))} there and {_shape(initial.get(strangers[0]))} on the ranks; let it "
                "not depend on their number"
            )
        engine.model.load_state_dict(initial, strict=False)  # what is no tensor is the module's own
        floats = [name for name, value in engine.model.named_parameters() if value.is_floating_point()]
        self._initial = {name: initial[name].cpu() for name in floats if name in initial}

    def listening(self) -> AbstractContextManager[None]:
        return self._outputs.listening() if self._outputs else contextlib.nullcontext()

    def loss(self, engine: Witnessed, loss: Tensor, count: float) -> None:
        self._losses.append([float(loss), count])
        if self._outputs is not None:
            self._found, self._outputs = dict(self._outputs.found()), None

    # ---- both ----

    def gradients(self, engine: Witnessed, optimizers: Sequence[str]) -> bool:
        path = self.question.file(f"gradients-{len(self._steps)}.safetensors")
        if not path.exists():  # an overflow of 16 bits: the ranks have skipped it
            return False
        self._take_options(engine)
        own, theirs = engine.whole_gradients(optimizers), load_file(path)
        path.unlink()
        if not theirs:  # applied and let go while backward ran
            return True
        found = self._at_hand["gradients"] = gradient_differences(theirs, own)
        for name, entries in rounding(theirs, own).items():
            # a gradient that is wrong is no rounding, unless the strategy makes it so
            if self._loosely or found[name].relative <= LOOSER * TOLERANCE:
                self._rounding[name] = entries | self._rounding[name] if name in self._rounding else entries
        return True

    @property
    def _loosely(self) -> bool:
        """The strategy makes gradients other ones, and weights are compared all the same."""
        reasons = self._told["expected"]
        return bool(reasons) and all(one["weights"] is not None for one in reasons)

    def _take_options(self, engine: Witnessed) -> None:
        """Learning rates and the like as the ranks have them: a script may compute them from their number."""
        for at, (theirs, own) in enumerate(zip(self._told["options"][len(self._steps)], engine.groups(), strict=False)):
            for name, value in theirs.items():
                if name in own and not isinstance(own[name], Tensor) and own[name] != value:
                    self._options = self._options or f"{name} of group {at} is {value} on the ranks, {own[name]} in one"
                    own[name] = value

    def rate(self, step: int, factor: float) -> float:
        return float(self._told["rates"].get(str(step), 1.0))

    def applied(self, engine: Witnessed) -> None:
        path = self.question.file(f"weights-{len(self._steps)}.safetensors")
        theirs, own = load_file(path), engine.whole_weights()
        path.unlink()
        found = weight_differences(theirs, own, self._rounding)
        self._at_hand["weights"] = {name: value for name, value in found.items() if self._tells(engine, name)}
        updates = len(self._steps) + 1
        self._at_hand["moves"] = movement_differences(theirs, own, self._initial, self._rounding, updates)
        self._steps.append({"loss": mean_loss(self._losses)[0], "gradients": {}, **self._at_hand})
        self._losses, self._at_hand = [], {}
        self.question.note("steps", len(self._steps))
        if len(self._steps) == self.question.steps:
            self._end(engine)

    def _tells(self, engine: Witnessed, name: str) -> bool:
        """Weights that an optimizer moves by gradients that are none (a bias before batch norm) shift the running
        statistics of the next step."""
        shifted = bool(self._steps) and bool(mostly(self._rounding))
        return not shifted or name not in dict(engine.model.named_buffers())

    def _end(self, engine: Witnessed) -> None:
        own_loop = self._loop is not None
        restless = 0.0 if own_loop else unrest(lambda: engine.forward(self._pieces), engine.model, engine.world.device)
        kinds = {name: type(module).__name__ for name, module in engine.model.named_modules()}
        self.question.answer(
            {
                "steps": self._steps,
                "outputs": list(self._found.items()),
                "kinds": kinds,
                "unrest": restless,
                "alike": self._alike and not own_loop,
                "rounding": mostly(self._rounding),
                "options": self._options,
                "passes": 1 if own_loop else len(self._pieces.pieces),
                "stray": sorted(self._loop.stray) if self._loop is not None else [],
            }
        )
        leave()


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
