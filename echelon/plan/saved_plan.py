"""The file plan.json: a ``Draft`` with the units, splits and model that are needed to run it elsewhere.

``echelon plan --save`` writes it, ``echelon run --plan`` and ``distribute(plan=...)`` read it. The file is data:
nothing in it is executed. Within a job, rank 0 sends its plan to the other ranks in the same format.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base.config import build, require, strict
from echelon.base.errors import UsageError
from echelon.base.formatting import brief
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory, Prediction
from echelon.strategy.annotations.marks import Split

if TYPE_CHECKING:
    from torch import nn

KIND, VERSION = "plan", 1
#: Largest number of actions of a saved timeline; a longer one cannot be drawn.
MOST_EVENTS = 2000


@strict
class SavedPrediction:
    """The prediction made together with the plan.

    seconds, parts: seconds of one step, and the same by cause
    memory:         bytes on a device, for each position along the stage axis
    limit:          memory of a device in bytes; 0 if unknown
    kinds:          the bytes of ``memory`` by kind, as far as known
    events:         the pipeline's timeline: rank, kind, micro-batch, stage, begin, end; () if it is too long
    flops:          FLOPs of one step on all devices, without recomputation; 0 if unknown
    """

    seconds: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: tuple[float, ...] = ()
    limit: float = 0.0
    kinds: tuple[dict[str, float], ...] = ()
    events: tuple[tuple[int, str, int, int, float, float], ...] = ()
    flops: float = 0.0

    @classmethod
    def of(cls, prediction: Prediction, flops: float = 0.0) -> SavedPrediction:
        shown = prediction.events if len(prediction.events) <= MOST_EVENTS else ()
        return cls(
            seconds=prediction.seconds,
            parts=dict(prediction.parts),
            memory=tuple(memory.total for memory in prediction.memory),
            limit=max((memory.limit for memory in prediction.memory), default=0.0),
            kinds=tuple(_by_kind(memory) for memory in prediction.memory),
            events=tuple((one.rank, *one.action, one.begin, one.end) for one in shown),
            flops=flops,
        )


def _by_kind(memory: PredictedMemory) -> dict[str, float]:
    return {kind: value for kind, value in dataclasses.asdict(memory).items() if kind != "limit"}


@strict
class SavedPlan:
    """A plan that can be run.

    units:      modules of every unit of the model, in execution order; the cuts of the draft are indices of units
    splits:     modules whose weights are cut over the split axis, and how
    model:      names and shapes of the model's parameters; empty for a model that was only described
    name:       name of the model
    cluster:    machines that the plan was made for, in the format of ``Cluster.parse``
    created_by: version that wrote the plan
    made_from:  options of ``echelon plan``, to explain the plan again; empty if the plan was made otherwise
    """

    draft: Draft
    units: tuple[tuple[str, ...], ...]
    splits: dict[str, Split] = dataclasses.field(default_factory=dict)
    model: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    name: str = ""
    cluster: str = ""
    predicted: SavedPrediction | None = None
    created_by: str = ""
    made_from: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.units) or self.draft.stages == 1, self, "units", "the modules that the cuts count")
        cuts = (0, *self.draft.cuts, len(self.units))
        falling = self.draft.stages > 1 and any(a >= b for a, b in itertools.pairwise(cuts))
        if falling:
            raise UsageError(f"the cuts {self.draft.cuts} do not divide {len(self.units)} units; no stage may be empty")

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({"echelon": KIND, "version": VERSION, **dataclasses.asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> SavedPlan:
        values = _parsed(text)
        found = values.pop("echelon", None)
        if found != KIND:
            raise UsageError("it is not an Echelon plan; 'echelon plan --save' writes one")
        made_with = values.pop("version", None)
        if made_with != VERSION:
            raise UsageError(f"it has version {brief(made_with)}, this echelon reads {VERSION}; save a new plan")
        return build(cls, values, "plan")

    def save(self, path: str | Path) -> None:
        try:
            Path(path).write_text(self.to_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"plan '{path}' cannot be written: {error.strerror}; give another path") from None

    @classmethod
    def load(cls, path: str | Path) -> SavedPlan:
        try:
            return cls.from_json(_text(Path(path)))
        except UsageError as error:
            raise UsageError(f"plan '{path}': {error}") from None

    def check_model(self, model: nn.Module) -> None:
        """Raise ``UsageError`` with the first difference if the plan was made for another model."""
        if not self.model:
            raise UsageError(
                "the plan was made from a model description without parameters; make it from the model itself"
            )
        local = shapes_of(model)
        for name in dict.fromkeys([*self.model, *local]):
            saved, here = self.model.get(name), local.get(name)
            if saved != here:
                raise UsageError(
                    f"the plan was made for another model: parameter '{name}' {_in_words(saved)} there and "
                    f"{_in_words(here)} here; make a new plan"
                )


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def _in_words(shape: tuple[int, ...] | None) -> str:
    return "is missing" if shape is None else f"has shape {shape}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError("there is no such file; 'echelon plan --save' writes one") from None
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError("it is not text in UTF-8; 'echelon plan --save' writes one") from None


def _parsed(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except RecursionError:
        raise UsageError("it nests too deeply to be a plan") from None
    except ValueError as error:
        raise UsageError(f"it is not JSON ({error}); save a new plan") from None
    if not isinstance(values, dict):
        raise UsageError("it is not an Echelon plan; 'echelon plan --save' writes one")
    return values
