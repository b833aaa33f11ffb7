"""Synchronized batch norm for layers of any class: statistics are computed over all replicas.

A layer with torch's own forward gets a direct implementation. Any other forward (timm's BatchNormAct2d, a module that
calls ``F.batch_norm``) runs unchanged, and its calls of ``F.batch_norm`` and ``torch.batch_norm`` are intercepted.
A layer gets a new class instead of a patched method, because a patched method would still refer to the original layer
in a deep copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.base.lazy_dynamo import hide_from_dynamo
from echelon.parallel.data.batch_norm import batch_norm_over
from echelon.plan.batch_norms import BatchNorm

BeforeSync = Callable[[str, str], None]
_PLAIN = "_class_without_sharing"


@dataclass
class BatchNormSync:
    """Batch norm of one layer with statistics over all replicas.

    name:   the layer's name in the model
    before_sync: callback, called with the name and "forward" or "backward" before each collective
    remark: callback for a line about statistics that cannot be synchronized; None after it has been called
    """

    name: str
    group: dist.ProcessGroup
    before_sync: BeforeSync | None
    remark: Callable[[str], None] | None

    def __post_init__(self) -> None:
        self._before_sync = None if self.before_sync is None else functools.partial(self.before_sync, self.name)

    @hide_from_dynamo
    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return the result of ``F.batch_norm``; in training mode, with statistics over the batches of all replicas."""
        if not training or _is_weight(input):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return batch_norm_over(
            self.group,
            _whole(input),
            running_mean=running_mean,
            running_var=running_var,
            weight=weight,
            bias=bias,
            momentum=momentum,
            eps=eps,
            before_sync=self._before_sync,
        )

    def say_once(self, line: str) -> None:
        if self.remark is not None:
            self.remark(line)
            self.remark = None

    def end_remarks(self) -> None:
        """Stop looking for differences after the first forward."""
        self.remark = None


def synchronize(
    model: nn.Module,
    names: Iterable[str],
    group: dist.ProcessGroup,
    before_sync: BeforeSync | None = None,
    remark: Callable[[str], None] = lambda line: None,
) -> None:
    """Synchronize the statistics of the named layers over ``group``. Weights, buffers and names do not change."""
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name]
        kind = type(module)
        base = _SyncedBatchNorm if kind.forward in _TORCHS_OWN else _SyncedModule
        fields = {"sharing": BatchNormSync(name, group, before_sync, remark), _PLAIN: kind}
        module.__class__ = type(f"Synchronized{kind.__name__}", (base, kind), fields)


def make_local(model: nn.Module) -> None:
    """Make all batch norms use local statistics: undo ``synchronize``, and replace torch's SyncBatchNorm.

    SyncBatchNorm synchronizes over all ranks of the job, including pipeline stages and split ranks, and does not
    support a CPU.
    """
    for module in model.modules():
        kind = getattr(type(module), _PLAIN, type(module))
        if kind is not type(module):  # a traced module would pass even an assignment of the same class to what it wraps
            module.__class__ = kind
        if isinstance(module, nn.SyncBatchNorm) and not issubclass(kind, _LocalStatistics):
            # This class comes after the user's class, so that the user's forward stays and calls it as super().forward.
            own = _LocalStatistics if kind is nn.SyncBatchNorm else type(kind.__name__, (kind, _LocalStatistics), {})
            module.__class__ = own


class _LocalStatistics(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return BatchNorm.forward(self, input)


_TORCHS_OWN = (BatchNorm.forward, _LocalStatistics.forward, nn.SyncBatchNorm.forward)


class _SyncedBatchNorm(BatchNorm):
    """A batch norm with torch's own forward."""

    sharing: BatchNormSync

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.track_running_stats:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        track = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if track and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        return self.sharing.batch_norm(
            x,
            running_mean=self.running_mean if track else None,
            running_var=self.running_var if track else None,
            weight=self.weight,
            bias=self.bias,
            training=True,
            momentum=momentum,
            eps=self.eps,
        )


class _SyncedModule(nn.Module):
    """A layer with any other forward, whose batch norm calls are synchronized."""

    sharing: BatchNormSync

    @hide_from_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or self.sharing.remark is None:
            with _BatchNormInterceptor(self.sharing):
                return super().forward(*args, **kwargs)
        return self._first_forward(*args, **kwargs)

    def _first_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, and report what differs from a run in one process."""
        before = _running_statistics(self)
        with _BatchNormInterceptor(self.sharing) as calls:
            result = super().forward(*args, **kwargs)
        where = f"batch norm: '{self.sharing.name}' ({getattr(type(self), _PLAIN).__name__})"
        rows = next((leaf.shape[0] for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor) and leaf.dim()), 0)
        other = next((count for count in calls.rows if count != rows), rows)
        if not calls.rows and not all(map(torch.equal, before, _running_statistics(self))):
            self.sharing.say_once(f"{where} computes statistics without F.batch_norm; they stay per replica")
        elif other != rows:
            self.sharing.say_once(
                f"{where} normalizes {other} rows of {rows} by themselves, chosen by their place in each replica's "
                "batch; one process chooses by their place in the global batch"
            )
        self.sharing.end_remarks()
        return result


def _running_statistics(module: nn.Module) -> list[Tensor]:
    """Return copies of the buffers: batch norm kernels do not increment a tensor's version counter."""
    return [value.clone() for value in module._buffers.values() if value is not None]


class _BatchNormInterceptor(TorchFunctionMode):
    """Context in which batch norm calls are synchronized; ``rows`` lists the number of rows of each call's input."""

    def __init__(self, sharing: BatchNormSync) -> None:
        super().__init__()
        self._sharing = sharing
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._shared(*args, **kwargs)
        if func is torch.batch_norm:
            return self._shared(**_as_functional(*args, **kwargs))
        return func(*args, **kwargs)

    def _shared(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _is_weight(input):
            self.rows.append(input.shape[0])
        return self._sharing.batch_norm(input, *args, **kwargs)


def _as_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> dict[str, Any]:
    """Return the arguments of ``torch.batch_norm`` by the names of ``F.batch_norm``."""
    statistics = {"running_mean": running_mean, "running_var": running_var}
    options = {"weight": weight, "bias": bias, "training": training, "momentum": momentum, "eps": eps}
    return {"input": input, **statistics, **options}


def _is_weight(tensor: Tensor) -> bool:
    """Return True for a parameter or a view of one: weight standardization does not depend on the batch."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the whole tensor if it is split over ranks."""
    return cast(Tensor, tensor.whole()) if hasattr(tensor, "whole") else tensor
