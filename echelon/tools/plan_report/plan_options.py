"""Asked: the words of ``echelon plan`` as data, checked; a saved plan and a script's child process carry it as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from echelon.base.config import strict
from echelon.base.errors import UsageError, nearest
from echelon.base.quantities import quantity
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.plan_search.plan_shapes import APPROXIMATE


@strict
class PlanOptions:
    """model:   ``gpt:layers=12,...``, ``file.py:callable``, ``package.module:callable``, or a script
    cluster:    as ``Cluster.parse`` reads it
    batch:      samples of the global batch; None: as many as the batch that comes with the model
    memory:     bytes a device may use, in place of what it has
    allow:      approximate means that may be used
    optimizer:  whose state and update are counted; None: the script's own, or adam
    bench:      a file of ``echelon bench``
    input:      what the model is called with, where no batch comes with it
    arguments:  of a script
    """

    model: str
    cluster: str
    batch: int | None = None
    memory: float | None = None
    allow: tuple[str, ...] = ()
    optimizer: str | None = None
    bench: str | None = None
    input: str | None = None
    keep: int = 10
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, number in (("global-batch", self.batch), ("keep", self.keep)):
            if number is not None and number < 1:
                raise UsageError(f"--{name} {number}: expected 1 or more")
        for name in self.allow:
            if name not in APPROXIMATE:
                raise UsageError(f"--allow has no '{name}'{nearest(name, APPROXIMATE)}")

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "allow": list(self.allow), "arguments": list(self.arguments)}

    def machines(self) -> Cluster:
        """The cluster that was asked for, with the memory that was asked for."""
        from echelon.planner.plan_search.search import with_memory_limit

        return with_memory_limit(Cluster.parse(self.cluster, bench=self.bench), self.memory)


@strict
class PlanReportOptions:
    """What is to be made of it.

    sizes:   ask for other numbers of devices too
    save:    where the best plan goes
    explain: a saved plan, to be explained in place of a search
    """

    sizes: bool = False
    save: str | None = None
    explain: str | None = None


def memory_words(text: str | None) -> float | None:
    """``60GB`` in bytes."""
    return None if text is None else quantity(text, "bytes", "--memory")
