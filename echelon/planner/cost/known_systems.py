"""Systems beside this runtime whose published runs the cost model is compared with.

Their models are profiled with weights in 16 bits, so that their figures are those without amp.
"""

from __future__ import annotations

from echelon.planner.cost.system import STATE, System

#: Megatron-LM as of 2021: fused pointwise kernels; gradients in 16 bits are summed once, after the last backward; each
#: rank of a split sends its part to the next stage (``scatter_gather_tensors_in_pipeline``, on by default).
MEGATRON = System(
    "Megatron-LM",
    weights=2.0,
    gradients=2.0,
    amp_master=4.0,
    state=STATE,
    replays="repeated",
    fused_ends=True,
    residual=0.6,
    overlap=0.0,
    runs_ahead="unit",
    pointwise=1.31,
    unaligned=3.1,
    scatters_edges=True,
    collective=3.9e-5,
    micro=7.2e-4,
    step=1.45e-3,
    added=6.0,
)
#: Megatron-Core: sequence parallelism, and sums and gathers of the distributed optimizer beside computing.
MEGATRON_CORE = System(
    "Megatron-Core",
    weights=2.0,
    gradients=4.0,
    amp_master=4.0,
    state=STATE,
    replays="repeated",
    fused_ends=True,
    residual=0.6,
    sequence_split=True,
    overlap=1.0,
    overlaps_chunks=True,
    parameter_overlap=1.0,
    hides_split=0.5,
    scatters_edges=True,
    added=10.0,
    micro=1e-3,
    step=2e-2,
)
#: torchtitan: FSDP2 with fp32 shards that are gathered in 16 bits.
TORCHTITAN = System(
    "torchtitan",
    weights=4.0,
    gradients=4.0,
    state=STATE,
    replays="repeated",
    fused_ends=True,
    residual=0.6,
    sequence_split=True,
    reduced=4.0,
    gathered=2.0,
    prefetch=1.0,
    overlap=1.0,
    hides_split=0.4,
    pointwise=1.03,
    compiled_pointwise=0.4,
    micro=2e-3,
    step=5e-3,
)
