"""Memory of torchtitan runs, as its allocator reserves it: FSDP2 with fp32 shards, 16-bit computing, a loss in fp32.

The planner's own memory.py describes Echelon's runtime, which holds other things at other moments. The four numbers of
hidden states below were read off the tables; the rest is arithmetic.
"""

from __future__ import annotations

from benchmarks.planner.planner_truth_rows import Row

STATE = 16.0  # bytes of a parameter's shard: weight, gradient and Adam's two averages, all in fp32
GATHERED = 2.0  # of a whole parameter that a pipeline keeps between its passes
SUMMED = 4.0  # of a whole gradient that a pipeline adds micro-batches up in
SELECTIVE = 10.5  # hidden states that a layer keeps under selective recompute
SELECTIVE_COMPILED = 9.1
WORKING = 12.0  # hidden states that one layer has at once while it computes again and back
WORKING_ASYNC = 10.0  # where gathered inputs are not kept
LOGITS = 6.0  # times the logits in 16 bits: those, in fp32, and both of their gradients
LOGITS_COMPILED = 2.0  # where the loss is compiled


def titan_memory(row: Row) -> float:
    """Return the memory of the fullest rank."""
    shape, ranks = row.shape, row.replicate * row.split * row.stage
    tokens = row.micro_batch * shape.sequence
    state = 2.0 * tokens * shape.hidden
    held = STATE * shape.parameters / ranks
    if row.stage > 1:
        held += (GATHERED + SUMMED) * shape.parameters / (row.split * row.stage)
    layers = shape.layers / row.stage * min(row.stage, row.micro_batches)
    kept = 1.0 / row.split
    if row.recompute == "selective":
        kept *= SELECTIVE_COMPILED if row.compiled else SELECTIVE
    working = WORKING_ASYNC if row.async_split else WORKING
    logits = LOGITS_COMPILED if row.loss_compiled else LOGITS
    ends = logits * 2.0 * tokens * shape.vocabulary / row.split if row.stage == 1 else 0.0
    return held + layers * kept * state + working * state + ends
