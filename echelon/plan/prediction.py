"""What is foretold of a Draft: how long a step takes and where the time goes, and what every device holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.plan.simulate import Event


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one device, at the moment when they are most.

    activations: kept for backward, of all micro-batches in flight
    transient:   what computing needs on top for a moment: temporaries, whole gradients, gathered parameters, logits
    exchange:    buckets and messages
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float = 0.0
    exchange: float = 0.0
    buffers: float = 0.0
    limit: float = 0.0

    @property
    def total(self) -> float:
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + self.activations + self.transient + self.exchange

    @property
    def fits(self) -> bool:
        return not self.limit or self.total <= self.limit


#: The parts a step's seconds are divided into, in the order they are shown.
PARTS = (
    "compute",  # forward and backward of the busiest rank
    "recompute",
    "bubble",
    "split",  # exposed: messages inside layers
    "pipeline",  # exposed: between stages
    "gradients",  # exposed: sums over replicas
    "parameters",  # exposed: gathering shards
    "batch norm",  # exposed: statistics over replicas
    "update",
    "host",  # what the machine spends outside of the model: Python, loading, the loss
)


@dataclass(frozen=True)
class Prediction:
    """seconds: of one step; parts: the same by cause (see PARTS), adding up to it.
    memory:  one for each rank along the stage axis (the fullest device where the ranks of a stage differ)
    events:  the pipeline's timeline, for a picture; empty where one was not asked for
    """

    seconds: float
    parts: dict[str, float]
    memory: tuple[PredictedMemory, ...]
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def fits(self) -> bool:
        return all(memory.fits for memory in self.memory)

    @property
    def fullest(self) -> PredictedMemory:
        """Of the device that is nearest to its limit."""
        return max(self.memory, key=lambda memory: memory.total / (memory.limit or 1.0))
