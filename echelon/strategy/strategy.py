"""Strategy: all options of a run except the model. A Strategy is a request; the Plan has the decisions."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from echelon.base.config import build, require, strict
from echelon.base.errors import UsageError
from echelon.strategy import fleet_names, strategy_files, strategy_table
from echelon.strategy.annotations.marks import Pipeline
from echelon.strategy.combine import refuse_conflicts
from echelon.strategy.lora import Lora
from echelon.strategy.other_framework_names import refuse_other_names
from echelon.strategy.parts import (
    SHORTHAND,
    AdaptiveLocalSgd,
    Amp,
    Auto,
    Dgc,
    Fast,
    Lamb,
    Lars,
    LocalSgd,
    LowMemory,
    LrScaling,
    ParameterServer,
    Recompute,
    Reduction,
    Shard,
)

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

#: Former name of an option -> its present name. Former names work for one version.
FORMER_NAMES = {"lean": "low_memory"}


@strict
class Strategy:
    """The options of a run. The default is plain data parallelism that equals one process on the global batch.

    Each option takes ``True`` (the defaults), or its settings: ``Strategy(dgc=True)``, ``Strategy(dgc=Dgc(...))``,
    ``Strategy(dgc={...})``, or in the form of Paddle Fleet ``Strategy(dgc=True, dgc_configs={...})``.

    amp:               "bf16" (also ``True``), "fp16", or an Amp: forward and loss in 16 bits; False disables it. None
                       (default) is bf16 on GPUs that support it
    recompute:         activation checkpointing: keeps few activations and recomputes the others in backward
    lars, lamb:        large-batch optimizers that replace the user's SGD (lars) or Adam (lamb)
    dgc:               deep gradient compression: only the largest gradient entries are sent
    localsgd:          ranks step without communication and average their weights every k steps
    adaptive_localsgd: localsgd with a k that follows the loss
    shard:             1, 2 or 3 (also ``True``), or a Shard: ZeRO level of optimizer state, gradients, parameters
    ps:                "sync" (also ``True``), "async", "bounded", "geo", "hybrid", or a ParameterServer: sparse tables
                       and dense parameters on servers; "collective": sparse tables in the workers
    low_memory:        True or a LowMemory: six bytes per parameter, for models that are too large for one device
    lora:              True, a rank, or a Lora: the weights are frozen, and low-rank adapters beside them are trained
    gradient_merge:    number of steps whose gradients are accumulated before one reduction and one update, default 1
    fp16_allreduce:    "fp16" (also ``True``) or "bf16": 16-bit gradients on the network
    clip:              largest global norm of the gradients; larger gradients are scaled down
    lr_scaling:        "linear" (also ``True``), "sqrt", or an LrScaling: a learning rate that grows with the batch
    sync_batch_norm:   True computes batch-norm statistics over all replicas, as one process would; False is faster.
                       None (default) is True, unless ranks step without communication
    split:             number of ranks that share each split layer (tensor parallelism). A model without ``split()``
                       marks is marked as by ``annotate(model, "tensor")``
    stages:            number of pipeline stages, or a ``pipeline(stages=...)`` with micro-batches and schedule; the
                       model is cut between its blocks
    reduction:         a Reduction: settings of the gradient all-reduce
    fast:              a Fast: settings of the fast path; False disables all of it
    auto:              True, "measure" or an Auto: the plan is found automatically; no other option may be set

    >>> strategy = echelon.Strategy(amp="bf16", shard=1, gradient_merge=4, clip=1.0)
    >>> engine = echelon.distribute(model, optimizer, loss=loss, strategy=strategy)
    """

    amp: bool | Literal["bf16", "fp16"] | Amp | None = None
    recompute: bool | Recompute | None = None
    lars: bool | Lars | None = None
    lamb: bool | Lamb | None = None
    dgc: bool | Dgc | None = None
    localsgd: bool | LocalSgd | None = None
    adaptive_localsgd: bool | AdaptiveLocalSgd | None = None
    shard: bool | Literal[1, 2, 3] | Shard | None = None
    ps: bool | Literal["sync", "async", "bounded", "geo", "hybrid", "collective"] | ParameterServer | None = None
    low_memory: bool | LowMemory | None = None
    lora: bool | int | Lora | None = None
    gradient_merge: int = 1
    fp16_allreduce: bool | Literal["fp16", "bf16"] | None = None
    clip: float | None = None
    lr_scaling: bool | Literal["linear", "sqrt"] | LrScaling | None = None
    sync_batch_norm: bool | None = None
    split: int | None = None
    stages: int | Pipeline | None = None
    reduction: Reduction = Reduction()  # frozen, so one shared default is safe
    fast: bool | Fast | None = None
    auto: bool | Literal["measure"] | Auto | None = None

    def __post_init__(self) -> None:
        require(self.gradient_merge >= 1, self, "gradient_merge", "1 or more")
        require(self.clip is None or self.clip > 0, self, "clip", "a norm above 0")
        require(self.split is None or self.split >= 1, self, "split", "1 or more ranks")
        count = self.stages.stages if isinstance(self.stages, Pipeline) else self.stages or 1
        require(count is not None and count >= 1, self, "stages", "1 or more, or pipeline(stages=...)")
        for name, normal in _NORMAL.items():
            object.__setattr__(self, name, normal(getattr(self, name)))
        refuse_conflicts(self)

    @staticmethod
    def in_our_names(given: Mapping[Any, Any], label: str) -> dict[Any, Any]:
        """Translate former option names and those of Paddle Fleet; raise UsageError for those of other frameworks."""
        given = _in_present_names(given, label)
        refuse_other_names(given, label)
        return fleet_names.translate(given, label, _SETTINGS)

    def part(self, kind: type[T]) -> T | None:
        """Return the settings of one option, or None if the option is off.

        kind: class of the settings

        >>> echelon.Strategy(shard=2).part(echelon.Shard)
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, kind):
                return value
        return None

    def __str__(self) -> str:
        return strategy_table.table(self)

    def explain(
        self,
        model: nn.Module | None = None,
        *,
        ranks: int = 2,
        ranks_per_host: int | None = None,
        sample: Any = None,
    ) -> str:
        """Return a text that describes the effects of the strategy on a step, in order, and their costs.

        model:          model whose parameters give the totals; without it, costs are per parameter
        ranks:          number of ranks of the job, default 2
        ranks_per_host: number of ranks per host; None means that all ranks share a host
        sample:         input, or tuple of inputs, of the size of one rank's batch, to measure the activations

        >>> print(echelon.Strategy(shard=3).explain(model, ranks=8))
        """
        from echelon.tools.explain.strategy_report import explain

        return explain(self, model, ranks=ranks, ranks_per_host=ranks_per_host, sample=sample)

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as plain values for JSON and YAML."""
        return strategy_files.to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Strategy:
        """Build a Strategy from the values that ``to_dict`` returns.

        values: values by option

        >>> strategy = echelon.Strategy.from_dict({"shard": 2, "clip": 1.0})
        """
        return build(cls, values)

    def save(self, path: str | Path) -> None:
        """Write the options that differ from the defaults to a .yaml, .yml or .json file.

        path: file to write

        >>> echelon.Strategy(shard=2).save("strategy.yaml")
        """
        strategy_files.write(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Load a Strategy from a .yaml, .yml or .json file, with the checks of the constructor.

        path: file to read

        >>> strategy = echelon.Strategy.load("strategy.yaml")
        """
        values = strategy_files.read(path)
        return strategy_files.named(path, lambda: cls.from_dict(values))


