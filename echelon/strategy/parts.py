"""The settings of each option of a Strategy; ``True`` in a Strategy selects these defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from echelon.base.config import require, strict

#: The setting that a plain string or number sets: ``amp="fp16"`` is ``amp=Amp(dtype="fp16")``.
SHORTHAND = {"amp": "dtype", "lr_scaling": "rule", "shard": "level", "ps": "mode", "lora": "rank", "stages": "stages"}


@strict
class Amp:
    """Mixed precision: forward and loss in 16-bit floats where that is safe; weights and optimizer keep their types.

    dtype:           "bf16" (default) needs no loss scaling; "fp16" does, so that small gradients do not vanish
    loss_scale:      "dynamic", or a constant; None (default) is "dynamic" for fp16 and no scaling for bf16
    init_scale:      initial value of the dynamic scale
    growth:          factor by which the scale grows after ``growth_interval`` consecutive finite steps
    growth_interval: number of consecutive finite steps before the scale grows
    backoff:         factor by which the scale shrinks after ``backoff_after`` consecutive overflows
    backoff_after:   number of consecutive overflows before the scale shrinks
    min_scale:       lowest value of the dynamic scale

    >>> strategy = echelon.Strategy(amp=echelon.Amp(dtype="fp16", init_scale=2.0**12))
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
        """The loss scale with the default of the dtype resolved; None means no scaling."""
        return "dynamic" if self.loss_scale is None and self.dtype == "fp16" else self.loss_scale


@strict
class Recompute:
    """Activation checkpointing: keep few activations and recompute the others in backward.

    checkpoints: names or patterns of modules whose outputs are kept ("layers.*"); default "auto" finds repeated blocks
    offload:     True moves the kept activations to host memory between forward and backward

    >>> strategy = echelon.Strategy(recompute=echelon.Recompute(checkpoints=("layers.*",), offload=True))
    """

    checkpoints: tuple[str, ...] | Literal["auto"] = "auto"
    offload: bool = False


