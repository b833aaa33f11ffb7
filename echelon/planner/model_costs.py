"""Costs of a model as the planner sees it: a sequence of units, each with its kernels, collectives and bytes.

A ModelCosts object is valid for one micro-batch size, one size of the split axis and one amp setting; a Profile makes
such objects. Equal units are one object, so that the planner can cache results per unit by identity.
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
#: Kinds of kernels that a compiler can join with their neighbors.
FUSABLE: frozenset[KernelKind] = frozenset({"pointwise", "normalization", "batch_norm", "reduction", "copy", "layout"})
MessageKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather_small"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A group of ``count`` equal kernel launches.

    flops, bytes: multiplications and additions of one launch; bytes that one launch reads and writes
    shape:        (batch, m, n, k) of a matrix product; (batch x heads, queries, keys, width, 1 if causal) of an
                  attention; (batch, m, n, k, input channels) of a convolution; (samples, channels) of a batch norm;
                  (entries,) of a function or a pooling that is compute-bound on a CPU
    dtype:        dtype of the computation
    for_weights:  True for a backward kernel that makes a weight's gradient, which a schedule may defer
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
    """A collective among the ranks of a split. ``bytes`` is the size of the full tensor that is reduced or gathered."""

    kind: MessageKind
    bytes: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class UnitPass:
    """The kernels and collectives of one forward or backward pass through a unit."""

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
    """A part of the model that is never cut, with the user code that runs before it.

    The last unit also includes the loss and all code after the unit. All bytes are for one micro-batch, on one device
    of the split.

    weights, trained:  number of parameter entries on this device; number of those that are trained
    weight_bytes:      bytes of all parameters on this device
    largest_weight:    bytes of the largest parameter on this device (its full gradient exists before it is reduced)
    saved:             bytes saved for backward, each storage counted once, without parameters and the unit's output
    received:          bytes of the input from the unit before, which recompute keeps and a stage receives
    output:            bytes of the output
    forward_peak:      peak bytes in forward beyond what was allocated when the unit was entered
    backward_peak:     peak bytes in backward beyond what was allocated when the unit was entered: saved tensors and the
                       gradient of the output already exist then, gradients of weights are not counted
    buffers:           bytes of the buffers (batch norm's statistics, masks)
    norm_statistics:   entries of batch-norm statistics exchanged over replicas, in each direction
    backward_whole:    as backward_peak, but gradients of the weights are counted from their creation on
    kept, forward_again, backward_again, backward_again_whole: as saved, forward_peak, backward_peak and backward_whole
                       if the unit's module (not the user code around it) is recomputed
    deferred:          bytes held while gradients of weights are deferred: inputs and output gradients of the layers
    crossing:          bytes that cross a cut before this unit: outputs of earlier units that it or a later unit needs
    again:             the pass that recompute runs again, the module without user code or loss; None: all of forward
    casts:             bytes of 16-bit weight copies that autocast makes and keeps until the forward pass ends
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
    """All units of a model, in execution order, for micro-batches of ``samples`` on one of ``split`` devices.

    given: bytes of one micro-batch, targets included
    tied:  number of entries of shared weights on this device, one number for each group of ``ProfileLike.ties``
    """

    units: tuple[ModelUnit, ...]
    samples: int
    split: int = 1
    amp: str | None = None
    given: float = 0.0
    tied: tuple[float, ...] = ()


class ProfileLike(Protocol):
    """The interface of a model for the cost model and the search. ``Profile`` implements it; tests may use their own.

    names:     names of the units, as registered in the model; a cut is possible before each unit but the first
    ties:      groups of unit indices that share a weight (each stage with one of the units holds and reduces it)
    splits:    largest possible size of the split axis (1: no module can be split)
    batch:     number of samples of the profiled batch
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


def compiled_view(profile: ProfileLike, compiled: bool) -> ProfileLike:
    """Return the profile, or that of the compiled model if it is requested and known."""
    view: ProfileLike = getattr(profile, "compiled", profile) if compiled else profile
    return view
