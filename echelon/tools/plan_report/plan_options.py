"""The checked options of ``echelon plan``; a saved plan and the child process of a script receive them as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from echelon.base.config import strict
from echelon.base.errors import UsageError, nearest
from echelon.base.option_checks import at_least
from echelon.base.quantities import quantity
from echelon.planner.cluster.cluster import Cluster, with_memory_limit
from echelon.planner.plan_search.plan_shapes import APPROXIMATE


@strict
class PlanOptions:
    """The options of one ``echelon plan`` command.

    model:      ``gpt:layers=12,...``, ``file.py:callable``, ``package.module:callable``, or a script
    cluster:    a cluster description in the syntax of ``Cluster.parse``
    batch:      samples of the global batch; None: the size of the batch that comes with the model
    memory:     bytes that training may use on a device; None: the device's own figure
    allow:      names of approximate techniques that plans may use
    amp:        precision of all plans, "off" for fp32; None: that of a run without a strategy
    optimizer:  name of the optimizer whose state and update are counted; None: the script's own, or adam
    bench:      path of a file written by ``echelon bench``
    input:      description of the model's input, needed if no batch comes with the model
    keep:       number of best plans to report
    arguments:  command-line arguments of the script
    """

    model: str
    cluster: str
    batch: int | None = None
    memory: float | None = None
    allow: tuple[str, ...] = ()
    amp: Literal["bf16", "fp16", "off"] | None = None
    optimizer: str | None = None
    bench: str | None = None
    input: str | None = None
    keep: int = 10
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, number in (("global-batch", self.batch), ("keep", self.keep)):
            at_least(1, f"--{name}", number)
        for name in self.allow:
            if name not in APPROXIMATE:
                raise UsageError(f"--allow has no '{name}'{nearest(name, APPROXIMATE)}")

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "allow": list(self.allow), "arguments": list(self.arguments)}

    def machines(self) -> Cluster:
        """Return the cluster that the options name, with their memory limit."""
        return with_memory_limit(Cluster.parse(self.cluster, bench=self.bench), self.memory)


@strict
class PlanReportOptions:
    """Options for the contents of the report.

    sizes:   also plan for other numbers of devices
    save:    path to save the best plan to; None: the plan is not saved
    explain: path of a saved plan to explain instead of searching; None: search
    """

    sizes: bool = False
    save: str | None = None
    explain: str | None = None


def memory_words(text: str | None) -> float | None:
    """Return the bytes of a value of --memory such as ``60GB``."""
    return None if text is None else quantity(text, "bytes", "--memory")
