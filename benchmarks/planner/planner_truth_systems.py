"""Published systems and the machines they ran on, as the planner sees them; and what it foretells of a run.

Machines are the catalogue's, with CONSTANTS that say how much of their nominal figures these systems reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from benchmarks.planner.fit_constants import FittedConstant
from benchmarks.planner.planner_truth_models import Kernels, Published, Shape
from benchmarks.planner.planner_truth_rows import Row
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, Curve, Host
from echelon.planner.cluster.device_catalog import kind_named
from echelon.planner.cost.compute import UnitSeconds
from echelon.planner.cost.predict import CostModel
from echelon.planner.cost.system import System

ON_HOST = 8
RAILS = 8
HALF_STREAM = 2e6  # bytes at which memory reaches half of its rate
SELECTIVE = 0.17  # part of a layer that Megatron-LM runs again where only attention is recomputed

#: Fitted constants, with their prior values; the latency and the launch are of a host that is busy.
CONSTANTS = {
    "product": FittedConstant(0.82, 0.08, "part of the peak that large products reach"),
    "half_product": FittedConstant(5e9, 0.7, "FLOPs of a product that reaches half of that"),
    "stream": FittedConstant(0.63, 0.15, "part of the memory bandwidth that kernels reach"),
    "pointwise": FittedConstant(
        1.4, 0.3, "bytes that pointwise kernels between products move, for one counted as if fused"
    ),
    "launch": FittedConstant(7e-5, 0.7, "seconds to start a kernel"),
    "bus": FittedConstant(0.75, 0.15, "part of the link inside a host that collectives reach"),
    "latency": FittedConstant(1e-4, 0.7, "seconds of one round of a collective inside a host"),
    "network": FittedConstant(0.75, 0.3, "part of the network that collectives reach"),
    "micro": FittedConstant(5e-4, 0.7, "seconds of the host for each micro-batch"),
    "step": FittedConstant(1e-3, 0.7, "seconds of the host for each step"),
    "update": FittedConstant(0.7, 0.3, "part of the memory bandwidth that the update reaches"),
    "whole_head": FittedConstant(1.5, 0.4, "how much longer products of a head take that is not split"),
}

#: The same for torchtitan on H100 and H200, beside latency, launch and half_product above.
TITAN_CONSTANTS = {
    "product": FittedConstant(0.55, 0.2, "part of the 16-bit peak that large products reach"),
    "float8": FittedConstant(0.4, 0.2, "part of the 8-bit peak that they reach, casts included"),
    "attention": FittedConstant(0.45, 0.2, "part of the peak that fused attention reaches"),
    "stream": FittedConstant(0.7, 0.15, "part of the memory bandwidth that kernels reach"),
    "eager": FittedConstant(1.5, 0.3, "passes over memory without compiling, for one counted"),
    "compiled": FittedConstant(0.7, 0.3, "the same with compiling"),
    "selective": FittedConstant(0.5, 0.3, "part of the forward that selective recompute runs again"),
    "async_split": FittedConstant(0.35, 0.5, "part of the messages inside layers that async_tp hides"),
}

#: Constants fitted on a quarter of the vTrain rows (seed 0), for tables that nothing is fitted on.
FOUND = {
    "product": 0.802,
    "half_product": 8.09e9,
    "stream": 0.616,
    "pointwise": 1.16,
    "launch": 7.15e-5,
    "bus": 0.776,
    "latency": 1.02e-4,
    "network": 0.773,
    "micro": 6.63e-4,
    "step": 9.57e-4,
    "update": 0.697,
    "whole_head": 1.83,
}
#: Constants fitted on every second torchtitan row.
TITAN_FOUND = {
    "product": 0.49,
    "float8": 0.414,
    "attention": 0.417,
    "stream": 0.664,
    "eager": 1.57,
    "compiled": 0.743,
    "selective": 0.675,
    "async_split": 0.455,
}

MEGATRON = System(
    "Megatron-LM",
    amp_weights=2.0,
    amp_gradients=2.0,
    amp_master=4.0,
    replays="repeated",
    overlap=0.0,
    runs_ahead="unit",
)
TORCHTITAN = System(
    "torchtitan",
    replays="repeated",
    sequence_split=True,
    reduced=4.0,
    gathered=2.0,
    prefetch=1.0,
    overlap=1.0,
    micro=2e-3,
    step=5e-3,
)


def curve(top: float, half: float, first: int, last: int) -> Curve:
    """x / (x + half) of ``top``, from 10^first to 10^last."""
    sizes = [10 ** (quarter / 4) for quarter in range(4 * first, 4 * last + 1)]
    return tuple((size, top * size / (size + half)) for size in sizes)


def machine(name: str, gpus: int, constants: Mapping[str, float]) -> Cluster:
    kind = kind_named(name)
    scale = kind.device.peak_of("float16") / 312e12  # a faster device needs more work to be filled
    device = dataclasses.replace(
        kind.device,
        products=curve(constants["product"], constants["half_product"] * scale, 6, 14),
        streams=curve(constants["stream"], HALF_STREAM * scale, 3, 11),
        launch=constants["launch"],
        update=constants["update"],
        attention=constants.get("attention", kind.device.attention),
        products_by={"float8": curve(constants.get("float8", 0.4), constants["half_product"] * scale, 6, 14)},
        cores=CORES.get(name, 108),
    )
    link = dataclasses.replace(
        kind.link, bandwidth=kind.link.bandwidth * constants["bus"], latency=constants["latency"], tables={}
    )
    network = dataclasses.replace(
        kind.network, bandwidth=kind.network.bandwidth * constants["network"], rails=RAILS, tables={}
    )
    here = min(ON_HOST, gpus)
    return Cluster(((-(-gpus // here), Host((device,) * here, link)),), network, f"{gpus} x {name}")


#: Multiprocessors, by the makers' data sheets.
CORES = {"A100": 108, "A100-40": 108, "H100": 132, "H200": 132, "V100": 80, "V100-32": 80}


class Foretelling:
    """Predictions under one set of constants; what runs have in common is computed once."""

    def __init__(self, constants: Mapping[str, float], titan: Mapping[str, float] | None = None) -> None:
        self.constants = constants
        self.titan = {**constants, **(titan or TITAN_FOUND)}
        self._costs: dict[object, CostModel] = {}
        self._units: dict[bool, dict[Hashable, UnitSeconds]] = {False: {}, True: {}}

    def seconds(self, rows: Sequence[Row], simulate: bool = False) -> list[float]:
        full = needs_recompute(rows)
        return [self.costs(row).predict(draft(row, full), simulate=simulate, memory=False).seconds for row in rows]

    def costs(self, row: Row) -> CostModel:
        key = row.shape, row.device, row.gpus, row.float8, row.async_split, row.recompute, row.chunks > 1
        if key not in self._costs:
            system = self._titan(row) if row.shape.llama else self._megatron(row)
            constants = self.titan if row.shape.llama else self.constants
            costs = CostModel(
                Published(row.shape, self._kernels(row)), machine(row.device, row.gpus, constants), system
            )
            costs.units.share(self._units[row.shape.llama])
            self._costs[key] = costs
        return self._costs[key]

    def _megatron(self, row: Row) -> System:
        given = self.constants
        return dataclasses.replace(
            MEGATRON,
            pointwise=given["pointwise"],
            micro=given["micro"],
            step=given["step"],
            scatters_edges=row.chunks > 1,
            replayed=SELECTIVE if row.recompute == "selective" else 1.0,
        )

    def _titan(self, row: Row) -> System:
        given = self.titan
        return dataclasses.replace(
            TORCHTITAN,
            pointwise=given["eager"],
            compiled_pointwise=given["compiled"] / given["eager"],
            replayed=given["selective"] if row.recompute == "selective" else 1.0,
            hides_split=given["async_split"] if row.async_split else 0.0,
        )

    def _kernels(self, row: Row) -> Kernels:
        if row.shape.llama:
            return Kernels(dtype="float8" if row.float8 else "bfloat16")
        along = row.recompute == "selective"  # both came to Megatron-LM together
        return Kernels(whole_head=self.constants["whole_head"], along=along)


def draft(row: Row, full: set[Shape]) -> Draft:
    """``full``: models that are recomputed where the table does not say."""
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
        amp="bf16" if row.shape.llama else "fp16",
        compile=row.compiled,
    )


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Cut layers evenly, the first stages with one more; the embedding is in the first, the head in the last."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return tuple(1 + sum(sizes[: stage + 1]) for stage in range(stages - 1))


def needs_recompute(rows: Sequence[Row]) -> set[Shape]:
    """Models of which some run would not fit without: a study has one setting for all runs of a model."""
    return {row.shape for row in rows if not row.recompute and held_without(row) > kind_named(row.device).device.memory}


def held_without(row: Row) -> float:
    """Bytes of the first stage without recompute: 16 for each parameter, activations of all that is in flight."""
    anatomy = Published(row.shape, Kernels())
    layer = anatomy.sheet(max(1, round(row.micro_batch)), row.split).units[1]
    mine = -(-row.shape.layers // row.stage)
    in_flight = min(row.micro_batches, row.stage)
    return (
        mine * (layer.saved * in_flight + 16 * layer.weights) + 16 * row.shape.vocabulary * row.shape.hidden / row.split
    )
