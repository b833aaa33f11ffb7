"""The settings of each strategy. ``True`` in a Strategy means these defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from echelon.base.config import require, strict

#: The one setting that a word or a number stands for: ``amp="fp16"`` is ``amp=Amp(dtype="fp16")``.
SHORTHAND = {"amp": "dtype", "lr_scaling": "rule", "shard": "level", "ps": "mode"}


@strict
class Amp:
    """Forward and loss in 16-bit floats where that is safe; weights and optimizer stay in their own type.

    dtype:           "bf16" needs no scaling; "fp16" multiplies the loss so that small gradients survive
    loss_scale:      "dynamic", or a number that stays; None is "dynamic" for fp16 and no scaling for bf16
    init_scale:      where the dynamic scale begins
    growth:          it grows by this factor after ``growth_interval`` finite steps in a row
    growth_interval:
    backoff:         it shrinks by this factor after ``backoff_after`` steps that overflowed, in a row
    backoff_after:
    min_scale:       and never falls under this
    """

    dtype: Literal["bf16", "fp16"] = "bf16"
    loss_scale: float | Literal["dynamic"] | None = None
    init_scale: float = 32768.0
    growth: float = 2.0
    growth_interval: int = 1000
    backoff: float = 0.8
    backoff_after: int = 2
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        fixed = self.loss_scale if isinstance(self.loss_scale, int | float) else 1.0
        require(fixed > 0, self, "loss_scale", "a scale above 0, or 'dynamic'")
        require(self.init_scale > 0, self, "init_scale", "a scale above 0")
        require(self.growth >= 1, self, "growth", "1 or more")
        require(self.growth_interval >= 1, self, "growth_interval", "1 or more")
        require(0 < self.backoff < 1, self, "backoff", "a factor between 0 and 1")
        require(self.backoff_after >= 1, self, "backoff_after", "1 or more")
        require(self.min_scale > 0, self, "min_scale", "a scale above 0")

    @property
    def scaling(self) -> float | Literal["dynamic"] | None:
        """How the loss is scaled, the default of the type filled in; None: not at all."""
        return "dynamic" if self.loss_scale is None and self.dtype == "fp16" else self.loss_scale


@strict
class Recompute:
    """Keep few activations; compute the rest again in backward.

    checkpoints: names or patterns of modules whose outputs are kept ("layers.*"); "auto" finds repeated blocks
    offload:     move what is kept to host memory while it waits
    """

    checkpoints: tuple[str, ...] | Literal["auto"] = "auto"
    offload: bool = False


@strict
class Lars:
    """LARS in place of the momentum SGD that was given: a learning rate for each layer.

    coeff:                     trust coefficient
    weight_decay, eps:         as in the formula
    exclude_from_weight_decay: parameters (by part of their name, or 'bias', 'batch_norm', 'layer_norm', ...) that
                               get neither weight decay nor a rate of their own
    """

    coeff: float = 0.001
    weight_decay: float = 0.0005
    eps: float = 0.0
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.coeff > 0, self, "coeff", "a coefficient above 0")
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.eps >= 0, self, "eps", "0 or more")


@strict
class Lamb:
    """LAMB in place of the Adam that was given. ``exclude_from_weight_decay`` as for LARS."""

    weight_decay: float = 0.01
    eps: float = 1e-6
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.eps > 0, self, "eps", "a value above 0")


@strict
class Dgc:
    """Send only the largest entries of the gradient; keep the rest until it has grown.

    sparsity:          the part that is not sent; several values are walked through over ``rampup_step`` steps
    rampup_begin_step: dense momentum SGD before this step
    rampup_step:
    min_size:          parameters with fewer entries travel whole
    hierarchical:      dense between the ranks of one host, sparse between hosts
    """

    sparsity: tuple[float, ...] = (0.999,)
    rampup_begin_step: int = 0
    rampup_step: int = 1
    min_size: int = 16384
    hierarchical: bool = False

    def __post_init__(self) -> None:
        legal = bool(self.sparsity) and all(0 <= part < 1 for part in self.sparsity)
        require(legal, self, "sparsity", "parts between 0 and 1, such as (0.75, 0.9375, 0.999)")
        require(self.rampup_begin_step >= 0, self, "rampup_begin_step", "0 or more")
        require(self.rampup_step >= 1, self, "rampup_step", "1 or more")
        require(self.min_size >= 1, self, "min_size", "1 or more")


@strict
class Outer:
    """A Nesterov optimizer on what the ranks have learned between two averages (the DiLoCo form)."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")
        require(0 <= self.momentum < 1, self, "momentum", "a value from 0 up to 1")


@strict
class LocalSgd:
    """Every rank steps alone; weights are averaged every ``k_steps`` steps.

    begin_step:       before this step they are averaged after every step
    average_momentum: average the optimizer's state too (it stays local otherwise)
    outer:            True, or an Outer: step along the averaged change instead of taking it as it is
    """

    k_steps: int = 8
    begin_step: int = 0
    average_momentum: bool = False
    outer: bool | Outer | None = None

    def __post_init__(self) -> None:
        require(self.k_steps >= 1, self, "k_steps", "1 or more")
        require(self.begin_step >= 0, self, "begin_step", "0 or more")
        _normal(self, "outer", Outer)


