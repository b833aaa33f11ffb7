"""Strategy: everything a user may ask of a run, apart from the model itself. It only asks; the Plan decides."""

from __future__ import annotations

from typing import Literal

from echelon.strict import require, strict


@strict
class Reduction:
    """How gradients travel between replicas.

    bucket_mb:       gradients are sent in buckets of about this size, while backward still runs
    first_bucket_mb: the first bucket is smaller, so that sending starts early
    communicators:   process groups that carry buckets side by side
    op:              "mean" over all samples of the global batch (what one process computes), or "sum" over replicas
    wire:            send 16-bit floats instead of the gradients' own type (inexact)
    """

    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    communicators: int = 1
    op: Literal["mean", "sum"] = "mean"
    wire: Literal["fp16", "bf16"] | None = None

    def __post_init__(self) -> None:
        require(self.bucket_mb > 0, self, "bucket_mb", "a size above 0")
        require(self.first_bucket_mb > 0, self, "first_bucket_mb", "a size above 0")
        require(self.communicators >= 1, self, "communicators", "1 or more")


@strict
class Strategy:
    """What to switch on. The default is plain data parallelism that equals one process on the global batch.

    amp:             "bf16" runs forward and loss in bfloat16 where that is safe; weights stay as they are
    gradient_merge:  accumulate this many steps before one reduction and one update
    clip:            scale gradients down to this global norm
    sync_batch_norm: batch-norm statistics over all replicas, as one process would compute; False is faster
    reduction:       how gradients travel
    """

    amp: Literal["bf16"] | None = None
    gradient_merge: int = 1
    clip: float | None = None
    sync_batch_norm: bool = True
    reduction: Reduction = Reduction()  # frozen, so one shared default is safe

    def __post_init__(self) -> None:
        require(self.gradient_merge >= 1, self, "gradient_merge", "1 or more")
        require(self.clip is None or self.clip > 0, self, "clip", "a norm above 0")
