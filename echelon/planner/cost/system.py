"""System: properties of a training runtime that time and memory depend on. ECHELON describes this runtime."""

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
    """The properties of a training runtime. An entry is one number of a parameter.

    weights, gradients: bytes of an entry's weight and gradient in fp32 training
    amp_weights, amp_gradients, amp_master: bytes under amp of weight, gradient, and the optimizer's fp32 copy
    state:            bytes of optimizer state per trained entry, by optimizer
    update_traffic:   factor on the bytes that an optimizer update reads and writes
    replays:          units that recompute runs again: all units of a stage, or only those that the model repeats
    replayed:         fraction of those units' forward that runs again (less than 1: selective recompute)
    replayed_kinds:   the same for kernels of a kind, for selective recompute that keeps some of the products' outputs
    overlap:          fraction of the last backward that overlaps with the gradient reduction (0: no overlap)
    prefetch:         fraction of computation that overlaps with gathering the next layer's shards (0: no prefetch)
    overlaps_chunks:  True if, in an interleaved pipeline, reductions of one stage's gradients and gathers of its
                      parameters overlap with the passes of the rank's other stages
    parameter_overlap: fraction of a forward that overlaps with the all-gather of updated parameters under shard 1 and 2
    hides_split:      fraction of the collectives inside layers that overlaps with computation
    fused_ends:       True if the split embedding and the loss of split logits take no more passes than unsplit ones
    residual:         factor on the bytes of pointwise kernels of the residual stream, no larger than adding two hidden
                      states: below 1 if bias, dropout and addition are one kernel
    unaligned:        factor on the FLOPs of products with a size that is not a multiple of 8
    collective:       seconds of the host to launch a collective inside layers
    product_dtype:    dtype of the products of linear layers, but for embedding and head (None: as profiled)
    sequence_split:   True for sequence parallelism: reduce-scatter and all-gather inside layers, split activations
                      between them
    scatters_edges:   True if each split rank sends only its part to the next stage, which all-gathers the parts but
                      under sequence parallelism
    bucket:           bytes of gradients per bucket
    reduced:          bytes of an entry's gradient in a reduction (None: as it is held)
    gathered:         bytes of an entry that is gathered under shard 3 (None: as weights are held)
    pointwise:        factor on the bytes of pointwise and normalization kernels: below 1 if kernels are fused
    launches:         factor on the number of launches
    compiled_pointwise, compiled_launches: additional factors on both under compile
    host:             factor on the device's launch cost
    runs_ahead:       scope in which the host runs ahead of the device: a whole pass, or a unit
    micro, step:      seconds of the host for each micro-batch and each step, without overlap
    unit:             seconds of the host to gather and free a unit's weights under shard 3; a bench file overrides it
    added:            bytes read and written per entry to accumulate its gradient over micro-batches
    copied:           bytes read and written per entry to copy into and out of buckets, for gradients that are
                      all-reduced, gradients that are reduce-scattered, and weights that are all-gathered
    replay_host:      factor on the host's time for recompute, whose hooks handle every tensor that is not kept
    compiled_host:    factor on the host's time to launch a kernel of compiled code: its wrappers are Python
    captures:         True if a step of one device becomes a CUDA graph where the host is slower than the device
    puts_back:        copies that recompute makes per batch norm to restore its buffers, so that a batch counts once
    packs:            True if a stage copies the tensors it sends into one message
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
    replayed_kinds: Mapping[str, float] = field(default_factory=dict)
    overlap: float = 1.0
    prefetch: float = 1.0
    overlaps_chunks: bool = False
    parameter_overlap: float = 0.0
    hides_split: float = 0.0
    product_dtype: str | None = None
    fused_ends: bool = False
    residual: float = 1.0
    unaligned: float = 1.0
    collective: float = 0.0
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
    compiled_host: float = 1.0
    captures: bool = False

    def state_bytes(self, optimizer: str) -> float:
        """Return the bytes of optimizer state per trained entry. Raises UsageError for an unknown optimizer."""
        if optimizer not in self.state:
            raise UsageError(
                f"optimizer='{optimizer}' is not one whose state is known{nearest(optimizer, list(self.state))}: "
                f"use one of {', '.join(self.state)}"
            )
        return self.state[optimizer]

    def weight_bytes(self, amp: str | None) -> float:
        """Return the bytes of all copies of one weight entry on a device, including the optimizer's."""
        return self.amp_weights + self.amp_master if amp else self.weights

    def gradient_bytes(self, amp: str | None) -> float:
        return self.amp_gradients if amp else self.gradients

    def update_bytes(self, optimizer: str, amp: str | None) -> float:
        """Return the bytes that an update moves per entry: weights and state are read and written, gradients read."""
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
    compiled_host=2.0,
)
