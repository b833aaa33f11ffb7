"""The prediction for a ``Draft``: the time of a step by cause, and the memory of every device."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.plan.simulate import Event


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one device, at the time of the peak.

    activations: tensors kept for backward, of all micro-batches in flight
    transient:   short-lived tensors: temporaries, full gradients, gathered parameters, logits
    exchange:    buckets and messages
    limit:       memory of the device; 0 if unknown
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


#: The parts of a step's seconds, in display order.
PARTS = (
    "compute",  # forward and backward of the busiest rank
    "recompute",
    "bubble",
    "split",  # exposed communication inside split layers
    "pipeline",  # exposed communication between stages
    "gradients",  # exposed reduction over replicas
    "parameters",  # exposed all-gather of shards
    "batch norm",  # exposed reduction of statistics over replicas
    "update",
    "host",  # time of the host outside of the model: Python, data loading, the loss
)


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of one step.

    seconds: seconds of one step
    parts:   the same seconds by cause (see ``PARTS``); they add up to ``seconds``
    memory:  one entry per rank along the stage axis (the fullest device if the ranks of a stage differ)
    events:  the pipeline's timeline, for a figure; empty if it was not requested

    >>> cluster = echelon.planner.Cluster.parse("8xA100")
    >>> found = echelon.planner.predict(profile, cluster, echelon.planner.Draft(batch=64, replicate=8))
    >>> milliseconds = 1000 * found.seconds
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
        """The memory of the device that is nearest to its limit."""
        return max(self.memory, key=lambda memory: memory.total / (memory.limit or 1.0))
