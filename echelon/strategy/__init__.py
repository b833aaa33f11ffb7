"""The Strategy: the options of a run, the settings of each option, and the rules for combining options."""

from echelon.strategy.lora import Lora
from echelon.strategy.parts import (
    AdaptiveLocalSgd,
    Amp,
    Auto,
    Dgc,
    Fast,
    Lamb,
    Lars,
    LocalSgd,
    LowMemory,
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
    "LocalSgd",
    "Lora",
    "LowMemory",
    "LrScaling",
    "Outer",
    "ParameterServer",
    "Recompute",
    "Reduction",
    "Shard",
    "Strategy",
]
