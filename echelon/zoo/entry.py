"""What the zoo knows of a model and of a data set: the words that models, data sets and the train command share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.strategy.annotations.marks import Mark

if TYPE_CHECKING:  # names are looked up before torch is imported
    from torch import Tensor, nn

OWN_RUNNER = "own"  #: the family of models that users bring


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A parameter that a model or a data set adds to the common ones, declared beside it.

    kind:     its type, where the default does not tell (None, say): ``int``, ``str | None``, ``Literal["a", "b"]``
    required: the user must give it
    """

    name: str
    default: Any
    meaning: str
    kind: Any = None
    required: bool = False

    @property
    def type(self) -> Any:
        return type(self.default) if self.kind is None else self.kind


@dataclass(frozen=True)
class Request:
    """What a run was asked for, resolved: every parameter by name, the common ones and those of model and data set.

    task: what is to be learned (echelon.zoo.tasks): what a batch is, the loss, the metrics
    """

    values: Mapping[str, Any]
    task: str

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """``default`` where the value is None, and where neither model nor data set has such a parameter."""
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the zoo: how to make it, what it learns, and how it is best trained.

    runner:     the family it belongs to, as ``--runner_name`` says it
    build:      makes it for a request. Draws its weights from torch's global generator only
    tasks:      for each ``--task_type``, what it can learn; the first that the data set can feed is taken
    parameters: how many it has with its defaults and ``counted`` on top, as published; tested
    published:  where that number is from
    settings:   parameters of its own
    defaults:   of common parameters, where it wants others: {"optimizer": "adamw", "learning_rate": 1e-4}
    recompute:  names (patterns as in file names) of modules that are good segments to recompute
    cuts:       names of modules, in order, that a stage may well begin with: whole blocks, with one tensor between them
    split:      marks by name for ``--split``: what is worth cutting
    strategy:   what is recommended on many devices, as a Strategy's dict, with ``advice`` saying why
    tiny:       values that make it small: for tests, and a first try
    same_as:    the entry that this is a second name of
    loss:       a loss of its own, a function of (output, target), in place of the task's
    """

    name: str
    runner: str
    build: Callable[[Request], nn.Module]
    tasks: Mapping[str, tuple[str, ...]]
    about: str
    parameters: int | None = None
    counted: Mapping[str, Any] = field(default_factory=dict)
    published: str = ""
    settings: tuple[Setting, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    split: Mapping[str, Mark | list[Mark]] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    same_as: str | None = None
    loss: Callable[[Any, Any], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set, opened.

    train, test: what ``engine.loader`` and ``engine.evaluate`` take; no test part: None
    facts:       what it says of parameters (num_classes, vocab_size, ...): taken where the user has not said, and an
                 error where the user has said otherwise
    loader:      further options of the loader of ``train`` (collate, lengths, ...)
    arrive:      what becomes of a batch's inputs (without the target) on the device, before the model sees them:
                 images travel as bytes and become normalized floats there. A function of the inputs, or None
    about:       one line for the console: how many samples, of what, from where
    """

    train: Any
    test: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    arrive: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A kind of data set of the zoo.

    tasks: those it can feed
    open:  finds and reads it; every rank calls it, so it must give the same on each. A folder that is missing, empty or
           half-downloaded is a DataError of one line
    """

    name: str
    open: Callable[[Request], Data]
    tasks: tuple[str, ...]
    about: str
    settings: tuple[Setting, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
