"""Marks: what a user says about parts of a model. Plain data; ``annotate`` puts them on modules, the plan reads them."""

from __future__ import annotations

from typing import Literal

from echelon.strict import require, strict

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

How = Literal["auto", "column", "row", "sequence"]


@strict
class Replicate:
    """Every device has this part whole, with a batch of its own, also where a split beside it shares devices."""


@strict
class Split:
    """This part's weights are cut over the devices of the split axis.

    how:      "column" cuts a Linear's outputs, "row" its inputs, "sequence" leaves weights whole and cuts dimension 1 of
              the activations (layer norms, dropout); "auto" does what fits the kind of module: Linear by columns,
              Embedding over the vocabulary, Conv2d by output channels, attention by heads, a block of several as a whole
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


@strict
class Stage:
    """This part runs on the devices of one stage of the pipeline."""

    index: int

    def __post_init__(self) -> None:
        require(self.index >= 0, self, "index", "0 or more")


@strict
class Pipeline:
    """How micro-batches go through the stages.

    stages:   cut the model into so many by cost, where no stages are marked
    weights:  relative speeds of the stages' devices: a faster one gets more of the model
    """

    micro_batches: int = 4
    schedule: ScheduleName = "1f1b"
    stages: int | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, self, "micro_batches", "1 or more")
        require(self.stages is None or self.stages >= 1, self, "stages", "1 or more, or None")
        require(self.weights is None or min(self.weights, default=0) > 0, self, "weights", "numbers above 0")


Mark = Replicate | Split | Stage | Pipeline
