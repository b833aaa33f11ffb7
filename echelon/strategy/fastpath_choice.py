"""What a Plan says about the fast path."""

from __future__ import annotations

import dataclasses

from echelon.base.config import strict

WHOLE = ""  #: the name of the model itself


@strict
class FastPathChoice:
    """The parts of the fast path that run.

    compiled:      modules that are compiled, each for itself; ``("",)`` is the whole model
    channels_last: convolutions' weights and images lie with their channels side by side
    fused:         by name, optimizers whose step is one kernel
    graphs:        steps may be captured as CUDA graphs, where the host turns out to be what holds them
    padded:        layers whose products are made with a rounded size
    bf16:          the plan's ``amp`` was nobody's wish
    left_out:      by part, why it is not here
    """

    compiled: tuple[str, ...] = ()
    channels_last: bool = False
    fused: dict[str, str] = dataclasses.field(default_factory=dict)
    graphs: bool = False
    padded: tuple[str, ...] = ()
    bf16: bool = False
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self.compiled or self.channels_last or self.fused or self.graphs or self.padded or self.bf16)
