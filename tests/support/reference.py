"""Every strategy once more, in plain numpy and in one process: what the ranks of a job must come to.

``simulate`` walks through the same steps as a job of several ranks. Only the gradient of the loss at given weights is
torch's; weighting, merging, scaling, clipping, compressing, averaging and stepping are written out here, one small
function each, from the formulas and not from the package's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
#: (weights, step, pass, rank, loss scale) -> loss, gradients of scale * loss
Oracle = Callable[[Arrays, int, int, int, float], tuple[float, Arrays]]


@dataclass
class Settings:
    """Settings of the reference, as numbers. Names follow the formulas."""

    ranks: int = 2
    steps: int = 20
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    merge: int = 1
    clip: float | None = None
    wire: str | None = None
    lars: dict[str, Any] | None = None
    lamb: dict[str, Any] | None = None
    dgc: dict[str, Any] | None = None
    local: dict[str, Any] | None = None
    lr_scaling: dict[str, Any] | None = None
    scale: dict[str, Any] | None = None
    schedule: Callable[[int], float] = lambda step: 1.0


@dataclass
class Rank:
    """One replica: its weights, its optimizer's state, what DGC owes, its loss scale."""

    weights: Arrays
    state: dict[str, Arrays] = field(default_factory=dict)
    updates: int = 0
    u: Arrays = field(default_factory=dict)
    v: Arrays = field(default_factory=dict)
    scale: float = 1.0
    finite: int = 0
    overflowed: int = 0
    losses: list[float] = field(default_factory=list)


def simulate(settings: Settings, weights: Arrays, oracle: Oracle) -> list[Rank]:
    s = settings
    ranks = [Rank({k: w.copy() for k, w in weights.items()}) for _ in range(s.ranks)]
    for rank in ranks:
        rank.scale = s.scale["start"] if s.scale else 1.0
    snapshot = {k: w.copy() for k, w in weights.items()}
    outer: Arrays = {k: np.zeros_like(w) for k, w in weights.items()}
    meeting = Meeting(s, snapshot, outer)
    for step in range(s.steps):
        gradients = [_merged(s, rank, i, step, oracle) for i, rank in enumerate(ranks)]
        if s.local:
            for rank, gradient in zip(ranks, gradients, strict=True):
                finite = _unscaled(rank, gradient)
                if finite:
                    _update(s, rank, _clipped(gradient, s.clip), step)
                _adapt_scale(s, rank, finite)
            meeting.after(step, ranks)
        else:
            _step_together(s, ranks, gradients, step)
    return ranks


def _merged(s: Settings, rank: Rank, index: int, step: int, oracle: Oracle) -> Arrays:
    total: Arrays = {}
    for part in range(s.merge):
        loss, gradient = oracle(rank.weights, step, part, index, rank.scale)
        rank.losses.append(loss)
        total = {k: total.get(k, 0) + g / s.merge for k, g in gradient.items()}
    return total


def _step_together(s: Settings, ranks: list[Rank], gradients: list[Arrays], step: int) -> None:
    compressed = _compressed(s, ranks[0].weights, step)
    dense = [{k: g for k, g in gradient.items() if k not in compressed} for gradient in gradients]
    mean = _mean_on_the_wire(dense, s.wire, flags=True)
    together = [mean | {k: g[k] for k in compressed} for g in gradients]
    verdicts = [_unscaled(rank, gradient) for rank, gradient in zip(ranks, together, strict=True)]
    finite = all(verdicts)
    if finite:
        if compressed:
            sparse = _exchange(s, ranks, together, compressed, step)
        for rank, gradient in zip(ranks, together, strict=True):
            whole = _clipped({k: gradient[k] for k in mean}, s.clip)
            _update(s, rank, whole, step)
            for k in compressed:
                rank.weights[k] = rank.weights[k] - _rate(s, step) * sparse[k]
    for rank in ranks:
        _adapt_scale(s, rank, finite)


# ---- loss scale ----


def _unscaled(rank: Rank, gradient: Arrays) -> bool:
    for k in gradient:
        gradient[k] = gradient[k] / rank.scale
    return all(np.isfinite(g).all() for g in gradient.values())


def _adapt_scale(s: Settings, rank: Rank, finite: bool) -> None:
    if not s.scale:
        return
    rank.finite = rank.finite + 1 if finite else 0
    rank.overflowed = 0 if finite else rank.overflowed + 1
    if rank.finite == s.scale["growth_interval"]:
        rank.scale, rank.finite = rank.scale * 2, 0
    if rank.overflowed and rank.overflowed % s.scale["backoff_after"] == 0:
        rank.scale = max(rank.scale * 0.8, 1.0)


# ---- the network ----


def round16(x: np.ndarray, wire: str) -> np.ndarray:
    if wire == "fp16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def _through_the_wire(x: np.ndarray, wire: str) -> np.ndarray:
    largest = np.abs(x).max() if x.size else 0.0
    if wire == "bf16" or largest == 0 or not np.isfinite(largest):
        return round16(x, wire)
    power = 2.0 ** math.floor(math.log2(2.0**14 / largest))
    return round16(x * power, wire) / power