@strict
class Lars:
    """Replaces the user's momentum SGD by LARS, which has a learning rate for each layer.

    coeff:                     trust coefficient
    weight_decay, eps:         terms of the LARS formula (``echelon.optim.LARS``)
    exclude_from_weight_decay: parameters (by part of their name, or 'bias', 'batch_norm', 'layer_norm', ...) that
                               get neither weight decay nor a trust ratio

    >>> strategy = echelon.Strategy(lars=echelon.Lars(exclude_from_weight_decay=("bias", "batch_norm")))
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
    """Replaces the user's Adam by LAMB, which scales the update of each layer by a trust ratio.

    weight_decay, eps:         terms of the LAMB formula (``echelon.optim.LAMB``)
    exclude_from_weight_decay: as in Lars

    >>> strategy = echelon.Strategy(lamb=echelon.Lamb(exclude_from_weight_decay=("bias", "layer_norm")))
    """

    weight_decay: float = 0.01
    eps: float = 1e-6
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.eps > 0, self, "eps", "a value above 0")


@strict
class Dgc:
    """Deep gradient compression: sends only the largest gradient entries and accumulates the others locally.

    sparsity:          fraction of entries that is not sent; several values are used one after another over
                       ``rampup_step`` steps
    rampup_begin_step: first step with compression; the steps before it are dense momentum SGD
    rampup_step:       number of steps over which the values of ``sparsity`` are used
    min_size:          number of entries below which a parameter's gradient is sent dense
    hierarchical:      True reduces dense gradients within a host and sparse ones between hosts

    >>> strategy = echelon.Strategy(dgc=echelon.Dgc(sparsity=(0.75, 0.9375, 0.999), rampup_step=100))
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
    """The outer Nesterov optimizer of DiLoCo: it steps with the averaged change of the weights since the last sync.

    lr:       learning rate of the outer optimizer
    momentum: its Nesterov momentum

    >>> strategy = echelon.Strategy(localsgd=echelon.LocalSgd(k_steps=100, outer=echelon.Outer(lr=0.5)))
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")
        require(0 <= self.momentum < 1, self, "momentum", "a value from 0 up to 1")


@strict
class LocalSgd:
    """LocalSGD: every rank steps without communication; weights are averaged every ``k_steps`` steps.

    k_steps:          steps between two averages, default 8
    begin_step:       step before which weights are averaged after every step
    average_momentum: True also averages the optimizer state, which is local otherwise
    outer:            True or an Outer: the averaged change is the gradient of an outer optimizer

    >>> strategy = echelon.Strategy(localsgd=echelon.LocalSgd(k_steps=16, begin_step=1000))
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
    """LocalSGD with a k that follows loss and learning rate: many local steps early, fewer later.

    init_k_steps:     initial k
    max_k_steps:      largest k; the smallest is 1
    begin_step:       as in LocalSgd
    rule:             "adacomm" (``init_k_steps`` outside the square root) or "fleet" (inside it, as in Paddle Fleet)
    average_momentum: as in LocalSgd
    outer:            as in LocalSgd

    >>> strategy = echelon.Strategy(adaptive_localsgd=echelon.AdaptiveLocalSgd(init_k_steps=4))
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
    """Scales the learning rate with n, the ratio of the batch of an update to the batch of one replica.

    rule:         "linear" multiplies the rate by n, "sqrt" by the square root of n
    warmup_steps: number of steps over which the rate grows from the given one to the scaled one, default 500

    >>> strategy = echelon.Strategy(lr_scaling=echelon.LrScaling(rule="sqrt", warmup_steps=200))
    """

    rule: Literal["linear", "sqrt"] = "linear"
    warmup_steps: int = 500

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, self, "warmup_steps", "0 or more")

    def factor(self, times: int) -> float:
        """Return the factor of the learning rate, after the warm-up, for a batch that is ``times`` as large."""
        return float(times) if self.rule == "linear" else times**0.5


@strict
class Shard:
    """Sharding of training state over the replicas (ZeRO).

    level:   1 shards the optimizer state, 2 also the gradients, 3 also the parameters (default)
    offload: "optimizer" keeps the optimizer state in host memory and steps there; "parameters" (level 3 only) also
             keeps the parameter shards there
    within:  number of replicas that share the state, or "host" for those of one host; the groups are replicas of each
             other (HSDP). None (default): all replicas share it

    >>> strategy = echelon.Strategy(shard=echelon.Shard(level=2, offload="optimizer"))
    """

    level: Literal[1, 2, 3] = 3
    offload: Literal["optimizer", "parameters"] | None = None
    within: int | Literal["host"] | None = None

    def __post_init__(self) -> None:
        require(not isinstance(self.within, int) or self.within > 1, self, "within", "2 or more replicas, or 'host'")
        fits = self.offload != "parameters" or self.level == 3
        require(fits, self, "offload", "'optimizer', or level=3 as well: lower levels need parameters on the device")


@strict
class Fast:
    """The fast path: optimizations that are on by default where they fit; None decides, True forces, False disables.

    compile:       torch.compile; "blocks" (each repeated block separately, which shortens the start) or "whole"
    channels_last: the channels_last memory format for weights of convolutions and images
    fused:         the fused step of SGD, Adam and AdamW
    graphs:        forward and backward as one CUDA graph, if the host is the bottleneck of the step (docs/fast.md)
    bf16:          forward and loss in bf16; ``amp=`` takes precedence
    pad:           a rounded-up size for large output layers, such as a vocabulary of 50,257, which is faster on GPUs

    >>> strategy = echelon.Strategy(fast=echelon.Fast(compile=False))
    """

    compile: bool | Literal["blocks", "whole"] | None = None
    channels_last: bool | None = None
    fused: bool | None = None
    graphs: bool | None = None
    bf16: bool | None = None
    pad: bool | None = None


@strict
class LowMemory:
    """Low-memory Adam with six bytes per parameter instead of sixteen.

    Weights are stored in bf16 with the remainder of their fp32 value beside them, and Adam's moments in 8 bits. Each
    gradient is applied and freed during backward. Forward is in bf16.

    state:   place of remainders and moments: "auto" (default) uses the device as far as it has room, then host memory;
             "device" and "host" put all of them in one place
    reserve: device memory that "auto" leaves for activations and gradients: bytes, or text such as "16 GB"

    >>> strategy = echelon.Strategy(low_memory=echelon.LowMemory(state="host"))
    """

    state: Literal["auto", "device", "host"] = "auto"
    reserve: float | str = "16 GB"

    def __post_init__(self) -> None:
        require(self.reserve not in ("", 0), self, "reserve", "bytes, such as '16 GB'")


Means = Literal["amp", "fp16_allreduce", "dgc", "localsgd"]


@strict
class Auto:
    """Automatic search for the fastest plan that fits: mesh, stages, splits, micro-batches, recompute, shard.

    measure: True runs the best candidates for some steps, in temporary processes, and takes the fastest of them; None
             does so with plans too close to tell, the default plan among them, if that costs less time than a wrong
             choice may
    trials:  number of candidates to run, default 3
    allow:   approximate methods that may be used; the predicted gain of all of them is reported in any case
    memory:  memory limit per device, in bytes or as in "60 GB"; None is all memory of the device
    cluster: the machines, as in "2x8xH100" or a file; None is the current machine as measured by ``echelon bench``

    >>> strategy = echelon.Strategy(auto=echelon.Auto(cluster="2x8xH100", memory="60 GB"))
    """

    measure: bool | None = None
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
    """Settings of the gradient all-reduce between replicas.

    bucket_mb:       approximate bucket size in MB, default 25; buckets are reduced while backward runs
    first_bucket_mb: size of the first bucket in MB, default 1; it is smaller so that communication starts early
    communicators:   number of process groups that reduce buckets in parallel, default 1
    op:              "auto" gives the result of one process: the mean over the global batch, or the sum if the loss is a
                     sum over samples; "mean" is always over the global batch; "sum" is over replicas

    >>> strategy = echelon.Strategy(reduction=echelon.Reduction(bucket_mb=50))
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
    """Replace ``True`` by the default settings and ``False`` by None: there is one form to compare, print and store."""
    value = getattr(owner, name)
    if isinstance(value, bool):
        object.__setattr__(owner, name, kind() if value else None)