@strict
class AdaptiveLocalSgd:
    """LocalSGD whose k follows loss and learning rate: long rounds early, short ones when it matters.

    init_k_steps: k at the beginning
    max_k_steps:  k stays between 1 and this
    rule:         "adacomm" (the root outside init_k_steps) or "fleet" (inside, as the older system had it)
    others as in LocalSgd
    """

    init_k_steps: int = 8
    max_k_steps: int = 16
    begin_step: int = 0
    rule: Literal["adacomm", "fleet"] = "adacomm"
    average_momentum: bool = False
    outer: bool | Outer | None = None

    def __post_init__(self) -> None:
        require(self.init_k_steps >= 1, self, "init_k_steps", "1 or more")
        require(self.max_k_steps >= self.init_k_steps, self, "max_k_steps", "init_k_steps or more")
        require(self.begin_step >= 0, self, "begin_step", "0 or more")
        _normal(self, "outer", Outer)


@strict
class LrScaling:
    """Multiply the learning rate by how many times larger than one replica's batch an update's batch is.

    rule:         "linear" by that number, "sqrt" by its root
    warmup_steps: grow from the rate as given to the scaled one over so many steps
    """

    rule: Literal["linear", "sqrt"] = "linear"
    warmup_steps: int = 500

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, self, "warmup_steps", "0 or more")

    def factor(self, times: int) -> float:
        """By how much the rate grows, in the end, for a batch so many times as large."""
        return float(times) if self.rule == "linear" else times**0.5


@strict
class Shard:
    """Replicas share out what one process would hold whole (ZeRO).

    level:   1 shards the optimizer's state, 2 gradients as well, 3 parameters too
    offload: "optimizer" keeps the optimizer's state in host memory and steps there; "parameters" (level 3) keeps the
             shards of parameters there as well
    """

    level: Literal[1, 2, 3] = 3
    offload: Literal["optimizer", "parameters"] | None = None

    def __post_init__(self) -> None:
        fits = self.offload != "parameters" or self.level == 3
        require(fits, self, "offload", "'optimizer', or level=3 as well: lower levels need parameters on the device")


@strict
class Fast:
    """What makes a step quicker without being asked for. Each part: None decides by itself, True insists, False is off.

    compile:       torch.compile; "blocks" (each repeated block for itself, so that it starts soon) or "whole"
    channels_last: convolutions' weights and images with their channels side by side in memory
    fused:         the step of SGD, Adam and AdamW in one kernel
    graphs:        forward and backward as one CUDA graph, where the host holds up the step (docs/fast.md)
    bf16:          forward and loss in bf16; ``amp=`` has the last word
    pad:           large output layers, such as of 50,257 words, compute with their size rounded up, which GPUs want
    """

    compile: bool | Literal["blocks", "whole"] | None = None
    channels_last: bool | None = None
    fused: bool | None = None
    graphs: bool | None = None
    bf16: bool | None = None
    pad: bool | None = None


@strict
class Lean:
    """Six bytes a parameter in place of sixteen: weights in bf16 with the remainder of their fp32 value beside them,
    Adam's moments in 8 bits, each gradient applied and let go while backward runs. Forward is in bf16.

    state:   where remainders and moments lie: "auto" is the device as far as it has room, the rest in host memory;
             "device" and "host" are one place for all
    reserve: device memory that "auto" leaves for activations and gradients: bytes, or as in "16 GB"
    """

    state: Literal["auto", "device", "host"] = "auto"
    reserve: float | str = "16 GB"

    def __post_init__(self) -> None:
        require(self.reserve not in ("", 0), self, "reserve", "bytes, such as '16 GB'")


Means = Literal["amp", "fp16_allreduce", "dgc", "localsgd"]


@strict
class Auto:
    """The quickest plan that fits is found and run: mesh, stages, splits, micro-batches, recompute, shard.

    measure: run the best few for some steps, in processes that are thrown away, and take the quickest of them
    trials:  how many of them
    allow:   approximate means that may be used as well; what they would bring is said all the same
    memory:  what a device may hold, in bytes or as in "60 GB"; None: all that it has
    cluster: the machines, as in "2x8xH100" or a file; None: what is found here, as ``echelon bench`` has measured it
    """

    measure: bool = False
    trials: int = 3
    allow: tuple[Means, ...] = ()
    memory: float | str | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        require(self.trials >= 1, self, "trials", "1 or more")
        require(self.memory is None or self.memory != "", self, "memory", "bytes, such as '60 GB'")
        if isinstance(self.memory, int | float):
            require(self.memory > 0, self, "memory", "a number of bytes above 0")


