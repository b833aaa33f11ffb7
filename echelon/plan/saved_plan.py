"""plan.json: a Draft with all that running it elsewhere takes: which modules are units, what is split, of which model.

``echelon plan --save`` writes one, ``echelon run --plan`` and ``distribute(plan=...)`` read it. It is data: nothing in
it is ever run. Between the ranks of a job the same text carries what rank 0 has found.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base.config import build, require, strict
from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory, Prediction
from echelon.strategy.annotations.marks import Split

if TYPE_CHECKING:
    from torch import nn

KIND, VERSION = "plan", 1
#: A timeline of more actions than this is no picture any more.
MOST_EVENTS = 2000


@strict
class SavedPrediction:
    """What was foretold when the plan was made.

    seconds, parts: of one step, and the same by cause
    memory:         bytes on a device, one figure for each place along the stage axis
    limit:          bytes a device has; 0 where that is not known
    kinds:          the same bytes by kind, as far as known
    events:         the pipeline's timeline: rank, kind, micro-batch, stage, begin, end; () where it is too long
    flops:          of one step on all devices, nothing that is recomputed counted; 0 where that is not known
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

    units:      the modules of every unit of the model, in the order in which they run; a Draft's cuts count these
    splits:     the modules whose weights the split axis cuts, and how
    model:      names and shapes of its parameters; () for a model that was only described
    name:       of the model
    cluster:    the machines it was made for, as ``Cluster.parse`` reads them
    created_by: the version that wrote it
    made_from:  what ``echelon plan`` was asked, to explain the plan anew; empty where something else made it
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
            raise UsageError("it is no plan of echelon's; 'echelon plan --save' writes one")
        made_with = values.pop("version", None)
        if made_with != VERSION:
            raise UsageError(f"it has version {made_with!r}, this echelon reads {VERSION}; save the plan anew")
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
        """Raise, with the first difference, where ``model`` is not the one that the plan was made for."""
        if not self.model:
            raise UsageError("the plan was made for a model that was only described; make it from the model itself")
        mine = shapes_of(model)
        for name in dict.fromkeys([*self.model, *mine]):
            theirs, here = self.model.get(name), mine.get(name)
            if theirs != here:
                raise UsageError(
                    f"the plan was made for another model: parameter '{name}' {_in_words(theirs)} there and "
                    f"{_in_words(here)} here; make the plan anew"
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
        raise UsageError(f"it is not JSON ({error}); save the plan anew") from None
    if not isinstance(values, dict):
        raise UsageError("it is no plan of echelon's; 'echelon plan --save' writes one")
    return values
