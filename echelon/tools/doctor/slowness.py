"""Detection of ranks, rank pairs and disks that are far slower than the median of the others."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from echelon.tools.doctor.doctor_report import DoctorFinding, DoctorReport, listed
from echelon.tools.doctor.host_details import Details

K = TypeVar("K", bound=Hashable)
#: Factor from the median beyond which a value is an outlier.
FAR = 1.5


@dataclass(frozen=True)
class SpeedMetric:
    """One measured figure: its key in the details, its name in the report, and the better direction."""

    figure: str
    words: str
    more_is_better: bool = True


RANK = (
    SpeedMetric("float32", "float32 products"),
    SpeedMetric("bfloat16", "bfloat16 products"),
    SpeedMetric("memory", "its memory"),
)
PAIR = (SpeedMetric("latency", "latency", False), SpeedMetric("bandwidth", "bandwidth"))
DISK = (SpeedMetric("write", "writing"), SpeedMetric("read", "reading"), SpeedMetric("fsync", "fsync", False))


def slow(values: Mapping[K, float], *, more_is_better: bool) -> dict[K, float]:
    """Return the factor from the median for each value that is worse than the median by more than ``FAR``."""
    if len(values) < 2:
        return {}
    middle = statistics.median(values.values())
    if middle <= 0:
        return {}
    factors = {
        key: (middle / value if value else float("inf")) if more_is_better else value / middle
        for key, value in values.items()
    }
    return {key: factor for key, factor in factors.items() if factor > FAR}


def slow_ones(
    things: Mapping[Any, Mapping[str, Any]], measures: tuple[SpeedMetric, ...]
) -> dict[Any, dict[str, float]]:
    """Return, for each slow item, its slow figures and the factor by which they are worse than the median."""
    result: dict[Hashable, dict[str, float]] = {}
    for measure in measures:
        values = {key: details[measure.figure] for key, details in things.items() if measure.figure in details}
        for key, factor in slow(values, more_is_better=measure.more_is_better).items():
            result.setdefault(key, {})[measure.figure] = factor
    return result


def rank_speeds(report: DoctorReport) -> dict[int, dict[str, float]]:
    return {rank: details["speeds"] for rank, details in report.ranks.items() if "speeds" in details}


def disk_speeds(report: DoctorReport) -> dict[int, dict[str, float]]:
    return dict(report.part("disk"))


def slow_findings(report: DoctorReport) -> list[DoctorFinding]:
    ranks = slow_ones(rank_speeds(report), RANK)
    result = [
        DoctorFinding(f"rank {rank} (host {report.name(report.ranks[rank]['node'])}) is slow: {_words(figures, RANK)}")
        for rank, figures in ranks.items()
    ]
    result += _slow_links(report)
    disks = slow_ones(disk_speeds(report), DISK)
    return result + [
        DoctorFinding(f"host {report.name(node)}: its disk is slow: {_words(of, DISK)}") for node, of in disks.items()
    ]


def slow_hosts(report: DoctorReport) -> dict[int, dict[str, float]]:
    """Return the hosts whose best link is slow, with the slow figures.

    A slow host slows all its links: with three hosts, one slow host makes two of three links slow.
    """
    links: dict[int, list[Details]] = {}
    for pair, row in report.between().items():
        for node in _nodes(report, pair):
            links.setdefault(node, []).append(row)
    return slow_ones({node: _best(rows) for node, rows in links.items()}, PAIR)


def slow_pairs(report: DoctorReport) -> dict[tuple[int, int], dict[str, float]]:
    """Return the slow pairs of ranks on hosts that are not slow themselves."""
    hosts = slow_hosts(report)
    rest = {pair: row for pair, row in report.between().items() if not hosts.keys() & set(_nodes(report, pair))}
    return slow_ones(rest, PAIR)


def _slow_links(report: DoctorReport) -> list[DoctorFinding]:
    """Return findings for hosts that are slow to all, then for slow pairs of hosts, then for slow pairs of ranks."""
    result = [
        DoctorFinding(f"host {report.name(node)}: its network is slow: {_words(figures, PAIR)} of the hosts")
        for node, figures in slow_hosts(report).items()
    ]
    links: dict[tuple[int, int], list[Details]] = {}
    for pair, row in report.between().items():
        if not slow_hosts(report).keys() & set(_nodes(report, pair)):
            links.setdefault(_nodes(report, pair), []).append(row)
    couples = slow_ones({nodes: _typical(rows) for nodes, rows in links.items()}, PAIR)
    result += [
        DoctorFinding(f"the link between hosts {report.name(a)} and {report.name(b)} is slow: {_words(figures, PAIR)}")
        for (a, b), figures in couples.items()
    ]
    for pair, figures in slow_pairs(report).items():
        if _nodes(report, pair) not in couples:
            a, b = (f"{rank} (host {report.name(report.ranks[rank]['node'])})" for rank in pair)
            result.append(DoctorFinding(f"the link between rank {a} and rank {b} is slow: {_words(figures, PAIR)}"))
    return result


def _best(rows: list[Details]) -> Details:
    return {
        measure.figure: (max if measure.more_is_better else min)(row[measure.figure] for row in rows)
        for measure in PAIR
    }


def _nodes(report: DoctorReport, pair: tuple[int, int]) -> tuple[int, int]:
    return int(report.ranks[pair[0]]["node"]), int(report.ranks[pair[1]]["node"])


def _typical(rows: list[Details]) -> Details:
    return {measure.figure: statistics.median(row[measure.figure] for row in rows) for measure in PAIR}


def _words(figures: Mapping[str, float], measures: tuple[SpeedMetric, ...]) -> str:
    words = [
        f"{measure.words} {figures[measure.figure]:.1f}x worse" for measure in measures if measure.figure in figures
    ]
    return f"{listed(words)} than the median"
