"""Marks: what a user says about parts of a model. Plain data; ``annotate`` puts them on modules, the plan reads it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from echelon.base.config import require, strict
from echelon.strategy.annotations.scopes import Scope, count_stage

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

How = Literal["auto", "column", "row", "sequence"]


def _shown(mark: object) -> str:
    """As a user writes it: ``split(how='column')``."""
    assert dataclasses.is_dataclass(mark)
    values = [(field, getattr(mark, field.name)) for field in dataclasses.fields(mark)]
    return ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)


@strict
class Replicate(Scope):
    """Every device has this part whole, with a batch of its own, also where a split beside it shares devices."""

    def __str__(self) -> str:
        return "replicate()"


@strict
class Split(Scope):
    """This part's weights are cut over the devices of the split axis.

    how:      "column" cuts a Linear's outputs, "row" its inputs, "sequence" leaves weights whole and cuts dimension 1
              of the activations (layer norms, dropout); "auto" does what fits the kind of module: Linear by columns,
              Embedding over the vocabulary, Conv2d by output channels, attention by heads, a block as a whole
    gather:   False hands on the local part as a plain tensor, for modules that compute with it themselves
    sequence: inside a block, also cut the activations between split layers along dimension 1
    weights:  relative widths of the shards, for devices of different speed
    """

    how: How = "auto"
    gather: bool = True
    sequence: bool = False
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require(self.weights is None or min(self.weights, default=0) > 0, self, "weights", "numbers above 0")

    def __str__(self) -> str:
        return f"split({_shown(self)})"


@strict
class Stage(Scope):
    """This part runs on the devices of one stage of the pipeline."""

    index: int

    def __post_init__(self) -> None:
        require(self.index >= 0, self, "index", "0 or more")

    def opened(self) -> Stage:
        return Stage(index=count_stage(self.index))

    def __str__(self) -> str:
        return f"stage({self.index})"


@strict
class NextStage(Scope):
    """The stage after the one opened last in the same pipeline. Only a scope can count."""

    def opened(self) -> Stage:
        return Stage(index=count_stage(None))

    def __str__(self) -> str:
        return "stage()"


@strict
class Pipeline(Scope):
    """How micro-batches go through the stages.

    stages:         cut the model into so many by cost, where no stages are marked
    weights:        relative speeds of the stages' devices: a faster one gets more of the model
    dynamic_shapes: micro-batches differ in more than their number of samples
    """

    micro_batches: int = 4
    schedule: ScheduleName = "1f1b"
    stages: int | None = None
    weights: tuple[float, ...] | None = None
    dynamic_shapes: bool = False

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, self, "micro_batches", "1 or more")
        require(self.stages is None or self.stages >= 1, self, "stages", "1 or more, or None")
        require(self.weights is None or min(self.weights, default=0) > 0, self, "weights", "numbers above 0")

    def opened(self) -> Pipeline:
        return dataclasses.replace(self)  # two openings are two pipelines, however equal

    def __str__(self) -> str:
        return f"pipeline({_shown(self)})"


Mark = Replicate | Split | Stage | Pipeline


def within(name: str, unit: str) -> bool:
    """Whether the module ``name`` is ``unit`` or lies inside it; the model itself is ""."""
    return not unit or name == unit or name.startswith(f"{unit}.")
