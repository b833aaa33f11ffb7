"""Compute the figures of a Device and a Link from measured rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from echelon.planner.cluster.cluster import Curve, Device
from echelon.planner.cost.compute import kernel_seconds, thin_part, tile_part
from echelon.tools.bench.device_timer import Row
from echelon.tools.bench.engine_costs import engine_figures
from echelon.tools.bench.gpu_figures import gpu_figures
from echelon.tools.bench.launch_overhead import training
from echelon.tools.bench.overlap import hidden_part

Rows = dict[str, list[Row]]
Points = list[tuple[float, float]]


def device_figures(rows: Rows, device: Device, known: bool) -> dict[str, Any]:
    """Return the figures of a device as an entry of a bench file.

    known:  the device catalog has this device's peaks and bandwidth, which are kept; otherwise the peak is the highest
            rate measured, and the bandwidth is the rate of the largest stream
    """
    products = {name.split()[1]: part for name, part in rows.items() if name.startswith("products ")}
    together = [row for name, part in rows.items() if name != "alone" for row in part]
    computed = {dtype: [row for row in together if row.get("dtype") == dtype and "flops" in row] for dtype in products}
    best = {dtype: max(_rate(row) for row in part) for dtype, part in computed.items()}
    peak = {dtype: device.peak_of(dtype) if known else best[dtype] for dtype in products}
    bandwidth = device.bandwidth if known else _rate(rows["streams"][-1], "bytes")
    thin = _thin(rows.get("thin", ()))
    curves = {
        dtype: rising(
            (row["flops"], _product_part(row, peak[dtype], device.cores, thin)) for row in _computing(part, bandwidth)
        )
        for dtype, part in products.items()
    }
    launches = {row["what"]: row["seconds"] for row in rows["launch"]}
    synchronous = device.name == "CPU"  # the host is the device, so launch time adds to kernel time
    half = [dtype for dtype in ("bfloat16", "float16", "float32") if dtype in products][0 if known else -1]
    figures: dict[str, Any] = {
        "launch": launches["chain"],
        "floor": launches["device"],
        "products": curves[half],
        "products_by": curves,
        "streams": _streams(rows["streams"], bandwidth),
        "update": _rate(rows["update"][0], "bytes") / bandwidth,
        "updates": {row["optimizer"]: _rate(row, "bytes") / bandwidth for row in rows["update"][1:]},
    }
    if synchronous:
        figures["overhead"] = max(0.0, launches["chain"] - launches["bare"])
        figures["thin"] = thin
        figures["function"] = rows["functions"][0]["seconds"] / rows["functions"][0]["entries"]
        figures["engine"] = _engine(rows, launches["chain"])
    convolutions = {
        name.split()[1]: rising((row["flops"], _rate(row) / peak[name.split()[1]]) for row in part)
        for name, part in rows.items()
        if name.startswith("convolutions ")
    }
    figures["convolutions"] = convolutions.get(half, convolutions["float32"])
    figures["convolutions_by"] = convolutions
    for name, part in rows.items():
        if name.startswith("attention "):
            plain = [row for row in part if not row.get("causal")]
            figures["attention"] = statistics.median(_rate(row) / peak[name.split()[1]] for row in plain)
    figures |= {} if known else {"peak": peak, "bandwidth": bandwidth}
    if not synchronous:
        figures |= gpu_figures(rows, figures["streams"], bandwidth, peak)
    if synchronous:
        figures["training"] = _in_training(replace(device, **figures), rows["training"][0]["seconds"])
    return figures


def _engine(rows: Rows, launch: float) -> dict[str, float]:
    if "engine" not in rows:
        return {}
    shortest = min(row["seconds"] for row in rows["collectives"] if row["kind"] == "all_reduce")
    return engine_figures(rows["engine"], launch, shortest)


def _in_training(device: Device, seconds: float) -> float:
    """Return the time of a training step divided by the summed times of its kernels run alone; at least 1."""
    from echelon.planner.profiling.profile import profile

    model, batch = training()
    units = profile(model, (batch,), call=lambda model, batch: model(batch[0]).sum()).sheet(len(batch)).units
    kernels = [kernel for unit in units for way in (unit.forward, unit.backward) for kernel in way.kernels]
    return max(1.0, seconds / sum(kernel.count * kernel_seconds(kernel, device) for kernel in kernels))


def _computing(rows: list[Row], bandwidth: float) -> list[Row]:
    """Return the products that are compute-bound, or all of them if none is.

    Products with a small k are memory-bound, and the cost model counts those by their bytes.
    """
    return [row for row in rows if _moved(row) / bandwidth < row["seconds"] / 2] or rows


def _moved(row: Row) -> float:
    batch, m, n, k = row["shape"]
    return float(batch * (m * k + k * n + m * n) * (2 if row["dtype"] in ("bfloat16", "float16") else 4))


def _product_part(row: Row, peak: float, cores: int, thin: Curve) -> float:
    """Return the fraction of the peak with tile quantization and thin shapes factored out.

    The cost model applies both factors again when it reads the curve.
    """
    shape = tuple(row["shape"])
    return _rate(row) / peak / tile_part(shape, cores) / thin_part(shape, thin)


def _thin(rows: Sequence[Row]) -> Curve:
    """Return the rate by smallest dimension, relative to the thickest product."""
    points = [(float(min(row["shape"][1:])), _rate(row)) for row in rows]
    return tuple((size, rate / points[-1][1]) for size, rate in _pooled(points))


def _rate(row: Row, what: str = "flops") -> float:
    return float(row[what] / row["seconds"])


def _streams(rows: Sequence[Row], bandwidth: float) -> Curve:
    """Return the fraction of the bandwidth by bytes; it may fall, because data that fits into a cache is faster."""
    return tuple((row["bytes"], _rate(row, "bytes") / bandwidth) for row in rows)


def rising(points: Iterable[tuple[float, float]]) -> Curve:
    """Return a non-decreasing curve through points of many shapes.

    It takes the median of each third of a decade, then a monotonic fit, so that measurement noise does not give a
    larger product a lower rate.
    """
    bins: dict[int, Points] = defaultdict(list)
    for size, value in points:
        bins[round(math.log10(size) * 3)].append((size, value))
    middles = [_middle(inside) for _, inside in sorted(bins.items())]
    return _pooled(middles)


def _middle(points: Points) -> tuple[float, float]:
    size = math.exp(statistics.fmean(math.log(size) for size, _ in points))
    return size, statistics.median(value for _, value in points)


def _pooled(points: Points) -> Curve:
    """Return the non-decreasing curve nearest to the points (isotonic regression by pooling adjacent violators)."""
    pools: list[list[tuple[float, float]]] = []
    for point in points:
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return tuple((size, _mean(pool)) for pool in pools for size, _ in pool)


def _mean(pool: Points) -> float:
    return statistics.fmean(value for _, value in pool)


def link_figures(rows: Rows, name: str) -> dict[str, Any]:
    """Return the figures of a link as an entry of a bench file.

    Tables of collectives are as measured; latency and bandwidth are fitted to point-to-point messages.
    """
    tables: dict[tuple[str, int], Points] = defaultdict(list)
    for row in rows["collectives"]:
        tables[row["kind"], row["ranks"]].append((row["bytes"], row["seconds"]))
    latency, bandwidth = alpha_beta(tables["p2p", 2])
    return {
        "name": name,
        "bandwidth": bandwidth,
        "latency": latency,
        "overlap": hidden_part(rows["overlap"][0]),
        "skew": rows["overlap"][0].get("skew", 0.0),
        "tables": [
            {"kind": kind, "ranks": ranks, "seconds": points} for (kind, ranks), points in sorted(tables.items())
        ],
    }


def alpha_beta(points: Points) -> tuple[float, float]:
    """Return (latency, bandwidth) of ``seconds = latency + bytes / bandwidth``.

    The fit is by least squares of relative errors, so that small messages count as much as large ones.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    over = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weights, points, strict=True))
    under = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    slope = max(over / under, 1e-15) if under else 1e-15
    return max(y - slope * x, 1e-9), 1 / slope
