"""The ``Plan``: distribution of one model over the devices of one job; frozen, JSON, and comparable between ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from echelon.base.config import build, strict
from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.base.json_head import parse_object
from echelon.plan.former_fields import rename_former_fields
from echelon.plan.stage_trace import StageTrace
from echelon.strategy import AdaptiveLocalSgd, Amp, Dgc, Lamb, Lars, LocalSgd, Lora, LowMemory, LrScaling, Shard
from echelon.strategy.annotations.marks import Pipeline, Split
from echelon.strategy.fastpath_choice import FastPathChoice


@strict
class Parameter:
    """The properties of one parameter, which must be equal on every rank.

    name:      name of the parameter in the model
    shape:     its shape
    dtype:     its dtype, by name
    trainable: True if it has gradients
    sparse:    True if its gradients are sparse

    >>> parameter = echelon.plan.Parameter(name="weight", shape=(3, 8), dtype="float32")
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    sparse: bool = False


@strict
class Bucket:
    """Parameters whose gradients are reduced together, in the order in which backward is expected to finish them.

    optimizer:  name of the optimizer
    parameters: names of the parameters
    stages:     ranks along the stage axis that hold the parameters
    axes:       mesh axes over which the gradients are reduced
    sparse:     True if the gradients are sparse
    compressed: True if only the largest entries are sent, once DGC has begun

    >>> bucket = echelon.plan.Bucket(optimizer="0", parameters=("weight", "bias"))
    """

    optimizer: str
    parameters: tuple[str, ...]
    stages: tuple[int, ...] = (0,)
    axes: tuple[str, ...] = ("replicate",)
    sparse: bool = False
    compressed: bool = False  # once DGC has begun, only the largest entries are sent

    in_our_names = staticmethod(rename_former_fields)


