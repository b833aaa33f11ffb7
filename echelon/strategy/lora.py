"""``Lora``: the settings of low-rank adapters."""

from __future__ import annotations

import re
from typing import Literal

from echelon.base.config import require, strict


@strict
class Lora:
    """Low-rank adapters (LoRA): the weights of the model are frozen, and small matrices beside them are trained.

    A linear layer ``y = W x`` becomes ``y = W x + B A x * scale``. A begins with random numbers and B with zeros, so
    that training begins with the given model.

    rank:            rows of A, and columns of B; default 16, or that of ``weights``
    alpha:           numerator of the scale, which is alpha / rank; default twice the rank, or that of ``weights``
    dropout:         probability with which entries of the input of A are dropped
    targets:         linear layers with an adapter: the last parts of their names, ("q_proj", "v_proj"); a regular
                     expression that whole names match; or "all-linear" (default): all but the output layer
    modules_to_save: modules that are trained as they are and saved with the adapters, such as a new head ("score",)
    base_dtype:      dtype of the frozen weights; None (default) keeps the given one
    dtype:           dtype of the adapters
    rank_scaling:    True divides alpha by the square root of the rank instead of the rank (rsLoRA)
    weights:         directory of an adapter in PEFT's format to begin with; None begins anew

    >>> strategy = echelon.Strategy(lora=echelon.Lora(rank=16, targets=("q_proj", "v_proj"), base_dtype="bf16"))
    """

    rank: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    base_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    rank_scaling: bool = False
    weights: str | None = None

    def __post_init__(self) -> None:
        require(self.rank is None or self.rank >= 1, self, "rank", "1 or more")
        require(self.alpha is None or self.alpha > 0, self, "alpha", "a number above 0")
        require(0 <= self.dropout < 1, self, "dropout", "a probability from 0 up to 1")
        require(self.targets is None or bool(self.targets), self, "targets", "names of layers, or 'all-linear'")
        require(not isinstance(self.targets, str) or _is_pattern(self.targets), self, "targets", "a regular expression")
        require(self.weights != "", self, "weights", "the directory of an adapter")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
