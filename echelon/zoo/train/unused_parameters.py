"""Lines about given parameters that have no effect in this run, with the reason and an alternative."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.data.blocks import is_blocked
from echelon.data.data_source import is_stream
from echelon.strategy import Amp, Strategy
from echelon.zoo.train.resolve import TrainConfig


def unused_loss_scale(resolved: TrainConfig, strategy: Strategy) -> Iterator[str]:
    """Yield a line if ``--loss_scale`` was given, is not 1, and the loss is not scaled."""
    scale, amp = resolved["loss_scale"], strategy.part(Amp)
    if not resolved.is_user_set("loss_scale") or (scale != "dynamic" and float(scale) == 1):
        return
    if strategy.auto is not None:
        yield f"loss_scale: the plan decides about amp, so {scale} is not used; --amp fp16 without a plan uses it"
    elif amp is None:
        yield f"loss_scale: this run computes in 32 bits, so {scale} is not used; --amp fp16 uses it"
    elif amp.dtype == "bf16":
        yield f"loss_scale: bf16 needs none, so {scale} is not used; --amp fp16 uses it"


def unused_shuffle_buffer(resolved: TrainConfig, train: Any) -> Iterator[str]:
    """Yield a line if ``--shuffle_buffer_size`` was given and the data is not a stream."""
    if not resolved.is_user_set("shuffle_buffer_size") or is_stream(train):
        return
    way, size = "block by block" if is_blocked(train) else "as a whole", resolved["shuffle_buffer_size"]
    name = resolved.dataset.name
    yield f"shuffle_buffer_size: '{name}' is shuffled {way}, so {size} is not used; it is for streams"


def overruled_decay(resolved: TrainConfig) -> Iterator[str]:
    """Yield a line if two kinds of decay were given."""
    scheme, kind = resolved["decay_scheme"], resolved["learning_rate_decay_type"]
    if scheme is not None and resolved.is_user_set("learning_rate_decay_type"):
        yield f"decay_scheme: {scheme} is used, and learning_rate_decay_type {kind} is not; give one of them"
