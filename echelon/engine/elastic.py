"""Elastic training: adapts batch size, learning rate and mesh when the number of ranks changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from echelon.base.config import require, strict
from echelon.base.environment import ELASTIC
from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.data.order import block
from echelon.plan.axes import refit, words
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Split
from echelon.strategy.annotations.slices import Slices

#: Most replicas whose shares of a batch are listed one by one.
LISTED = 4


@strict
class Elastic:
    """The rule for batch size and learning rate when training resumes on another number of ranks.

    batch: "keep" (default): the global batch stays what it was when training began, divided as evenly as possible;
           "scale": each replica keeps its batch size, so the global batch changes
    rate:  with "scale", factor of the learning rate: new / first global batch ("linear", the default), its square
           root ("sqrt"), or 1 ("none")

    >>> elastic = echelon.Elastic(batch="scale", rate="sqrt")
    """

    batch: Literal["keep", "scale"] = "keep"
    rate: Literal["linear", "sqrt", "none"] | None = None

    def __post_init__(self) -> None:
        fits = self.rate in (None, "none") or self.batch == "scale"
        require(fits, self, "rate", "left out with batch='keep': a batch that stays needs no other rate")

    def factor(self, times: float) -> float:
        """Return the factor of the learning rate when the global batch is ``times`` as large as at the beginning."""
        if self.batch == "keep" or self.rate == "none":
            return 1.0
        return times**0.5 if self.rate == "sqrt" else times


def rule_in_force(given: Elastic | None, by_servers: bool) -> Elastic | None:
    """Return the given rule, the default rule if the launcher lets hosts join and leave, or None.

    by_servers: True if parameter servers hold the dense parameters; a given rule then raises ``UsageError``
    """
    if by_servers:
        if given is not None:
            raise UsageError(
                "elastic= is for ranks that train together; workers of parameter servers come and go without it: "
                "leave it out"
            )
        return None
    return given or (Elastic() if os.environ.get(ELASTIC) else None)


class ElasticState:
    """The ranks, replicas and batch sizes that training began with; part of the training state."""

    def __init__(self, rule: Elastic | None, ranks: int) -> None:
        """Start with the current number of ranks.

        rule: elastic rule in force; None without one, and every start then counts as the beginning
        """
        self.rule, self._ranks = rule, ranks
        self.replicas = 1  #: current number of replicas
        self._first: dict[str, Any] | None = None  # facts of the beginning if training began in another run
        self._batches: list[int] = []  # global batch of each loader of this run, in the order of creation

    def use_replicas(self, replicas: int) -> None:
        """Set the current number of replicas, which the plan determines."""
        self.replicas = replicas

    def facts(self) -> dict[str, Any]:
        """Return the facts of the beginning, to be stored in a checkpoint."""
        if self._first is None:
            return {"ranks": self._ranks, "replicas": self.replicas, "batches": list(self._batches)}
        begun: list[int] = self._first["batches"]
        return {**self._first, "batches": [*begun, *self._batches[len(begun) :]]}

    def restore(self, facts: Mapping[str, Any] | None) -> None:
        if self.rule is None or facts is None or facts == self._first:  # old checkpoints have no such facts
            return
        self._first = dict(facts)
        for made, begun in zip(self._batches, self._first["batches"], strict=False):
            if self.rule.batch == "keep" and made != begun:
                raise UsageError(
                    f"training began with a global batch of {begun}, and a loader of {made} was made before the "
                    "checkpoint "
                    "was loaded; load the checkpoint first, or give distribute(checkpoint=...)"
                )

    @property
    def first_replicas(self) -> int:
        """The number of replicas at the beginning; ``LrScaling`` uses it, so the scaled rate does not change."""
        return self.replicas if self._first is None else int(self._first["replicas"])

    @property
    def multiple(self) -> int | None:
        """The multiple that the end of an epoch is padded to; None for the current number of replicas."""
        return self.first_replicas if self.rule is not None and self.rule.batch == "keep" else None

    @property
    def factor(self) -> float:
        """The factor of the learning rate."""
        if self.rule is None or self._first is None:
            return 1.0
        begun: list[int] = self._first["batches"]
        if begun and self._batches:
            return self.rule.factor(self._batches[0] / begun[0])
        return self.rule.factor(self._ranks / int(self._first["ranks"]))

    def sizes(self, batch_size: int | None, global_batch: int | None) -> tuple[int | None, int | None]:
        """Return batch size and global batch of the next loader, for which the script has requested these."""
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
        """Record the global batch of the next loader; return a log line if replicas or batch have changed."""
        index = len(self._batches)
        self._batches.append(total)
        if self.rule is None or self._first is None or index >= len(self._first["batches"]):
            return None
        if self.replicas == self.first_replicas and total == self._first["batches"][index]:
            return None
        now = things(self.replicas, "replica")
        verb = "stays" if total == self._first["batches"][index] else "is now"
        line = (
            f"{now} now, {self.first_replicas} when training began: "
            f"global batch {verb} {total} ({shares(total, self.replicas)})"
        )
        return (
            line if self.factor == 1.0 else f"{line}, learning rate x {self.factor:.4g} ({self.rule.rate or 'linear'})"
        )


def shares(total: int, replicas: int) -> str:
    """Return text on how a global batch is divided among replicas, such as ``11 + 11 + 10``."""
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
    """Return marks and cluster for the nearest mesh that fits ``ranks``, and a log line if the mesh has changed."""
    if rule is None:
        return marks, cluster, None
    splits = bool(marks.splits) or isinstance(marks.default, Split)
    cluster = _covering(cluster, ranks)
    result = refit(marks.stages, marks.pipeline, splits, cluster.slice_size(ranks_per_host), ranks)
    if result is None:
        return marks, cluster, None
    copies = ranks // (result.stage * result.split)
    shape = words(result.stage, result.split) + (f" x {copies} replicas" if copies > 1 else "")
    line = f"{ranks} ranks do not fit {result.requested}; continuing with {shape}"
    return _merged(marks, result.stage), Slices(average=result.stage * result.split), line


def _covering(cluster: Slices, ranks: int) -> Slices:
    """Replace slices that list rank numbers by slices of equal size if the number of ranks has changed."""
    listed = cluster.specific
    if listed is None or sum(map(len, listed)) == ranks:
        return cluster
    return Slices(average=len(listed[0]))


def _merged(marks: ModelMarks, stages: int) -> ModelMarks:
    """Return the marks with fewer stages: neighboring stages are merged, and the weights of stages are dropped."""
    pipeline = marks.pipeline
    if pipeline is None or marks.stages == stages:
        return marks
    if pipeline.schedule == "interleaved" and stages > 1:
        return marks  # the number of stages stays, and each rank has more of them
    before = marks.stages
    schedule = "1f1b" if pipeline.schedule == "interleaved" else pipeline.schedule
    return dataclasses.replace(
        marks,
        units={name: stage * stages // before for name, stage in marks.units.items()},
        pipeline=dataclasses.replace(
            pipeline, stages=stages if pipeline.stages else None, weights=None, schedule=schedule
        ),
    )