#: Methods to assign blocks to servers, by echelon's names and by Fluid's.
SPLIT_METHODS = {
    "round_robin": "round_robin",
    "RoundRobin": "round_robin",
    "hash_name": "hash_name",
    "HashName": "hash_name",
}


def _split_method(given: Any) -> Any:
    """Return echelon's name of a method to assign blocks; Fluid passes a class of that name."""
    return SPLIT_METHODS.get(given.__name__ if isinstance(given, type) else given, given)


@strict
class ParameterServer:
    """Parameter servers for sparse tables and, by default, for the dense parameters.

    mode:           "sync":    equals one process on the global batch (default)
                    "async":   every push is applied at once
                    "bounded": async, but no worker is more than ``staleness`` steps ahead of the slowest
                    "geo":     workers step locally and exchange changes every ``k_steps`` steps
                    "hybrid":  async for sparse tables, all-reduce between the workers for dense parameters
                    "collective": no servers: the workers hold the tables; equals one process on the global batch
    sync_mode:      alternative to ``mode``: True is mode="sync", False is mode="async"
    dense:          place of dense parameters: "servers", or "allreduce" (on the workers)
    staleness:      largest number of steps ahead in mode "bounded", default 4
    k_steps:        steps between two exchanges in mode "geo", default 8
    compensate:     lambda of DC-ASGD, the delay compensation of async gradients; 0 (default) disables it
    slice_var_up:   True cuts parameters into blocks of at least ``min_block_size`` entries, one for each server
    min_block_size: smallest number of entries per block, default 8192
    split_method:   method to assign blocks: "round_robin" (or "RoundRobin"), "hash_name" (or "HashName"), or a function
                    (block names, servers) -> servers
    prefetch:       True reads the rows of the next batch during the current step (in async mode these rows miss the
                    update of the current step)
    wire:           "bfloat16" sends rows and their gradients (not dense parameters) in 16 bits: half the bytes between
                    hosts, and mode "sync" becomes inexact; default "float32"
    server_device:  device of dense blocks on servers: "cpu" or "cuda"
    journal:        True writes every update to disk before it is confirmed
    replica:        True also sends the journal to the next server
    snapshot_every: seconds between two snapshots of a server's state, default 60
    journal_mb:     size of the journal in MB that also causes a snapshot, default 2048
    patience:       seconds without a message before a worker is considered lost, default 60
    timeout:        seconds without a message before a server is considered lost, default 120

    >>> strategy = echelon.Strategy(ps=echelon.ParameterServer(mode="bounded", staleness=2))
    """

    mode: Literal["sync", "async", "bounded", "geo", "hybrid", "collective"] = "sync"
    sync_mode: bool | None = None
    dense: Literal["servers", "allreduce"] | None = None
    staleness: int = 4
    k_steps: int = 8
    compensate: float = 0.0
    slice_var_up: bool = True
    min_block_size: int = 8192
    split_method: str | Callable[..., Any] = "round_robin"
    prefetch: bool = True
    wire: Literal["float32", "bfloat16"] = "float32"
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
        if self.mode in ("hybrid", "collective"):
            require(self.dense != "servers", self, "dense", f"'allreduce' (or nothing) with mode='{self.mode}'")
            object.__setattr__(self, "dense", "allreduce")
        if self.mode == "hybrid":
            object.__setattr__(self, "mode", "async")
        if self.mode == "geo":
            require(self.dense != "allreduce", self, "dense", "'servers' (or nothing) with mode='geo'")
            require(self.wire == "float32", self, "wire", "'float32' with mode='geo', whose changes include state")
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
