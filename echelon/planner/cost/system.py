"""System: how a runtime trains, as far as time and memory depend on it. ECHELON is this one; others describe theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echelon.base.errors import UsageError, nearest

Replaying = Literal["units", "repeated"]

#: Bytes of optimizer state for each trained fp32 entry.
STATE = {
    "sgd": 0.0,
    "momentum": 4.0,
    "adagrad": 4.0,
    "rmsprop": 4.0,
    "adam": 8.0,
    "adamw": 8.0,
    "lars": 4.0,
    "lamb": 8.0,
}


@dataclass(frozen=True)
class System:
    """weights, gradients: bytes of a trained entry's weight and gradient in fp32 training
    amp_weights, amp_gradients, amp_master: the same under amp, and of the fp32 copy that the optimizer steps on
    state:            bytes of optimizer state for each entry, by optimizer
    update_traffic:   bytes that an update reads and writes for each entry, by optimizer; those of ``state`` are scaled
    replays:          what recompute runs again: all units of a stage, or only those that the model repeats
    replayed:         part of them that runs again (less than 1: selective recompute)
    overlap:          part of the last backward during which gradients are summed (0: only after it)
    prefetch:         part of computing during which the next layer's shards are gathered (0: each layer waits for its)
    hides_split:      part of the messages inside layers that computing hides
    sequence_split:   messages inside layers are scattered and gathered, and what is between them is split too
    scatters_edges:   a stage sends each split rank's part only, and the next stage gathers it
    bucket:           bytes of gradients that travel together
    reduced:          bytes of an entry's gradient on the wire (None: as it is held)
    gathered:         bytes of an entry that is gathered under shard 3 (None: as weights are held)
    pointwise:        factor on the bytes of pointwise and normalization kernels: below 1 where several are one
    launches:         factor on the number of launches
    compiled_pointwise, compiled_launches: both again, under compile
    host:             factor on the device's launch cost
    runs_ahead:       how far the host starts kernels before the device comes to them: within a whole pass, or a unit
    micro, step:      seconds of the host for each micro-batch and each step, which nothing hides
    unit:             seconds of the host to fetch a unit's weights and let them go, under shard 3; a bench file says
    added:            bytes that are read and written to add an entry's gradient to that of earlier micro-batches
    copied:           bytes read and written for an entry that travels between replicas: to line up gradients that are
                      summed, gradients of which each gets a part, weights that are gathered
    replay_host:      factor on the host's time for what recompute runs again: every tensor that is not kept is put
                      aside and found again by hooks
    puts_back:        copies that recompute makes of a batch norm's buffers, so that a batch counts once
    packs:            what a stage sends is copied together first
    """

    name: str
    weights: float = 4.0
    gradients: float = 4.0
    amp_weights: float = 4.0
    amp_gradients: float = 4.0
    amp_master: float = 0.0
    state: Mapping[str, float] = field(default_factory=lambda: STATE)
    update_traffic: float = 1.0
    replays: Replaying = "units"
    replayed: float = 1.0
    overlap: float = 1.0
    prefetch: float = 1.0
    hides_split: float = 0.0
    sequence_split: bool = False
    scatters_edges: bool = False
    bucket: float = 25 * 2**20
    reduced: float | None = None
    gathered: float | None = None
    pointwise: float = 1.0
    launches: float = 1.0
    compiled_pointwise: float = 0.5
    compiled_launches: float = 0.6
    host: float = 1.0
    runs_ahead: Literal["pass", "unit"] = "pass"
    micro: float = 0.0
    step: float = 0.0
    unit: float = 0.0
    added: float = 0.0
    copied: tuple[float, float, float] = (0.0, 0.0, 0.0)
    packs: bool = False
    replay_host: float = 1.0
    puts_back: int = 0

    def state_bytes(self, optimizer: str) -> float:
        """Of one trained entry."""
        if optimizer not in self.state:
            raise UsageError(
                f"optimizer='{optimizer}' is not one whose state is known{nearest(optimizer, list(self.state))}: "
                f"use one of {', '.join(self.state)}"
            )
        return self.state[optimizer]

    def weight_bytes(self, amp: str | None) -> float:
        """All copies of one entry that a device holds, the optimizer's included."""
        return self.amp_weights + self.amp_master if amp else self.weights

    def gradient_bytes(self, amp: str | None) -> float:
        return self.amp_gradients if amp else self.gradients

    def update_bytes(self, optimizer: str, amp: str | None) -> float:
        """Read and written for each entry: weights and state both ways, gradients once."""
        master = self.amp_master or self.weights
        both_ways = 2 * (self.state_bytes(optimizer) + master)
        copies = self.amp_weights if amp and self.amp_master else 0.0
        return self.update_traffic * (both_ways + self.gradient_bytes(amp) + copies)


ECHELON = System(
    "echelon",
    micro=2e-4,
    step=1e-3,
    unit=2e-4,
    added=12.0,
    copied=(8.0, 24.0, 12.0),
    packs=True,
    replay_host=3.5,
    puts_back=6,
)
