"""The ``Draft``: the decisions of a plan search.

A ``Draft`` becomes a ``Plan`` with a model, and a ``Prediction`` with a ``Profile`` and a ``Cluster``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from echelon.base.config import require, strict
from echelon.plan.former_fields import rename_former_fields
from echelon.strategy.annotations.marks import ScheduleName

Approximation = Literal["dgc", "localsgd"]


@strict
class Draft:
    """One way to distribute one step over devices. Equal drafts are equal plans.

    batch:          samples of the global batch
    replicate, stage, split: sizes of the mesh axes, the outermost first, as in a Plan
    chunks:         stages on each rank of the stage axis (interleaved: 2 or more)
    cuts:           index of the first unit of every stage but stage 0; () with one stage
    micro_batches:  number of micro-batches of each replica, which run one after another
    schedule:       schedule of the pipeline; None without a pipeline
    recompute:      per stage, True if its units keep only their inputs for backward; () for no recompute
    shard:          sharding level over replicas, 0 to 3
    within:         number of replicas that share training state; 0 for all of them
    amp:            16-bit dtype of forward and loss; None: no autocast
    comm_dtype:     16-bit dtype in which gradients are sent; None: as they are
    approximate:    gradient exchange that changes the mathematics; only if the user allows it
    shares:         relative sizes of the replicas' batches; () for equal sizes
    widths:         relative widths of the shards of split layers; () for equal widths
    order:          ranks in the order of mesh positions; () for 0, 1, 2, ...
    compile:        True if units are compiled

    >>> draft = echelon.planner.Draft(batch=512, replicate=8, split=4, amp="bf16")
    """

    batch: int
    replicate: int = 1
    stage: int = 1
    split: int = 1
    chunks: int = 1
    cuts: tuple[int, ...] = ()
    micro_batches: int = 1
    schedule: ScheduleName | None = None
    recompute: tuple[bool, ...] = ()
    shard: int = 0
    within: int = 0
    amp: Literal["bf16", "fp16"] | None = None
    comm_dtype: Literal["fp16", "bf16"] | None = None
    approximate: Approximation | None = None
    shares: tuple[float, ...] = ()
    widths: tuple[float, ...] = ()
    order: tuple[int, ...] = ()
    compile: bool = False

    in_our_names = staticmethod(rename_former_fields)

    def __post_init__(self) -> None:
        for name in ("batch", "replicate", "stage", "split", "chunks", "micro_batches"):
            require(getattr(self, name) >= 1, self, name, "1 or more")
        require(0 <= self.shard <= 3, self, "shard", "0, 1, 2 or 3")
        require(self.within == 0 or self.replicate % self.within == 0, self, "within", "0, or a divisor of replicate")
        require(len(self.cuts) == self.stages - 1, self, "cuts", f"{self.stages - 1} of them for {self.stages} stages")
        require(len(self.recompute) in (0, self.stages), self, "recompute", "one for each stage, or none")
        require(len(self.shares) in (0, self.replicate), self, "shares", "one for each replica, or none")

    @property
    def stages(self) -> int:
        return self.stage * self.chunks

    @property
    def sharing(self) -> int:
        """The number of replicas that share training state: 1 without sharding."""
        return (self.within or self.replicate) if self.shard else 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.stage * self.split

    @property
    def micro_batch(self) -> float:
        """The samples of one micro-batch, if shares are equal."""
        return self.batch / self.replicate / self.micro_batches

    def replaced(self, **changes: object) -> Draft:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return text such as ``replicate 4 x stage 2, 8 micro-batches (1f1b), recompute, shard 1``."""
        axes = [(name, getattr(self, name)) for name in ("replicate", "stage", "split")]
        mesh = " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "one device"
        micros = f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        schedule = f" ({self.schedule}{f', {self.chunks} stages a rank' if self.chunks > 1 else ''})"
        recomputed = sum(self.recompute)
        words = [
            mesh,
            micros + schedule if self.stages > 1 else micros if self.micro_batches > 1 else "",
            "recompute" if recomputed == self.stages else f"recompute in {recomputed} stages" if recomputed else "",
            f"shard {self.shard}{f' in groups of {self.within}' if self.within else ''}" if self.shard else "",
            *(
                word
                for word in (self.amp, self.comm_dtype and f"{self.comm_dtype}_allreduce", self.approximate)
                if word
            ),
            "uneven shares" if self.shares else "",
            "uneven widths" if self.widths else "",
            "compile" if self.compile else "",
        ]
        return ", ".join(word for word in words if word.strip())
