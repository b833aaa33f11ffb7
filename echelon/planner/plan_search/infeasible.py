"""The answer if no plan fits: the plan that exceeds its memory least, and the hosts or devices that would suffice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from echelon.base.formatting import things
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.device_catalog import CATALOGUE
from echelon.planner.plan_search.draft_builder import lack
from echelon.planner.plan_search.neighbours import describe_overflow
from echelon.planner.plan_search.search_result import NearestPlan, PlanChoice

if TYPE_CHECKING:
    from echelon.planner.plan_search.search import PlanSearch

MOST_HOSTS = 4096


def nearest_plan(search: PlanSearch) -> NearestPlan | None:
    """Return the plan that exceeds its memory least."""
    if search.builder.nearest is None:
        return None
    choice = search.builder.predicted(search.builder.nearest[1])
    return NearestPlan(choice.draft, choice.prediction, reason(search, choice))


def reason(search: PlanSearch, choice: PlanChoice) -> str:
    """Return a line such as ``stage 0 needs 93 of 80 GB even with recompute, shard 3: 3 more hosts would do``."""
    draft = choice.draft
    means = [
        "recompute" if any(draft.recompute) else "",
        f"shard {draft.shard}" if draft.shard else "",
        f"split {draft.split}" if draft.split > 1 else "",
        f"{draft.stage} stages" if draft.stage > 1 else "",
    ]
    even = ", ".join(word for word in means if word)
    cures = " or ".join(_cures(search, choice))
    line = describe_overflow(choice.prediction) + (f" even with {even}" if even else "")
    return f"{line}: {cures} would do" if cures else line


def _cures(search: PlanSearch, choice: PlanChoice) -> Iterator[str]:
    hosts = _more_hosts(search)
    if hosts:
        yield things(hosts, "more host")
    needed = max(memory.total for memory in choice.prediction.memory)
    device = _larger_device(search.cluster, needed)
    if device:
        yield device
    low = _low_memory(search)
    if low:
        yield low
    if not hosts and not device:
        yield f"{lack(choice):.2g} times the memory"


def _low_memory(search: PlanSearch) -> str | None:
    """Return the strategy of plain replicas with Adam's state in 8 bits, if it fits: it needs the user's consent."""
    ranks = search.devices or search.cluster.size
    if search.optimizer not in ("adam", "adamw") or search.fixed or search.batch % ranks:
        return None
    for recompute, also in (((), ""), ((True,), ", recompute=True")):
        draft = Draft(batch=search.batch, replicate=ranks, amp="bf16", recompute=recompute)
        memory = search.costs.memory(draft, search.costs.placement(draft), low_memory=True)
        if all(each.total <= each.limit for each in memory):
            return f"Strategy(low_memory=True{also}), which rounds Adam's state to 8 bits,"
    return None


def _more_hosts(search: PlanSearch) -> int | None:
    """Return the number of additional hosts with which a plan fits, found by doubling and bisection; None if none."""
    there = search.cluster.host_count
    high = 1
    while not _fits_with(search, there + high):
        high *= 2
        if there + high > max(MOST_HOSTS, 4 * there):
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_with(search, there + middle) else (middle, high)
    return high


def _fits_with(search: PlanSearch, hosts: int) -> bool:
    """Return True if the plan with the least memory of some mesh fits on ``hosts`` hosts."""
    other = search.elsewhere(more_hosts(search.cluster, hosts - search.cluster.host_count))
    return any(other.surely_fits(mesh) for mesh in other.largest_meshes())


def more_hosts(cluster: Cluster, more: int) -> Cluster:
    """Return the cluster with ``more`` additional hosts, of the kind whose devices have the most memory."""
    at = max(range(len(cluster.hosts)), key=lambda at: cluster.hosts[at][1].devices[0].memory)
    hosts = [(count + more * (place == at), host) for place, (count, host) in enumerate(cluster.hosts)]
    return dataclasses.replace(cluster, hosts=tuple(hosts), name="")


def _larger_device(cluster: Cluster, needed: float) -> str | None:
    """Return the name of the smallest device in the catalog with ``needed`` bytes of memory, or None."""
    not_it = {"CPU", *(device.name for device in cluster.kinds)}
    devices = (kind.device for kind in CATALOGUE.values())
    larger = [device for device in devices if device.memory >= needed and device.name not in not_it]
    return min(larger, key=lambda device: device.memory).name if larger else None
