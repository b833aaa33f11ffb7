"""Build a PlanReport from a SearchResult: cluster figures, units of each stage, rejected plans with reasons."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from echelon.base.formatting import size
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.model_costs import ProfileLike
from echelon.planner.plan_search.search_result import PlanChoice, RejectedPlan, SearchResult
from echelon.tools.plan_report.report_data import ClusterFigure, ClusterSummary, PlanAlternative, PlanReport, StageUnits


def build_plan_report(
    profile: ProfileLike, cluster: Cluster, batch: int, answer: SearchResult, options: dict[str, Any]
) -> PlanReport:
    """Return the report without its sensitivities and sizes, which need more searches."""
    best = answer.best[0] if answer.best else None
    nearest = answer.nearest
    return PlanReport(
        model=profile.name,
        units=len(profile.names),
        weights=weights(profile),
        batch=batch,
        machines=machines(cluster),
        asked=options,
        options=answer.best,
        stages=tuple(stages(profile, best.draft)) if best else (),
        neighbours=tuple(map(_rejected, answer.rejected)),
        approximate=tuple(
            PlanAlternative(means.name, means.prediction.seconds, means.against, "", str(means.draft))
            for means in answer.would_help
        ),
        notes=answer.notes,
        considered=answer.considered,
        seconds=answer.seconds,
        nearest=PlanChoice(nearest.draft, nearest.prediction) if nearest else None,
        reason=nearest.reason if nearest else "",
    )


def _rejected(other: RejectedPlan) -> PlanAlternative:
    seconds = other.prediction.seconds if other.prediction else None
    return PlanAlternative(other.what or str(other.draft), seconds, other.against, other.reason, str(other.draft))


def weights(profile: ProfileLike) -> float:
    """Return the number of parameter elements; tied parameters are counted once."""
    sheet = profile.sheet(1)
    twice = sum((len(tie) - 1) * entries for tie, entries in zip(profile.ties, sheet.tied, strict=True))
    return sum(unit.weights for unit in sheet.units) - twice


def stages(profile: ProfileLike, draft: Draft) -> Iterator[StageUnits]:
    bounds = (0, *draft.cuts, len(profile.names))
    for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
        recompute = bool(draft.recompute) and draft.recompute[stage]
        yield StageUnits(stage, stage % draft.stage, profile.names[first:end], recompute)


# ---- the cluster ----


def machines(cluster: Cluster) -> ClusterSummary:
    return ClusterSummary(str(cluster), _in_words(cluster), cluster.size, tuple(_figures(cluster)))


def _in_words(cluster: Cluster) -> str:
    """Return ``4 hosts of 8 H100 (80 GB each) over NVLink (450 GB/s), 8x400 Gb/s a host between hosts``."""
    groups = " and ".join(_host_in_words(count, host) for count, host in cluster.hosts)
    return f"{groups}, {_link_in_words(cluster.network)} between hosts" if cluster.host_count > 1 else groups


def _link_in_words(link: Link) -> str:
    return link.name if "/s" in link.name else f"{link.name} ({size(link.bandwidth)}/s)"


def _host_in_words(count: int, host: Host) -> str:
    names = [device.name for device in host.devices]
    kinds = " and ".join(f"{names.count(name):,} {name}" for name in dict.fromkeys(names))
    least = min(device.memory for device in host.devices)
    inside = f" over {_link_in_words(host.link)}" if len(names) > 1 else ""
    return f"{count:,} host{'s' if count > 1 else ''} of {kinds} ({size(least)} each){inside}"


def _figures(cluster: Cluster) -> Iterator[ClusterFigure]:
    for device in cluster.kinds:
        yield from sorted(_of_device(device), key=lambda figure: figure.origin)
    links = {host.link.name: host.link for _, host in cluster.hosts if len(host.devices) > 1}
    if cluster.host_count > 1:
        links[cluster.network.name] = cluster.network
    for link in links.values():
        yield from sorted(_of_link(link), key=lambda figure: figure.origin)


def _of_device(device: Device) -> Iterator[ClusterFigure]:
    for dtype, flops in device.peak.items():
        yield ClusterFigure(device.name, dtype, flops, "FLOP/s", device.origin_of("peak"))
    for name, what, unit in (
        ("memory", "memory", "B"),
        ("bandwidth", "memory bandwidth", "B/s"),
        ("launch", "launch", "s"),
        ("floor", "shortest kernel", "s"),
    ):
        yield ClusterFigure(device.name, what, getattr(device, name), unit, device.origin_of(name))
    for name, what in (("products", "large products reach"), ("streams", "large streams reach")):
        yield ClusterFigure(device.name, what, getattr(device, name)[-1][1], "of the peak", device.origin_of(name))
    yield ClusterFigure(
        device.name, "attention reaches", device.attention, "of the peak", device.origin_of("attention")
    )


def _of_link(link: Link) -> Iterator[ClusterFigure]:
    yield ClusterFigure(link.name, "bandwidth", link.bandwidth, "B/s", link.origin_of("bandwidth"))
    yield ClusterFigure(link.name, "latency", link.latency, "s", link.origin_of("latency"))
    if link.tables:
        yield ClusterFigure(link.name, "collectives timed", len(link.tables), "tables", link.origin_of("tables"))