def _in_present_names(given: Mapping[Any, Any], label: str) -> dict[Any, Any]:
    """Return the options by their present names, with a warning for each former name."""
    for old, new in FORMER_NAMES.items():
        if old in given and new in given:
            raise UsageError(f"{label}: '{old}' and '{new}' are the same option; keep '{new}'")
        if old in given:
            line = f"{label}: '{old}' is now '{new}'; the next version removes the old name"
            warnings.warn(line, FutureWarning, stacklevel=4)
    return {FORMER_NAMES.get(name, name): value for name, value in given.items()}


def _settings(name: str, kind: type[Any]) -> Any:
    """Return a function that converts a user's value to settings or None: one form to compare, print and store."""

    def normal(value: Any) -> Any:
        if isinstance(value, bool):
            return kind() if value else None
        return kind(**{SHORTHAND[name]: value}) if isinstance(value, str | int) else value

    return normal


_PARTS = {
    "amp": Amp,
    "recompute": Recompute,
    "lars": Lars,
    "lamb": Lamb,
    "dgc": Dgc,
    "localsgd": LocalSgd,
    "adaptive_localsgd": AdaptiveLocalSgd,
    "lr_scaling": LrScaling,
    "shard": Shard,
    "ps": ParameterServer,
    "low_memory": LowMemory,
    "lora": Lora,
}

_SETTINGS = {name: [field.name for field in dataclasses.fields(kind)] for name, kind in _PARTS.items()}

_NORMAL: dict[str, Any] = {name: _settings(name, kind) for name, kind in _PARTS.items()} | {
    "fp16_allreduce": lambda value: "fp16" if value is True else value or None,
    "amp": lambda value: value if value is False else _settings("amp", Amp)(value),  # None may become bf16, False not
    "split": lambda value: None if value == 1 else value,
    "stages": lambda value: Pipeline(stages=value) if isinstance(value, int) else value,
    "fast": lambda value: None if value is True or value == Fast() else value,
    "auto": lambda value: (
        value if isinstance(value, Auto) else Auto(measure=value == "measure" or None) if value else None
    ),
}
