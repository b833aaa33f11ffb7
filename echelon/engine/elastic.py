"""The rules of elastic training: batch, learning rate and shape of the plan when the number of ranks changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from echelon.base.config import require, strict
from echelon.base.environment import ELASTIC
from echelon.base.errors import UsageError
from echelon.data.order import block
from echelon.plan.axes import refit, words
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Split
from echelon.strategy.annotations.slices import Slices

#: Shares of so many replicas are listed one by one.
LISTED = 4


@strict
class Elastic:
    """What stays the same when training goes on with another number of ranks.

    batch: "keep": the global batch is what it was when training began, shared out as evenly as can be;
           "scale": each replica keeps its batch, so the global batch changes
    rate:  with "scale", the learning rate is multiplied by new / first global batch ("linear", the default), by its
           root ("sqrt"), or by nothing ("none")
    """

    batch: Literal["keep", "scale"] = "keep"
    rate: Literal["linear", "sqrt", "none"] | None = None

    def __post_init__(self) -> None:
        fits = self.rate in (None, "none") or self.batch == "scale"
        require(fits, self, "rate", "left out with batch='keep': a batch that stays needs no other rate")

    def factor(self, times: float) -> float:
        """What to multiply the rate by when the global batch has become so many times as large."""
        if self.batch == "keep" or self.rate == "none":
            return 1.0
        return times**0.5 if self.rate == "sqrt" else times


def rule_in_force(given: Elastic | None, by_servers: bool) -> Elastic | None:
    """The rule that was given, or the default one where the launcher lets hosts come and go; else none."""
    if by_servers:
        if given is not None:
            raise UsageError(
                "elastic= is for ranks that train together; workers of parameter servers come and go without it: "
                "leave it out"
            )
        return None
    return given or (Elastic() if os.environ.get(ELASTIC) else None)


class ElasticState:
    """What training began with. It is part of the training's state, and the rule measures by it."""

    def __init__(self, rule: Elastic | None, ranks: int) -> None:
        """rule: None where none is in force; then every start is a beginning"""
        self.rule, self._ranks = rule, ranks
        self.replicas = 1  #: now; known with the plan
        self._first: dict[str, Any] | None = None  # the facts of the beginning, where that was another run
        self._batches: list[int] = []  # global batch of each loader of this run, in the order they were made

    def facts(self) -> dict[str, Any]:
        """For whoever goes on from here."""
        if self._first is None:
            return {"ranks": self._ranks, "replicas": self.replicas, "batches": list(self._batches)}
        begun: list[int] = self._first["batches"]
        return {**self._first, "batches": [*begun, *self._batches[len(begun) :]]}

    def restore(self, facts: Mapping[str, Any] | None) -> None:
        if self.rule is None or facts is None or facts == self._first:  # old states have no such facts
            return
        self._first = dict(facts)
        for made, begun in zip(self._batches, self._first["batches"], strict=False):
            if self.rule.batch == "keep" and made != begun:
                raise UsageError(
                    f"training began with a global batch of {begun}, and a loader of {made} was made before its state "
                    "was loaded; load it before, or name it with distribute(checkpoint=...)"
                )

    @property
    def first_replicas(self) -> int:
        """How many replicas there were. Rates that are scaled by that number (LrScaling) stay what they were."""
        return self.replicas if self._first is None else int(self._first["replicas"])

    @property
    def multiple(self) -> int | None:
        """What the end of an epoch is padded to; None: to what suits the replicas of now."""
        return self.first_replicas if self.rule is not None and self.rule.batch == "keep" else None

    @property
    def factor(self) -> float:
        """What to multiply the learning rate by."""
        if self.rule is None or self._first is None:
            return 1.0
        begun: list[int] = self._first["batches"]
        if begun and self._batches:
            return self.rule.factor(self._batches[0] / begun[0])
        return self.rule.factor(self._ranks / int(self._first["ranks"]))

    def sizes(self, batch_size: int | None, global_batch: int | None) -> tuple[int | None, int | None]:
        """What the next loader is to be made with, where the script asks for these."""
        index = len(self._batches)
        if self.rule is None or self._first is None or index >= len(self._first["batches"]):
            return batch_size, global_batch
        begun = int(self._first["batches"][index])
        if self.rule.batch == "keep":
            return None, begun
        if global_batch is None:
            return batch_size, None
        return None, max(1, round(begun * self._ranks / int(self._first["ranks"])))

    def made(self, total: int) -> str | None:
        """The next loader has this global batch. A line where that needs a word."""
        index = len(self._batches)
        self._batches.append(total)
        if self.rule is None or self._first is None or index >= len(self._first["batches"]):
            return None
        if self.replicas == self.first_replicas and total == self._first["batches"][index]:
            return None
        now = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        verb = "stays" if total == self._first["batches"][index] else "is now"
        line = (
            f"{now} now, {self.first_replicas} when training began: "
            f"global batch {verb} {total} ({shares(total, self.replicas)})"
        )
        return (
            line if self.factor == 1.0 else f"{line}, learning rate x {self.factor:.4g} ({self.rule.rate or 'linear'})"
        )


def shares(total: int, replicas: int) -> str:
    """How a global batch is dealt out: ``11 + 11 + 10``."""
    most, rest = divmod(total, replicas)
    if not rest:
        return f"{most} for each" if replicas > 1 else "undivided"
    if replicas <= LISTED:
        cuts = (block(total, replica, replicas) for replica in range(replicas))
        return " + ".join(str(cut.stop - cut.start) for cut in cuts)
    return f"{rest} x {most + 1} + {replicas - rest} x {most}"


def fit_to_ranks(
    rule: Elastic | None, marks: ModelMarks, cluster: Slices, ranks: int, ranks_per_host: int
) -> tuple[ModelMarks, Slices, str | None]:
    """Marks and cluster for the nearest shape that ``ranks`` can have, and a line where it is not the one asked for."""
    if rule is None:
        return marks, cluster, None
    splits = bool(marks.splits) or isinstance(marks.default, Split)
    cluster = _covering(cluster, ranks)
    found = refit(marks.stages, marks.pipeline, splits, cluster.slice_size(ranks_per_host), ranks)
    if found is None:
        return marks, cluster, None
    copies = ranks // (found.stage * found.split)
    shape = words(found.stage, found.split) + (f" x {copies} replicas" if copies > 1 else "")
    line = f"{ranks} ranks do not make {found.asked}; going on with {shape}"
    return _merged(marks, found.stage), Slices(average=found.stage * found.split), line


def _covering(cluster: Slices, ranks: int) -> Slices:
    """Slices that list ranks by number mean nothing for other ranks; their size still does."""
    listed = cluster.specific
    if listed is None or sum(map(len, listed)) == ranks:
        return cluster
    return Slices(average=len(listed[0]))


def _merged(marks: ModelMarks, stages: int) -> ModelMarks:
    """The same marks with fewer stages: neighbours become one. Speeds given for stages mean nothing then."""
    pipeline = marks.pipeline
    if pipeline is None or marks.stages == stages:
        return marks
    if pipeline.schedule == "interleaved" and stages > 1:
        return marks  # as many stages as before, more of them on a rank
    before = marks.stages
    schedule = "1f1b" if pipeline.schedule == "interleaved" else pipeline.schedule
    return dataclasses.replace(
        marks,
        units={name: stage * stages // before for name, stage in marks.units.items()},
        pipeline=dataclasses.replace(
            pipeline, stages=stages if pipeline.stages else None, weights=None, schedule=schedule
        ),
    )
