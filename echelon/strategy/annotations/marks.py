"""Marks: plain data about the parallelism of a module; ``annotate`` attaches marks to modules, the plan reads them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from echelon.base.config import require, strict
from echelon.strategy.annotations.scopes import Scope, count_stage

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

How = Literal["auto", "column", "row", "sequence"]


def _shown(mark: object) -> str:
    """Return the arguments as a user writes them: ``how='column'``."""
    assert dataclasses.is_dataclass(mark)
    values = [(field, getattr(mark, field.name)) for field in dataclasses.fields(mark)]
    return ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)


@strict
class Replicate(Scope):
    """Mark of a part that every device replicates, each with its own batch, also next to a split part."""

    def __str__(self) -> str:
        return "replicate()"


@strict
class Split(Scope):
    """Mark of a part whose weights are sharded over the devices of the split axis.

    how:      "column" shards the outputs of a Linear, "row" its inputs, "sequence" keeps weights whole and shards
              dimension 1 of the activations (layer norms, dropout); "auto" (default) depends on the module: Linear by
              columns, Embedding over the vocabulary, Conv2d by output channels, attention by heads, a block as a whole
    gather:   False passes on the local shard as a plain tensor, for modules that compute with the shard; default True
    sequence: True also shards the activations between the split layers of a block along dimension 1; default False
    weights:  relative widths of the shards, for devices of different speed; default equal widths
    parts:    a fused layer that computes several outputs at once (query, key and value): their number if they are
              equally wide, or their widths; each of them is sharded by itself
    """

    how: How = "auto"
    gather: bool = True
    sequence: bool = False
    weights: tuple[float, ...] | None = None
    parts: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require(self.weights is None or min(self.weights, default=0) > 0, self, "weights", "numbers above 0")
        least = min(self.parts, default=0) if isinstance(self.parts, tuple) else self.parts
        require(least is None or least >= 1, self, "parts", "a number of parts, or their widths")
        require(self.parts is None or self.how in ("auto", "column"), self, "parts", "left out unless how='column'")

    def __str__(self) -> str:
        return f"split({_shown(self)})"


@strict
class Stage(Scope):
    """Mark of a part that runs on the devices of one pipeline stage."""

    index: int

    def __post_init__(self) -> None:
        require(self.index >= 0, self, "index", "0 or more")

    def opened(self) -> Stage:
        return Stage(index=count_stage(self.index))

    def __str__(self) -> str:
        return f"stage({self.index})"


@strict
class NextStage(Scope):
    """The stage after the last one that was opened in the same pipeline; usable as a scope only."""

    def opened(self) -> Stage:
        return Stage(index=count_stage(None))

    def __str__(self) -> str:
        return "stage()"


@strict
class Pipeline(Scope):
    """Mark of a model that runs as a pipeline.

    micro_batches:  number of micro-batches per batch, default 4
    schedule:       order of forward and backward passes, default "1f1b"
    stages:         number of stages into which a model without stage marks is partitioned by cost
    weights:        relative speeds of the stages' devices; a faster device gets a larger part of the model
    dynamic_shapes: True if micro-batches differ in more than their number of samples
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
        return dataclasses.replace(self)  # two openings are two pipelines, even with equal settings

    def __str__(self) -> str:
        return f"pipeline({_shown(self)})"


Mark = Replicate | Split | Stage | Pipeline


def within(name: str, unit: str) -> bool:
    """Return True if the module ``name`` is ``unit`` or inside it; the name of the model itself is ""."""
    return not unit or name == unit or name.startswith(f"{unit}.")
