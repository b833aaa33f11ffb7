"""Zoo entries of models and data sets: the classes that models, data sets and the train command share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.strategy.annotations.marks import Mark

if TYPE_CHECKING:  # names are looked up before torch is imported
    from torch import Tensor, nn

OWN_RUNNER = "own"  #: the family of user models


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A parameter that a model or a data set adds to the common ones.

    name:     name of the parameter
    default:  its default
    meaning:  description in one line
    kind:     type, if the default does not determine it (as None): ``int``, ``str | None``, ``Literal["a", "b"]``
    required: True if the user must give a value

    >>> setting = echelon.zoo.Setting(name="width", default=64, meaning="width of the layers")
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
    """The resolved parameters of a run: common ones and those of the model and the data set.

    values: values by parameter name
    task:   name of the task (echelon.zoo.tasks), which defines the batch, the loss and the metrics

    >>> request = echelon.zoo.Request({"num_classes": 10}, "classify")
    """

    values: Mapping[str, Any]
    task: str

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; ``default`` if it is None or if neither model nor data set has the parameter."""
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the zoo: its constructor, its tasks and its recommended training settings.

    name:       name of the model
    runner:     model family, the value of ``--runner_name``
    build:      function that builds the model for a request; it draws weights from torch's global generator only
    tasks:      tasks the model can learn, by ``--task_type``; the first that the data set provides is used
    about:      description in one line
    parameters: published number of parameters, with the defaults and ``counted``; a test checks it
    counted:    values of settings that the published number assumes
    published:  source of the published number
    settings:   parameters of the model itself
    defaults:   model-specific defaults of common parameters: {"optimizer": "adamw", "learning_rate": 1e-4}
    recompute:  names (glob patterns) of modules that are good segments for activation checkpointing
    cuts:       names of modules, in order, at which a pipeline stage may begin: whole blocks with one tensor between
    split:      marks by module name for ``--split``: modules worth sharding
    strategy:   recommended options on many devices, as the dict of a Strategy
    advice:     reason for the recommended strategy
    tiny:       values that make the model small, for tests and a first try
    same_as:    name of the entry of which this is an alias
    pretrained: True if ``build`` gives trained weights unless ``ckpt_file_name`` names others
    loss:       loss of the model, a function of (output, target), which replaces the loss of the task

    >>> line = echelon.zoo.Model(
    ...     name="line",
    ...     runner="tabular",
    ...     build=lambda request: nn.Linear(8, request["num_classes"]),
    ...     tasks={"classification": ("points",)},
    ...     about="one linear layer",
    ... )
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
    pretrained: bool = False
    loss: Callable[[Any, Any], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """An open data set.

    train, test: inputs of ``engine.loader`` and ``engine.evaluate``; ``test`` is None if there is no test part
    facts:       parameter values that the data determines (num_classes, vocab_size, ...): used as defaults; a different
                 value of the user is an error
    loader:      further options of the loader of ``train`` (collate, lengths, ...)
    arrive:      function applied to the inputs of a batch (without the target) on the device, before the model, or
                 None; images are copied as bytes and become normalized floats there
    about:       line for the console: number, kind and source of the samples

    >>> data = echelon.zoo.Data(train=(x, y), facts={"num_classes": 3})
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

    name:     name of the data set
    open:     function that finds and reads the data. Every rank calls it, so it must give the same result on each. It
              raises DataError with one line if a folder is missing, empty or partly downloaded
    tasks:    tasks for which the data set provides batches
    about:    description in one line
    settings: parameters of the data set itself
    defaults: defaults of common parameters for this data set

    >>> points = echelon.zoo.Dataset(
    ...     name="points",
    ...     open=lambda request: echelon.zoo.Data(train=(x, y)),
    ...     tasks=("classification",),
    ...     about="points of three classes",
    ... )
    """

    name: str
    open: Callable[[Request], Data]
    tasks: tuple[str, ...]
    about: str
    settings: tuple[Setting, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
