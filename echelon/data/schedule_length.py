"""``steps``: the number of optimizer updates of a training run, before there is an engine."""

from __future__ import annotations

from typing import Any

from echelon.base.errors import UsageError
from echelon.data.loader import Loader
from echelon.data.order import per_replica
from echelon.data.torch_loader import loader_request
from echelon.distributed import world as worlds


def steps(
    data: Any,
    *,
    batch_size: int | None = None,
    global_batch: int | None = None,
    epochs: int = 1,
    gradient_merge: int = 1,
    replicas: int | None = None,
    **options: Any,
) -> int:
    """Return the number of updates in ``epochs`` epochs of ``data``, for an LR schedule made before ``distribute``.

    data:           data set or torch DataLoader for ``engine.loader``, or the loader that it returned
    batch_size:     samples per replica; from a DataLoader by default
    global_batch:   samples of all replicas together, in place of ``batch_size``
    epochs:         number of epochs, default 1
    gradient_merge: as in ``Strategy``
    replicas:       copies of the model; all processes of the job by default, fewer if several ranks share a copy
    options:        options of ``engine.loader``: ``uneven``, ``sampler``, ``drop_last``, ...

    >>> total = echelon.steps(dataset, global_batch=64, epochs=10)
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    """
    if epochs < 0 or gradient_merge < 1:
        raise UsageError(
            f"steps(epochs={epochs}, gradient_merge={gradient_merge}): expected epochs of 0 or more and "
            "gradient_merge of 1 or more"
        )
    if isinstance(data, Loader):
        return epochs * len(data) // gradient_merge
    requested = loader_request(data, batch_size, global_batch, options)
    replicas = replicas or worlds.current().size
    made = {**requested.options, "workers": 0, "rank": 0, "world_size": requested.options.get("world_size", replicas)}
    if "batch_sampler" not in made:
        made["batch_size"] = _size(requested.batch_size, requested.global_batch, replicas)
    return epochs * len(Loader(requested.dataset, **made)) // gradient_merge


def _size(batch_size: int | None, global_batch: int | None, replicas: int) -> int:
    if (batch_size is None) == (global_batch is None):
        raise UsageError("steps() takes either batch_size (for each replica) or global_batch (for all together)")
    return batch_size if global_batch is None else per_replica(global_batch, replicas)  # type: ignore[return-value]