def sum_on_the_wire(rows: list[np.ndarray], wire: str | None) -> np.ndarray:
    """Chunk i of every row goes to rank i, is added to what is there, and comes back."""
    if wire is None:
        return np.sum(rows, axis=0)
    length = math.ceil(len(rows[0]) / len(rows))
    chunks = []
    for owner, begin in enumerate(range(0, len(rows[0]), length)):
        parts = [row[begin : begin + length].astype(np.float32) for row in rows]
        parts = [part if i == owner else _through_the_wire(part, wire) for i, part in enumerate(parts)]
        chunks.append(_through_the_wire(np.sum(parts, axis=0), wire))
    return np.concatenate(chunks)


def _mean_on_the_wire(values: list[Arrays], wire: str | None, flags: bool) -> Arrays:
    """All parameters in one row, the last first, as backward finishes them; gradients carry a flag for each behind."""
    names = list(reversed(values[0]))
    if not names:
        return {}
    scale = len(values) if flags else 1  # gradients are divided before they travel, changes of weights afterwards
    rows = [np.concatenate([v[k].ravel() / scale for k in names]) for v in values]
    if flags:  # as large as the largest gradient, which so decides alone about the power of two
        rows = [np.append(row, np.full(len(names), np.abs(row).max())) for row in rows]
    total = sum_on_the_wire(rows, wire) / (1 if flags else len(values))
    found, begin = {}, 0
    for k in names:
        size = values[0][k].size
        found[k] = total[begin : begin + size].reshape(values[0][k].shape)
        begin += size
    return {k: found[k] for k in values[0]}


# ---- deep gradient compression ----


def _compressed(s: Settings, weights: Arrays, step: int) -> list[str]:
    if not s.dgc or step < s.dgc["begin"]:
        return []
    return [k for k, w in weights.items() if w.size >= s.dgc["min_size"]]


def _sparsity(s: Settings, step: int) -> float:
    walk = s.dgc["sparsity"]
    return walk[min(int((step - s.dgc["begin"]) * len(walk) / s.dgc["rampup"]), len(walk) - 1)]


def _exchange(s: Settings, ranks: list[Rank], gradients: list[Arrays], names: list[str], step: int) -> Arrays:
    """Contributors are ranks, or pairs of ranks that were averaged first."""
    size = s.dgc.get("ranks_per_host", 1)
    hosts = [range(first, first + size) for first in range(0, len(ranks), size)]
    n = len(hosts)
    total = {k: np.zeros_like(ranks[0].weights[k]) for k in names}
    for host in hosts:
        rank = ranks[host[0]]
        local = {k: np.mean([gradients[i][k] for i in host], axis=0) for k in names}
        local = _clipped(local, s.clip * n**-0.5 if s.clip else None)
        for k in names:
            total[k] = total[k] + _send(s, rank, k, local[k], _sparsity(s, step)) / n
    return total


def _send(s: Settings, rank: Rank, k: str, g: np.ndarray, sparsity: float) -> np.ndarray:
    g = g + s.weight_decay * rank.weights[k]
    velocity = rank.state.pop(k, {}).get("v")  # dense steps' momentum goes on in u
    u = rank.u.get(k, velocity if velocity is not None else np.zeros_like(g))
    v = rank.v.get(k, np.zeros_like(g))
    if s.nesterov:
        u = s.momentum * (u + g)
        v = v + u + g
    else:
        u = s.momentum * u + g
        v = v + u
    count = max(1, round(g.size * (1 - sparsity)))
    chosen = np.argsort(-np.abs(v).ravel(), kind="stable")[:count]
    sent = np.zeros(g.size, v.dtype)
    sent[chosen] = v.ravel()[chosen]
    if s.wire:  # contributions travel as parts of the mean
        n = s.ranks / s.dgc.get("ranks_per_host", 1)
        sent = round16(sent / n, s.wire) * n
    sent = sent.reshape(g.shape)
    mask = np.ones(g.size, bool)
    mask[chosen] = False
    rank.u[k] = u * mask.reshape(g.shape)
    rank.v[k] = v - sent
    return sent


# ---- stepping ----


def _clipped(gradient: Arrays, limit: float | None) -> Arrays:
    if limit is None or not gradient:
        return gradient
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()))
    return {k: g * min(1.0, limit / (norm + 1e-6)) for k, g in gradient.items()}


def _rate(s: Settings, step: int) -> float:
    rate = s.lr * s.schedule(step)
    if not s.lr_scaling:
        return rate
    times = s.ranks * s.merge
    full = times if s.lr_scaling["rule"] == "linear" else math.sqrt(times)
    warm = min((step + 1) / s.lr_scaling["warmup"], 1) if s.lr_scaling["warmup"] else 1
    return rate * (1 + (full - 1) * warm)


