"""Counting what is sent: a mode that notes every collective torch.distributed runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather"}


class Collectives(TorchDispatchMode):
    """``with Collectives() as sent: ...`` then ``sent.count == {"all_reduce": 1}``.

    An exchange between all pairs of ranks over Gloo (reduce-scatter, all-to-all) is ``ranks - 1`` of "send" and as many
    of "recv".
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.count[_NAMES.get(name, name.rstrip("_"))] += 1
        return func(*args, **(kwargs or {}))
