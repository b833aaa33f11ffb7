"""Compute GPU figures by kind of kernel: the fraction of the bandwidth or peak that each kind reaches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from echelon.planner.cluster.cluster import Curve, read_curve
from echelon.planner.cost.compute import sort_of
from echelon.tools.bench.device_timer import Row

Rows = dict[str, list[Row]]
Points = dict[str, list[tuple[float, float]]]


def gpu_figures(rows: Rows, streams: Curve, bandwidth: float, peak: dict[str, float]) -> dict[str, Any]:
    """Return the GPU figures as entries of a bench file; empty for an older measurement without these rows."""
    if "kinds" not in rows:
        return {}
    parts: dict[str, float] = {}
    norms: Points = defaultdict(list)
    for row in rows["kinds"]:
        part = _stream_part(row, streams, bandwidth)
        if row["kind"] == "batch_norm":
            norms[row["dtype"]].append((float(row["channels"]), part))
        else:
            parts[f"{row['kind']} {row['dtype']}"] = part
    return {
        "parts": parts,
        "batch_norms_by": _curves(norms),
        "attentions_by": _attentions(rows, peak),
        "convolutions_by": _convolutions(rows, peak),
        "function": rows["functions"][0]["seconds"] / rows["functions"][0]["entries"],
    }


def _stream_part(row: Row, streams: Curve, bandwidth: float) -> float:
    whole = bandwidth * read_curve(streams, row["bytes"] / row["kernels"])
    return float(row["bytes"] / row["seconds"] / whole)


def _attentions(rows: Rows, peak: dict[str, float]) -> dict[str, Curve]:
    result: Points = defaultdict(list)
    for row in _of(rows, "attention "):
        _, _, positions, width = row["shape"]
        name = f"{row['dtype']} causal" if row["causal"] else row["dtype"]
        result[name].append((float(positions * width), row["flops"] / row["seconds"] / peak[row["dtype"]]))
    return _curves(result)


def _convolutions(rows: Rows, peak: dict[str, float]) -> dict[str, Curve]:
    """Return the curves by dtype and ``sort_of``. Convolutions of equal FLOPs count with their mean time."""
    result: Points = defaultdict(list)
    for row in _of(rows, "convolutions "):
        _, channels, _, _, size = row["shape"]
        groups = row.get("groups", 1)
        sort = sort_of((groups, 1, 1, channels // groups * size**2, channels // groups))
        result[f"{row['dtype']} {sort}".strip()].append(
            (row["flops"], peak[row["dtype"]] * row["seconds"] / row["flops"])
        )
    return {name: tuple((x, 1 / slow) for x, slow in curve) for name, curve in _curves(result).items()}


def _of(rows: Rows, prefix: str) -> list[Row]:
    return [row for name, part in rows.items() if name.startswith(prefix) for row in part]


def _curves(points: Points) -> dict[str, Curve]:
    """Return one curve per name; points of equal size are replaced by their mean."""
    curves = {}
    for name, found in points.items():
        by_size: dict[float, list[float]] = defaultdict(list)
        for size, value in found:
            by_size[size].append(value)
        curves[name] = tuple((size, sum(values) / len(values)) for size, values in sorted(by_size.items()))
    return curves