@strict
class Reduction:
    """How gradients travel between replicas.

    bucket_mb:       gradients are sent in buckets of about this size, while backward still runs
    first_bucket_mb: the first bucket is smaller, so that sending starts early
    communicators:   process groups that carry buckets side by side
    op:              "auto": what one process computes, the mean over the global batch, or the sum if the loss is a sum
                     over samples; "mean" over the global batch in any case; "sum" over replicas
    """

    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    communicators: int = 1
    op: Literal["auto", "mean", "sum"] = "auto"

    def __post_init__(self) -> None:
        require(self.bucket_mb > 0, self, "bucket_mb", "a size above 0")
        require(self.first_bucket_mb > 0, self, "first_bucket_mb", "a size above 0")
        require(self.communicators >= 1, self, "communicators", "1 or more")


def _normal(owner: object, name: str, kind: type) -> None:
    """``True`` becomes the settings it stands for, ``False`` none at all: one form to compare, print and store."""
    value = getattr(owner, name)
    if isinstance(value, bool):
        object.__setattr__(owner, name, kind() if value else None)


#: How blocks are dealt out, by our names and by Fluid's.
SPLIT_METHODS = {
    "round_robin": "round_robin",
    "RoundRobin": "round_robin",
    "hash_name": "hash_name",
    "HashName": "hash_name",
}


def _split_method(given: Any) -> Any:
    """Return a way to deal blocks out by our name for it; Fluid gives a class of that name."""
    return SPLIT_METHODS.get(given.__name__ if isinstance(given, type) else given, given)


@strict
class ParameterServer:
    """Sparse tables, and by default the dense parameters too, live on servers.

    mode:           "sync":    equals one process on the global batch
                    "async":   every push is applied at once
                    "bounded": as async, but no worker is more than ``staleness`` steps ahead of the slowest
                    "geo":     workers step alone and exchange changes every ``k_steps`` steps
                    "hybrid":  sparse tables as async, dense parameters summed between the workers (all-reduce)
    sync_mode:      another way to say it: True is mode="sync", False is mode="async"
    dense:          where dense parameters live: on "servers", or with the workers ("allreduce")
    compensate:     delay compensation of async gradients (DC-ASGD's lambda); 0: none
    slice_var_up:   cut parameters into blocks of at least ``min_block_size`` entries, one for each server
    split_method:   deals blocks out: "round_robin" (or "RoundRobin"), "hash_name" (or "HashName"), or a function
                    (block names, servers) -> servers
    prefetch:       read the next batch's rows while this one computes (async: they miss this step's own update)
    server_device:  where servers keep dense blocks: "cpu" or "cuda"
    journal, replica, snapshot_every, journal_mb: what servers do for their state's safety, see docs/parameter_server.md
    patience:       seconds to wait for a worker that fell silent
    timeout:        seconds to wait for a server that fell silent
    """

    mode: Literal["sync", "async", "bounded", "geo", "hybrid"] = "sync"
    sync_mode: bool | None = None
    dense: Literal["servers", "allreduce"] | None = None
    staleness: int = 4
    k_steps: int = 8
    compensate: float = 0.0
    slice_var_up: bool = True
    min_block_size: int = 8192
    split_method: str | Callable[..., Any] = "round_robin"
    prefetch: bool = True
    server_device: str = "cpu"
    journal: bool = True
    replica: bool = False
    snapshot_every: float = 60.0
    journal_mb: int = 2048
    patience: float = 60.0
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.sync_mode is not None:
            require(self.mode == "sync", self, "sync_mode", f"None beside mode='{self.mode}': say it once")
            object.__setattr__(self, "mode", "sync" if self.sync_mode else "async")
            object.__setattr__(self, "sync_mode", None)
        object.__setattr__(self, "split_method", _split_method(self.split_method))
        known = self.split_method in SPLIT_METHODS.values() or callable(self.split_method)
        require(known, self, "split_method", f"{', '.join(map(repr, SPLIT_METHODS))} or a function (names, servers)")
        if self.mode == "hybrid":
            require(self.dense != "servers", self, "dense", "'allreduce' (or nothing) with mode='hybrid'")
            object.__setattr__(self, "mode", "async")
            object.__setattr__(self, "dense", "allreduce")
        if self.mode == "geo":
            require(self.dense != "allreduce", self, "dense", "'servers' (or nothing) with mode='geo'")
        require(self.staleness >= 0, self, "staleness", "0 or more")
        require(self.k_steps >= 1, self, "k_steps", "1 or more")
        require(self.compensate >= 0, self, "compensate", "0 or more")
        require(self.min_block_size >= 1, self, "min_block_size", "1 or more")
        require(self.snapshot_every > 0, self, "snapshot_every", "a time above 0")
        require(self.patience > 0, self, "patience", "a time above 0")
        require(self.timeout > 0, self, "timeout", "a time above 0")

    @property
    def dense_on_servers(self) -> bool:
        return self.dense != "allreduce"
