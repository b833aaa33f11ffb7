"""What a user may ask of a run: the Strategy, its parts, which of them combine, and what they will do."""

from echelon.strategy.parts import (
    AdaptiveLocalSgd,
    Amp,
    Auto,
    Dgc,
    Fast,
    Lamb,
    Lars,
    Lean,
    LocalSgd,
    LrScaling,
    Outer,
    ParameterServer,
    Recompute,
    Reduction,
    Shard,
)
from echelon.strategy.strategy import Strategy

__all__ = [
    "AdaptiveLocalSgd",
    "Amp",
    "Auto",
    "Dgc",
    "Fast",
    "Lamb",
    "Lars",
    "Lean",
    "LocalSgd",
    "LrScaling",
    "Outer",
    "ParameterServer",
    "Recompute",
    "Reduction",
    "Shard",
    "Strategy",
]