def _update(s: Settings, rank: Rank, gradient: Arrays, step: int) -> None:
    rank.updates += 1
    rate = _rate(s, step)
    step_one = _lars if s.lars else _lamb if s.lamb else _adam if s.optimizer == "adam" else _sgd
    for k, g in gradient.items():
        rank.weights[k] = step_one(s, rank, k, rank.weights[k], g, rate)


def _sgd(s: Settings, rank: Rank, k: str, w: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
    g = g + s.weight_decay * w
    state = rank.state.setdefault(k, {})
    state["v"] = s.momentum * state["v"] + g if "v" in state else g
    return w - rate * (g + s.momentum * state["v"] if s.nesterov else state["v"])


def _lars(s: Settings, rank: Rank, k: str, w: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
    out = any(part in k for part in s.lars["exclude"])
    wd = 0.0 if out else s.lars["weight_decay"]
    a, b = np.linalg.norm(w), np.linalg.norm(g)
    local = rate if out or a == 0 or b == 0 else rate * s.lars["coeff"] * a / (b + wd * a)
    state = rank.state.setdefault(k, {"v": np.zeros_like(w)})
    state["v"] = s.momentum * state["v"] + local * (g + wd * w)
    return w - state["v"]


def _moments(rank: Rank, k: str, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    state = rank.state.setdefault(k, {"m": np.zeros_like(g), "s": np.zeros_like(g)})
    state["m"] = 0.9 * state["m"] + 0.1 * g
    state["s"] = 0.999 * state["s"] + 0.001 * g * g
    t = rank.updates
    return state["m"] / (1 - 0.9**t), state["s"] / (1 - 0.999**t)


def _adam(s: Settings, rank: Rank, k: str, w: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
    m, v = _moments(rank, k, g)
    return w - rate * m / (np.sqrt(v) + 1e-8)


def _lamb(s: Settings, rank: Rank, k: str, w: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
    out = any(part in k for part in s.lamb["exclude"])
    m, v = _moments(rank, k, g)
    r = m / (np.sqrt(v) + 1e-6) + (0.0 if out else s.lamb["weight_decay"]) * w
    a, b = np.linalg.norm(w), np.linalg.norm(r)
    return w - rate * (1.0 if out or a == 0 or b == 0 else a / b) * r


# ---- LocalSGD ----


class Meeting:
    """When ranks that step alone come together, and what becomes of them."""

    def __init__(self, s: Settings, snapshot: Arrays, outer: Arrays) -> None:
        self.s, self.snapshot, self.outer = s, snapshot, outer
        self.since, self.first = 0, None
        self.k = s.local["k"] if s.local else 0
        self.ks: list[int] = []

    def after(self, step: int, ranks: list[Rank]) -> None:
        self.since += 1
        if self.first is None:
            self.first = _mean([r.losses[self.s.merge - 1] for r in ranks]), self.s.lr
        if self.since < (self.k if step + 1 > self.s.local["begin"] else 1):
            return
        self.since = 0
        self._meet(ranks)
        if "rule" in self.s.local:
            self._adapt(ranks, step)
        self.ks.append(self.k)

    def _meet(self, ranks: list[Rank]) -> None:
        changes = [{k: self.snapshot[k] - r.weights[k] for k in self.snapshot} for r in ranks]
        mean = _mean_on_the_wire(changes, self.s.wire, flags=False)
        for k, d in mean.items():
            self.snapshot[k] = self.snapshot[k] - self._outer_step(k, d)
        smallest = min(r.scale for r in ranks)
        for rank in ranks:
            rank.weights = {k: w.copy() for k, w in self.snapshot.items()}
            rank.scale = smallest
        if self.s.local.get("momentum"):
            for k in ranks[0].state:
                for part in ranks[0].state[k]:
                    mean_state = np.mean([r.state[k][part] for r in ranks], axis=0)
                    for rank in ranks:
                        rank.state[k][part] = mean_state.copy()

    def _outer_step(self, k: str, d: np.ndarray) -> np.ndarray:
        if "outer" not in self.s.local:
            return d
        rate, mu = self.s.local["outer"]
        self.outer[k] = mu * self.outer[k] + d
        return rate * (d + mu * self.outer[k])

    def _adapt(self, ranks: list[Rank], step: int) -> None:
        loss_0, lr_0 = self.first
        loss, lr = _mean([r.losses[-1] for r in ranks]), self.s.lr * self.s.schedule(step)
        ratio, k0 = lr_0 * loss / (lr * loss_0), self.s.local["init_k"]
        k = math.sqrt(ratio) * k0 if self.s.local["rule"] == "adacomm" else math.sqrt(ratio * k0)
        self.k = min(max(math.ceil(k), 1), self.s.local["max_k"])


def _mean(losses: list[float]) -> float:
    """Return the mean of the losses that did not overflow."""
    return float(np.mean([loss for loss in losses if math.isfinite(loss)]))
