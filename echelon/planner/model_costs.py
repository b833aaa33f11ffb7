"""What a model is made of, as a planner sees it: units one after another, each with its kernels, messages and bytes.

A Sheet is for one micro-batch of so many samples on one of so many devices of a split, with or without amp; a Profile
gives Sheets. Units that are alike are one object, so that whoever computes something for each can keep it by identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

KernelKind = Literal[
    "product",
    "convolution",
    "attention",
    "normalization",
    "batch_norm",
    "pointwise",
    "reduction",
    "copy",
    "layout",
    "lookup",
]
MessageKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather_small"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Launches that are alike.

    flops, bytes: of one launch: multiplications and additions; read and written
    shape:        (batch, m, n, k) of a product, an attention's (batch x heads, queries, keys, width, 1 if causal), a
                  convolution's as a product's and its input channels, (samples, channels) of a batch norm, the number
                  of entries of a function or a pool, which takes a CPU longer than to read and write them
    dtype:        what it computes in
    for_weights:  in backward: it makes a weight's gradient, which a schedule may put off
    """

    kind: KernelKind
    flops: float
    bytes: float
    shape: tuple[float, ...] = ()
    dtype: str = "float32"
    count: int = 1
    for_weights: bool = False


@dataclass(frozen=True, slots=True)
class SplitCollective:
    """What ranks of a split exchange. ``bytes`` are of the whole tensor that is summed or gathered."""

    kind: MessageKind
    bytes: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class UnitPass:
    """One way through a unit, forward or backward."""

    kernels: tuple[Kernel, ...]
    messages: tuple[SplitCollective, ...] = ()

    @property
    def flops(self) -> float:
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @property
    def bytes(self) -> float:
        return sum(kernel.bytes * kernel.count for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return sum(kernel.count for kernel in self.kernels)


@dataclass(frozen=True, slots=True, eq=False)
class ModelUnit:
    """A part of the model that is never cut, with the glue before it (and, for the last, the loss and all after it).

    All bytes are for one micro-batch, on one device of the split.

    weights, trained:  numbers of its parameters' entries held here, and of those that are trained
    weight_bytes:      of all of them
    largest_weight:    bytes of its largest parameter here (whose gradient is made whole before it is summed)
    saved:             what it keeps for backward; parameters never, each storage once, its own output not
    received:          what comes in from the unit before, which recompute keeps and a stage receives
    output:            what it hands on
    forward_peak:      the most it has at once in forward beyond what was there when it was entered
    backward_peak:     the most it has at once in backward beyond what was there when it was entered: what it has saved
                       and the gradient of its output are there, gradients of weights are not counted
    buffers:           bytes of its buffers (batch norm's statistics, masks)
    norm_statistics:   entries of batch-norm statistics it exchanges over replicas, each way
    backward_whole:    as backward_peak, but gradients of its weights are counted from when they are made, and stay
    kept, forward_again, backward_again, backward_again_whole: as saved, forward_peak, backward_peak and backward_whole
                       where the unit's module (not the glue around it) is recomputed
    deferred:          bytes that wait where gradients of weights are put off: such layers' inputs, outputs' gradients
    crossing:          all that a cut before it parts: outputs of units before it that it or a later one needs
    again:             what recompute runs again, the module without glue or loss; None: all of forward
    casts:             bytes of 16-bit copies of weights that autocast makes, and keeps until the forward pass ends
    """

    name: str
    forward: UnitPass
    backward: UnitPass
    weights: float = 0.0
    trained: float = 0.0
    weight_bytes: float = 0.0
    largest_weight: float = 0.0
    saved: float = 0.0
    received: float = 0.0
    output: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    buffers: float = 0.0
    norm_statistics: float = 0.0
    backward_whole: float = 0.0
    casts: float = 0.0
    crossing: float = 0.0
    deferred: float = 0.0
    kept: float = 0.0
    forward_again: float = 0.0
    backward_again: float = 0.0
    backward_again_whole: float = 0.0
    again: UnitPass | None = None


@dataclass(frozen=True)
class ModelCosts:
    """All units of a model, in the order they run, for micro-batches of ``samples`` on one of ``split`` devices.

    given: bytes of such a micro-batch, targets included
    tied:  entries that units share, one number for each group of ``ProfileLike.ties``; fewer where a split cuts them
    """

    units: tuple[ModelUnit, ...]
    samples: int
    split: int = 1
    amp: str | None = None
    given: float = 0.0
    tied: tuple[float, ...] = ()


class ProfileLike(Protocol):
    """What the cost model and the search ask of a model. ``Profile`` is one; a test may make its own.

    names:     of the units, as registered in the model; a cut may be made before each but the first
    ties:      groups of unit indices that share a weight (it is held and summed in each stage that has one of them)
    splits:    largest number of devices the split axis may have (1: nothing in it can be split)
    batch:     samples of the batch it was profiled on
    """

    @property
    def name(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def ties(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def splits(self) -> int: ...
    @property
    def batch(self) -> int: ...

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts: ...
