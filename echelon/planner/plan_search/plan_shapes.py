"""Enumeration of the plan shapes on a mesh that the runtime supports: micro-batches, schedules, sharding, compression.

The rules match those of strategy/combine.py: combinations that it refuses are not proposed here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from echelon.base.errors import UsageError, nearest
from echelon.plan.draft import Approximation, Draft
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.plan_search.meshes import CandidateMesh, find_micro_batches
from echelon.strategy.annotations.marks import ScheduleName

Amp = Literal["bf16", "fp16"]
Flags = tuple[bool, ...]  #: for each stage, True if it recomputes

#: Techniques that change numerical results. They are used only if the user allows them.
APPROXIMATE = ("amp", "fp16_allreduce", "dgc", "localsgd")

MOST_CHUNKS = 4  # stages per rank: more of them gain little and send more


@dataclass(frozen=True)
class PlanShape:
    """A plan without the fields that are derived from its shape: cuts, recompute, shares and widths."""

    mesh: CandidateMesh
    micro_batches: int = 1
    schedule: ScheduleName | None = None
    chunks: int = 1
    shard: int = 0
    amp: Amp | None = None
    comm_dtype: Literal["fp16", "bf16"] | None = None
    approximate: Approximation | None = None

    @property
    def stages(self) -> int:
        return self.mesh.stage * self.chunks

    @property
    def marked(self) -> bool:
        """True if the plan uses stages, splits or micro-batches."""
        return self.mesh.stage > 1 or self.mesh.split > 1 or self.micro_batches > 1

    def replaced(self, **changes: Any) -> PlanShape:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class AllowedTechniques:
    """The techniques that a plan may use.

    units: number of units of the model
    amps:  amp settings, the fastest first
    allow: techniques of APPROXIMATE that are allowed
    fixed: fields of a Draft that are given
    """

    units: int
    optimizer: str
    amps: tuple[Amp | None, ...] = (None,)
    allow: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def micro_batches(self, mesh: CandidateMesh, batch: int) -> list[int]:
        """Return the possible numbers of micro-batches; a pipeline needs more than one, if the batch allows."""
        found = find_micro_batches(math.ceil(batch / mesh.replicate))
        return self._given(
            "micro_batches", [count for count in found if count > 1] or found if mesh.stage > 1 else found
        )

    def shapes(self, mesh: CandidateMesh, micro_batches: int) -> Iterator[PlanShape]:
        """Yield all shapes with the fastest amp setting. The default schedule comes first."""
        for schedule, chunks in self.schedules(mesh):
            plain = PlanShape(mesh, micro_batches, schedule, chunks, amp=self.amps[0])
            for exchange in self.exchanges(plain):
                yield plain.replaced(**exchange)

    def schedules(self, mesh: CandidateMesh) -> list[tuple[ScheduleName | None, int]]:
        """Return the possible schedules, each with its number of stages per rank."""
        if mesh.stage == 1:
            return [(None, 1)] if self.fixed.get("chunks", 1) == 1 else []
        single: list[tuple[ScheduleName | None, int]] = [("1f1b", 1), ("zero-bubble", 1), ("gpipe", 1)]
        most = min(MOST_CHUNKS, self.units // mesh.stage)
        names = self._given("schedule", ["1f1b", "zero-bubble", "gpipe", "interleaved"])
        counts = self._given("chunks", range(1, most + 1))
        found = [*single, *(("interleaved", chunks) for chunks in range(2, max(most, *counts) + 1))]
        return [(name, chunks) for name, chunks in found if name in names and chunks in counts]

    def exchanges(self, shape: PlanShape) -> Iterator[dict[str, Any]]:
        """Yield the possible combinations of sharding level, communication dtype and approximation between replicas.

        Level 2 is proposed only if given: it differs from level 1 only with gradient merging, which no plan has.
        """
        allowed = [
            {"shard": shard, "comm_dtype": comm_dtype, "approximate": approximate}
            for shard in ((0, 1, 3) if self.fixed.get("shard") != 2 else (2,))
            for comm_dtype in (None, "fp16")
            for approximate in (None, "dgc", "localsgd")
            if self._may_exchange(shape, shard, comm_dtype, approximate)
        ]
        for exchange in allowed:
            if all(self.fixed.get(name, value) == value for name, value in exchange.items()):
                yield exchange

    def _may_exchange(self, shape: PlanShape, shard: int, comm_dtype: str | None, approximate: str | None) -> bool:
        if shape.mesh.replicate == 1:
            return not (shard or comm_dtype or approximate)
        needed = {name for name in ("fp16_allreduce" if comm_dtype else None, approximate) if name}
        given = {name for name in ("comm_dtype", "approximate") if self.fixed.get(name)}
        return (needed <= self.allow or bool(given)) and combines(
            shape.marked, shard, comm_dtype, approximate, self.optimizer
        )

    def _given(self, name: str, otherwise: Sequence[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else list(otherwise)

    def check(self) -> None:
        known = {entry.name for entry in dataclasses.fields(Draft)}
        for name in self.fixed:
            if name not in known:
                raise UsageError(f"fixed: a plan has no '{name}'{nearest(name, known)}")
        for name in self.allow:
            if name not in APPROXIMATE:
                raise UsageError(f"allow: there is no technique '{name}'{nearest(name, APPROXIMATE)}")


def combines(marked: bool, shard: int, comm_dtype: str | None, approximate: str | None, optimizer: str) -> bool:
    """Return True if the runtime supports the combination; ``marked``: with stages, splits or micro-batches."""
    if shard and (comm_dtype or approximate):
        return False
    if approximate and (marked or comm_dtype):
        return False
    return approximate != "dgc" or optimizer in ("sgd", "momentum")  # DGC includes the momentum of SGD


def amp_of(cluster: Cluster) -> Amp:
    """Return the 16-bit dtype that is fast on all devices; bf16 is preferred because it needs no loss scale."""
    return "bf16" if all("bfloat16" in device.peak for device in cluster.kinds) else "fp16"


def mechanisms(draft: Draft) -> int:
    """Return the complexity of a plan beyond plain replicas: of two equally fast plans, the simpler one is better."""
    order = ("1f1b", "gpipe", "zero-bubble", "interleaved")
    axes = [draft.stage > 1, draft.split > 1, draft.micro_batches > 1]
    recomputes = [any(draft.recompute), len(set(draft.recompute)) > 1]
    others = [draft.amp, draft.comm_dtype, draft.approximate, draft.shares, draft.widths, draft.order]
    used = [*axes, *recomputes, *map(bool, others)]
    return 4 * sum(used) + draft.shard + (order.index(draft.schedule) if draft.schedule else 0)