@strict
class Plan:
    """The actions of all ranks. Two ranks with equal hashes run the same collectives in the same order.

    mesh, order:    sizes of the axes (see base/mesh.py), and the ranks in the order of mesh positions; () for 0, 1, ...
    model:          all parameters
    buckets:        parameters whose gradients are reduced together
    splits:         modules whose weights are cut over the split axis
    batch_per_split_rank: True if ranks along the split axis have different batches; False if they share one
    pipeline:       number of micro-batches and schedule of the pipeline; None without a pipeline
    stages:         units and needs of each stage; found with the first batch
    shard:          tensors that are sharded over replicas
    shares:         relative sizes of the replicas' batches; () if they are equal
    ranks_per_host: number of ranks that reduce within a host before communication between hosts; 1: hosts are ignored
    comm_dtype:     16-bit dtype in which gradients (DGC: values, LocalSGD: weight changes) are sent; None: as they are
    recompute:      modules that are recomputed together in backward, one tuple per segment
    recompute_chains: sequences that are cut into segments by the first batch
    offload:        True if kept activations of segments move to host memory
    lars, lamb:     optimizer that replaces the given one; ``no_weight_decay`` has the parameters without weight decay
    no_weight_decay: see lars
    local:          LocalSGD settings, if ranks step alone and average weights from time to time
    low_memory:     16-bit weights with remainders and 8-bit moments, updated during backward
    lora:           adapters that the model has from the strategy; their matrices are among the parameters
    fast:           fast paths that were chosen automatically
    sync_batch_norm: modules whose batch-norm statistics are computed over all replicas
    bucket_mb:      sizes of the first and of the other buckets, in MB
    communicators:  as in ``Reduction``
    reduce_op:      ``op`` of ``Reduction``
    gradient_merge, clip, amp, dgc, lr_scaling: as in ``Strategy``
    version:        version of the format

    >>> print(engine.plan.describe())
    """

    mesh: dict[str, int]
    order: tuple[int, ...] = ()
    model: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    splits: dict[str, Split] = dataclasses.field(default_factory=dict)
    batch_per_split_rank: bool = False
    pipeline: Pipeline | None = None
    stages: StageTrace | None = None
    shard: Shard | None = None
    shares: tuple[float, ...] = ()
    ranks_per_host: int = 1
    communicators: int = 1
    reduce_op: str = "auto"
    comm_dtype: str | None = None
    gradient_merge: int = 1
    clip: float | None = None
    amp: Amp | None = None
    recompute: tuple[tuple[str, ...], ...] = ()
    recompute_chains: tuple[str, ...] = ()
    offload: bool = False
    lars: Lars | None = None
    lamb: Lamb | None = None
    no_weight_decay: tuple[str, ...] = ()
    dgc: Dgc | None = None
    local: LocalSgd | AdaptiveLocalSgd | None = None
    low_memory: LowMemory | None = None
    lora: Lora | None = None
    lr_scaling: LrScaling | None = None
    sync_batch_norm: tuple[str, ...] = ()
    bucket_mb: tuple[float, float] = (1.0, 25.0)
    fast: FastPathChoice = FastPathChoice()  # frozen, so one shared default is safe
    version: int = 3

    in_our_names = staticmethod(rename_former_fields)

    @property
    def ranks(self) -> int:
        """The number of devices that the plan needs: the product of the mesh axes."""
        return math.prod(self.mesh.values())

    @property
    def is_model_parallel(self) -> bool:
        """True if ranks compute different parts of the model: layers are split, or there are pipeline stages."""
        return self.mesh.get("stage", 1) * self.mesh.get("split", 1) > 1

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks see different samples."""
        return ("replicate", "split") if self.batch_per_split_rank else ("replicate",)

    @property
    def replicas(self) -> int:
        """The number of different batches that make up a global batch."""
        return self.mesh["replicate"] * (self.mesh.get("split", 1) if self.batch_per_split_rank else 1)

    @property
    def sharing(self) -> int:
        """The number of replicas that share training state: 1 without sharding, fewer than all in groups."""
        if self.shard is None:
            return 1
        return self.shard.within if isinstance(self.shard.within, int) else self.mesh["replicate"]

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON text.

        indent: spaces per level; default: one line

        >>> text = engine.plan.to_json(indent=2)
        """
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan of a text that ``to_json`` wrote.

        text: JSON text

        >>> plan = echelon.Plan.from_json(engine.plan.to_json())
        """
        try:
            return build(cls, parse_object(text))
        except ValueError as error:  # UsageError is one
            raise UsageError(f"this is not a plan: {error}; write one with Plan.to_json()") from None

    def describe(self) -> str:
        """Return a readable summary of the plan in a few lines."""
        trained = [p for p in self.model if p.trainable]
        count = sum(numel(p) for p in self.model)
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [
            f"mesh: {axes} ({things(self.ranks, 'rank')})",
            f"model: {count:,} parameters in {len(self.model)} tensors, {len(trained)} of them trained",
        ]
        lines += [line for line in (self._gradients(), *self._options()) if line]
        return "\n".join(lines)

    def _gradients(self) -> str | None:
        if self.ranks == 1:
            return None
        wire = f", {self.comm_dtype} on the wire (inexact)" if self.comm_dtype else ""
        if self.local:
            return f"weights: averaged over replicas now and then{wire}"
        op = "sum" if self.reduce_op == "sum" else "mean"
        if not self.buckets:  # buckets depend on the tensors of each rank, which stages and splits decide later
            return f"gradients: {op} over replicas{wire}" if self.replicas > 1 else None
        return (
            f"gradients: {op} over replicas, {things(len(self.buckets), 'bucket')} on "
            f"{things(self.communicators, 'communicator')}{wire}"
        )

    def _options(self) -> Iterator[str]:
        if self.splits:
            how = "each rank with a batch of its own" if self.batch_per_split_rank else "ranks share a batch"
            yield f"split: {things(len(self.splits), 'module')} over {self.mesh['split']} ranks, {how}"
        if self.pipeline is not None:
            yield f"pipeline: {self.pipeline.micro_batches} micro-batches, {self.pipeline.schedule}"
        if self.shard is not None:
            yield f"shard: {self.shard}"
        if self.gradient_merge > 1:
            yield f"gradient merge: {self.gradient_merge}"
        for name in ("clip", "amp", "lars", "lamb", "dgc", "local", "low_memory", "lora", "lr_scaling"):
            value = getattr(self, name)
            if value is not None:
                yield f"{name.replace('_', ' ')}: {value}"
        if self.recompute or self.recompute_chains:
            what = things(len(self.recompute), "segment") if self.recompute else "segments cut by the first batch"
            yield f"recompute: {what}{', kept activations in host memory' if self.offload else ''}"
        if self.no_weight_decay:
            yield f"without weight decay: {things(len(self.no_weight_decay), 'parameter')}"
        if self.sync_batch_norm:
            yield self._batch_norm_line(len(self.sync_batch_norm))

    def _batch_norm_line(self, layers: int) -> str:
        if self.pipeline is None or self.pipeline.micro_batches == 1:
            return f"batch norm: {layers} layers with statistics over all replicas"
        return (
            f"batch norm: {layers} layers with the statistics of each micro-batch over all replicas; one process has "
            "those of the whole batch, and so have stages with micro_batches=1"
        )


def first_difference(one: Any, other: Any, path: str = "plan") -> str | None:
    """Return the first difference of two plans (as JSON values) as text; None if they are equal.

    Example: ``model[3] fc.weight shape: [10, 64] against [10, 32]``.
    """
    if type(one) is type(other) and isinstance(one, dict):
        for key in sorted(one.keys() | other.keys()):
            label = one.get("name", "") if isinstance(one.get("name"), str) else ""
            if key not in one or key not in other:
                return f"{path}.{key} exists on one side only"
            result = first_difference(one[key], other[key], f"{path} {label} {key}".replace("  ", " "))
            if result:
                return result
        return None
    if isinstance(one, list) and isinstance(other, list):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            if isinstance(a, dict | list) and (result := first_difference(a, b, f"{path}[{i}]")):
                return result
        if one != other and _flat(one) and _flat(other):
            return f"{path}: {one} against {other}"
        return None if len(one) == len(other) else f"{path}: {len(one)} entries against {len(other)}"
    return None if one == other else f"{path}: {one!r} against {other!r}"


def _flat(items: list[Any]) -> bool:
    return not any(isinstance(item, dict | list) for item in items)


def numel(parameter: Parameter) -> int:
    return math.prod(parameter.shape)
