"""Public function ``gather_batch``: features of the global batch, for losses that compare samples with each other."""

from __future__ import annotations

from typing import Any, overload

import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.base.lazy_dynamo import hide_from_dynamo


@overload
def gather_batch(features: Tensor, /) -> Tensor: ...


@overload
def gather_batch(features: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...


@hide_from_dynamo
def gather_batch(*features: Any) -> Any:
    """Gather the rows (dimension 0) of all replicas, with gradients; in one process, return the arguments.

    features: tensors with a row per sample

    Every replica gets the rows of the global batch in replica order, as ``engine.loader`` distributes them; shares may
    be uneven. A mean loss of the gathered rows, computed on every replica, has the value and the gradients that one
    process computes. In a pipeline the rows are those of one micro-batch.

    >>> images, texts = echelon.nn.gather_batch(images, texts)
    """
    from echelon.parallel.data.batch_rows import BatchRows
    from echelon.parallel.tensor import ShardedActivation

    plain = [each.whole() if isinstance(each, ShardedActivation) else each for each in features]
    for each in plain:
        if not isinstance(each, Tensor) or each.dim() == 0:
            got = "a scalar" if isinstance(each, Tensor) else type(each).__name__
            raise UsageError(f"gather_batch(): takes tensors with a row for each sample, got {got}")
    rows = BatchRows.current
    if rows is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError("gather_batch(): no model is distributed; call echelon.distribute() first")
    gathered = plain if rows is None else rows.gather(plain)
    return gathered[0] if len(features) == 1 else tuple(gathered)
