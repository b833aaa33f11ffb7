"""Predictions of published runs: each row's model, machines, plan and system in the product's own terms.

What is fitted are figures of the product: a ``Calibration`` of the machines, and fields of a ``System``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.planner.fit_constants import FittedConstant
from benchmarks.planner.planner_truth_models import PublishedModel, Shape
from benchmarks.planner.planner_truth_rows import Row
from echelon.plan.draft import Draft
from echelon.planner.cluster.calibration import CALIBRATED, Calibration
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.device_catalog import kind_named
from echelon.planner.cost.compute import UnitSeconds
from echelon.planner.cost.known_systems import MEGATRON, MEGATRON_CORE, TORCHTITAN
from echelon.planner.cost.predict import CostModel
from echelon.planner.cost.system import System

ON_HOST = 8
OPEN_MICRO, OPEN_CHUNKS = (1, 2, 4), range(1, 9)  # values to try where a table does not say
SELECTIVE = 0.17  # fraction of a layer that Megatron-LM runs again where only attention is recomputed

#: Constants of GPT rows, with their prior values: figures of Calibration, and of System.
CONSTANTS = {
    "product": FittedConstant(1.0, 0.08, "part of the catalogue's rate that large products reach"),
    "half_product": FittedConstant(5e9, 0.7, "FLOPs of a product that reaches half of that"),
    "stream": FittedConstant(0.75, 0.1, "part of the memory bandwidth that kernels reach"),
    "half_stream": FittedConstant(6e6, 0.7, "bytes of a kernel that reaches half of that"),
    "pointwise": FittedConstant(0.9, 0.3, "bytes that pointwise kernels move, for one of the plain model"),
    "residual": FittedConstant(
        0.6, 0.2, "the same in the residual stream, where bias, dropout and addition are joined"
    ),
    "launch": FittedConstant(5e-5, 0.7, "seconds to start a kernel"),
    "bus": FittedConstant(0.75, 0.15, "part of the link inside a host that collectives reach"),
    "latency": FittedConstant(2e-5, 0.7, "seconds of one round of a collective"),
    "collective": FittedConstant(6e-5, 0.5, "seconds of the host to start a collective inside a layer"),
    "network": FittedConstant(0.6, 0.4, "part of the network that collectives reach"),
    "micro": FittedConstant(5e-4, 0.7, "seconds of the host for each micro-batch"),
    "step": FittedConstant(1e-3, 0.7, "seconds of the host for each step"),
    "update": FittedConstant(0.7, 0.3, "part of the memory bandwidth that the update reaches"),
    "unaligned": FittedConstant(3.0, 0.3, "how much longer products take whose sizes are no multiples of 8"),
}

#: The same for Llama rows on H100 and H200.
TITAN_CONSTANTS = {
    "product": FittedConstant(0.8, 0.15, "part of the catalogue's rate that large products reach"),
    "float8": FittedConstant(0.4, 0.2, "part of the 8-bit peak that they reach, casts included"),
    "attention": FittedConstant(0.75, 0.15, "part of the peak that fused attention reaches, all pairs counted"),
    "pointwise": FittedConstant(1.0, 0.15, "bytes that pointwise kernels move, for one of the plain model"),
    "compiled_pointwise": FittedConstant(0.4, 0.3, "the same with compiling, for one without"),
    "hides_split": FittedConstant(0.4, 0.4, "part of the messages inside layers that async_tp hides"),
}

#: The same for GPT rows on H100 and later GPUs.
CORE_CONSTANTS = {
    "product": FittedConstant(0.95, 0.1, "part of the catalogue's rate that large products reach"),
    "attention": FittedConstant(0.75, 0.15, "part of the peak that fused attention reaches, all pairs counted"),
    "hides_split": FittedConstant(0.5, 0.3, "part of the messages inside layers that is hidden"),
    "step": FittedConstant(2e-2, 0.7, "seconds of the host for each step"),
}

#: Constants to fit, by system.
FITTED = {"Megatron-LM": CONSTANTS, "Megatron-Core": CORE_CONSTANTS, "torchtitan": TITAN_CONSTANTS}


@dataclass(frozen=True)
class FittedFigures:
    """A Calibration and a System with some figures replaced, by name."""

    calibration: Calibration
    system: System

    def with_(self, given: Mapping[str, float]) -> FittedFigures:
        return FittedFigures(_with(self.calibration, given), _with(self.system, given))

    def value(self, name: str) -> float:
        return float(getattr(self.calibration if hasattr(self.calibration, name) else self.system, name))


def _with(owner: Any, given: Mapping[str, float]) -> Any:
    known = {field.name for field in dataclasses.fields(owner)}
    return dataclasses.replace(owner, **{name: value for name, value in given.items() if name in known})


#: The figures that the product has for each system.
FOUND = {
    system.name: FittedFigures(CALIBRATED[system.name], system) for system in (MEGATRON, MEGATRON_CORE, TORCHTITAN)
}


class Foretelling:
    """Predictions under one set of figures; what runs have in common is computed once.

    figures: figures by system, where they are not those of the product
    """

    def __init__(self, figures: Mapping[str, FittedFigures] = FOUND) -> None:
        self.figures = {**FOUND, **figures}
        self._costs: dict[object, CostModel] = {}
        self._units: dict[Hashable, dict[Hashable, UnitSeconds]] = {}

    def seconds(self, rows: Sequence[Row], simulate: bool = False) -> list[float]:
        full = needs_recompute(rows)
        return [min(self._seconds(one, full, simulate) for one in completions(row)) for row in rows]

    def _seconds(self, row: Row, full: set[Shape], simulate: bool) -> float:
        return self.costs(row).predict(draft(row, full), simulate=simulate, memory=False).seconds

    def costs(self, row: Row) -> CostModel:
        key = row.shape, row.device, row.gpus, row.network, row.float8, row.async_split, row.recompute, row.options
        if key not in self._costs:
            figures = self.figures[system_of(row).name]
            system = as_run(figures.system, row)
            machines = figures.calibration.on(cluster(row.device, row.gpus, row.network))
            costs = CostModel(published(row.shape), machines, system)
            if not row.shape.llama:
                costs.units.share(self._units.setdefault((row.device, system.name), {}))
            self._costs[key] = costs
        return self._costs[key]


published = functools.cache(PublishedModel)


def completions(row: Row) -> Iterator[Row]:
    """Yield the row with each value of what its table does not say; a run is taken as the quickest of them."""
    each = row.batch // row.replicate
    micros = {max(1, each // size) for size in OPEN_MICRO} if row.open_micro else {row.micro_batches}
    chunks = [count for count in OPEN_CHUNKS if row.shape.layers % (row.stage * count) == 0] if row.open_chunks else []
    for count in sorted(micros):
        for chunk in chunks or [row.chunks]:
            if chunk == 1 or count % row.stage == 0:
                yield dataclasses.replace(row, micro_batches=count, chunks=chunk)


def cluster(device: str, gpus: int, network: str = "") -> Cluster:
    hosts = -(-gpus // ON_HOST)
    written = f"{hosts}x{min(ON_HOST, gpus)}x{kind_named(device).device.name}"
    return Cluster.parse(f"{written}@{network}" if network else written, bench=False)


def system_of(row: Row) -> System:
    return TORCHTITAN if row.shape.llama else MEGATRON_CORE if row.shape.flash else MEGATRON


def as_run(system: System, row: Row) -> System:
    """Return the system with what the row says of it."""
    if row.shape.llama:
        return dataclasses.replace(
            system,
            replayed_kinds={"product": 0.5, "attention": 0.0} if row.recompute == "selective" else {},
            hides_split=system.hides_split if row.async_split else 0.0,
            product_dtype="float8" if row.float8 else None,
        )
    selective = row.recompute == "selective"
    said = {name: getattr(row.options, name) for name in ("sequence_split", "overlap", "hides_split")}
    return dataclasses.replace(
        system,
        replayed=(0.0 if row.shape.flash else SELECTIVE) if selective else 1.0,
        **{name: value for name, value in said.items() if value is not None},
    )


def draft(row: Row, full: set[Shape]) -> Draft:
    """Return the plan of a row; ``full``: models that are recomputed where the table does not say."""
    stages = row.stage * row.chunks
    recompute = row.recompute or ("full" if row.shape in full else "none")
    return Draft(
        batch=row.batch,
        replicate=row.replicate,
        stage=row.stage,
        split=row.split,
        chunks=row.chunks,
        cuts=even_cuts(row.shape.layers, stages),
        micro_batches=row.micro_batches,
        schedule=None if stages == 1 else "interleaved" if row.chunks > 1 else "1f1b",
        recompute=(recompute != "none",) * stages,
        shard=row.shard if row.replicate > 1 else 0,
        order=() if row.shape.llama else stages_outermost(row),
        compile=row.compiled,
    )


def stages_outermost(row: Row) -> tuple[int, ...]:
    """Return Megatron's order of ranks: those of a split are neighbours, then replicas, then stages."""
    if row.stage == 1 or row.replicate == 1 or row.gpus <= ON_HOST:
        return ()
    ranks = np.arange(row.gpus).reshape(row.stage, row.replicate, row.split)
    return tuple(ranks.transpose(1, 0, 2).ravel().tolist())


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Cut layers evenly, the first stages with one more; the embedding is in the first, the head in the last."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return tuple(1 + sum(sizes[: stage + 1]) for stage in range(stages - 1))


def needs_recompute(rows: Sequence[Row]) -> set[Shape]:
    """Return models of which some run would not fit without: a study has one setting for all runs of a model."""
    unsaid = [row for row in rows if not row.recompute]
    return {row.shape for row in unsaid if held_without(row) > kind_named(row.device).device.memory}


def held_without(row: Row) -> float:
    """Return bytes of the first stage without recompute: 16 per parameter, activations of all that is in flight."""
    layer = published(row.shape).sheet(max(1, round(row.micro_batch)), row.split).units[1]
    mine = -(-row.shape.layers // row.stage)
    in_flight = min(row.micro_batches, row.stage)
    return (
        mine * (layer.saved * in_flight + 16 * layer.weights) + 16 * row.shape.vocabulary * row.shape.hidden / row.split
    )
