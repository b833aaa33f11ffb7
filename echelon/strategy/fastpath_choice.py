"""The fast-path settings of a Plan."""

from __future__ import annotations

import dataclasses

from echelon.base.config import strict

WHOLE = ""  #: the name of the model itself


@strict
class FastPathChoice:
    """The parts of the fast path that are enabled.

    compiled:      names of modules that are compiled separately; ``("",)`` is the whole model
    channels_last: True if weights of convolutions and images use the channels_last memory format
    fused:         optimizers with a fused step, by name
    graphs:        True if steps may be captured as CUDA graphs, which happens if the host is the bottleneck
    padded:        names of layers whose matrix products are computed with a rounded-up size
    bf16:          True if the ``amp`` of the plan was chosen by the fast path, not by the user
    left_out:      reason why a part is disabled, by the name of the part
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
