"""Asked: the words of ``echelon memory`` as data, checked; a script's child process is given them as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from echelon.footprint.footprint import Job
from echelon.strategy import Amp, Shard, Strategy
from echelon.strict import strict

#: What a job is made for where nobody names a cluster: any GPU, or any CPU, has the same kernels.
CLUSTERS = {"cuda": "1xH100", "cpu": "1xCPU"}


@strict
class Asked:
    """What is None is as the script has it, or as it is by default.

    model: as ``echelon plan`` takes it; batch: samples of each process; amp: "off" overrules a script
    """

    model: str
    procs: int = 1
    batch: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    optimizer: str | None = None
    amp: Literal["bf16", "fp16", "off"] | None = None
    recompute: bool | None = None
    shard: Literal[0, 1, 2, 3] | None = None
    merge: int | None = None
    input: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def cluster(self) -> str:
        return CLUSTERS[self.device or ("cuda" if torch.cuda.is_available() else "cpu")]

    def job(self, samples: int, strategy: Strategy | None = None) -> Job:
        """For a batch of so many samples, where the command names no other; ``strategy``: the script's."""
        own = strategy or Strategy()
        amp, shard = own.part(Amp), own.part(Shard)
        level = self.shard if self.shard is not None else shard.level if shard is not None else 0
        return Job(
            samples=samples if self.batch is None else self.batch,
            procs=self.procs,
            merge=own.gradient_merge if self.merge is None else self.merge,
            recompute=own.recompute is not None if self.recompute is None else self.recompute,
            amp=(amp.dtype if amp else None) if self.amp is None else None if self.amp == "off" else self.amp,
            shard=level,
        )
