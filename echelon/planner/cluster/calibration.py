"""Figures that published training runs reach, in place of the catalog's nominal ones.

The runs are those of ``benchmarks/planner/planner_truth.py``, which also fits these figures, on a quarter of the runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.planner.cluster.cluster import Cluster, Curve, Device, Host, Link

A100_PEAK = 312e12  # FLOP/s of the GPU for which ``half_product`` and ``half_stream`` are given


@dataclass(frozen=True)
class Calibration:
    """Figures of a GPU and its links in large training runs.

    product:      fraction of the catalog's rate that large products reach
    half_product: FLOPs of a product that reaches half of that rate, on a GPU of 312 TFLOP/s
    float8:       fraction of the 8-bit peak that products reach, casts included
    attention:    fraction of the peak that fused attention reaches, with all query-key pairs counted
    stream:       fraction of the memory bandwidth that kernels reach
    half_stream:  bytes at which the memory of such a GPU reaches half of that
    launch:       seconds of a busy host to launch a kernel
    update:       fraction of the memory bandwidth that the optimizer's update reaches
    bus:          fraction of the bandwidth inside a host that collectives reach
    latency:      seconds of one round of a collective, inside a host and between hosts
    network:      fraction of the bandwidth between hosts that collectives reach
    """

    product: float = 1.0
    half_product: float = 7e9
    float8: float = 0.4
    attention: float = 0.45
    stream: float = 0.7
    half_stream: float = 4e6
    launch: float = 7e-5
    update: float = 0.7
    bus: float = 0.8
    latency: float = 1e-4
    network: float = 0.7

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with these figures."""
        kinds = {device.name: self._device(device) for device in cluster.kinds}
        groups = tuple(
            (count, Host(tuple(kinds[device.name] for device in host.devices), self._link(host.link, self.bus)))
            for count, host in cluster.hosts
        )
        return replace(cluster, hosts=groups, network=self._link(cluster.network, self.network))

    def _device(self, device: Device) -> Device:
        scale = device.peak_of("float16") / A100_PEAK  # a faster GPU needs more work to be filled
        half = self.half_product * scale
        return replace(
            device,
            products=saturating(self.product * device.products[-1][1], half, 6, 14),
            products_by={"float8": saturating(self.float8, half, 6, 14)},
            streams=saturating(self.stream, self.half_stream * scale, 3, 11),
            attention=self.attention,
            launch=self.launch,
            update=self.update,
        )

    def _link(self, link: Link, part: float) -> Link:
        return replace(link, bandwidth=link.bandwidth * part, latency=self.latency, tables={})


def saturating(top: float, half: float, first: int, last: int) -> Curve:
    """Return the curve ``top * x / (x + half)`` from 10^first to 10^last."""
    sizes = [10 ** (quarter / 4) for quarter in range(4 * first, 4 * last + 1)]
    return tuple((size, top * size / (size + half)) for size in sizes)


#: By system: figures fitted on a quarter of vTrain's runs of Megatron-LM on A100, and on a quarter of torchtitan's on
#: H100. Nothing is fitted for Megatron-Core: its products reach what brings a model of 462B parameters to the published
#: 47 % of the peak on H100, attention reaches what it does in torchtitan, and the rest is usual.
CALIBRATED: dict[str, Calibration] = {
    "Megatron-LM": Calibration(
        product=1.04,
        half_product=5.0e9,
        stream=0.703,
        half_stream=7.2e6,
        launch=5.45e-5,
        update=0.736,
        bus=0.793,
        latency=1.04e-4,
        network=0.721,
    ),
    "torchtitan": Calibration(product=0.67, float8=0.43, attention=0.74),
    "Megatron-Core": Calibration(product=0.95, attention=0.75, launch=2e-5, latency=2e-5),
}
