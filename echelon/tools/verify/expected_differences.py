"""Expected numerical differences between a plan and one process, derived from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from echelon.plan import Plan
from echelon.plan.batch_norms import batch_norm_names

#: Relative difference between two sums of the same fp32 numbers in another order, with room for growth over some steps.
TOLERANCE = 1e-4
#: Factor by which gradients and weights may differ more than losses, because of cancellation and of earlier steps.
LOOSER = 10.0


@dataclass(frozen=True)
class ExpectedDifference:
    """One reason why the results of a plan differ from those of one process.

    setting: the strategy setting that causes the difference
    says:    the explanation for the user

    The other fields are the largest relative differences that this reason explains; None: any. ``outputs`` also limits
    the first loss, because no update has affected that loss.
    """

    setting: str
    says: str
    outputs: float | None = TOLERANCE
    loss: float | None = None
    gradients: float | None = None
    weights: float | None = None


def expected(plan: Plan, model: nn.Module, steps: int) -> list[ExpectedDifference]:
    """Return the reasons why this plan's numbers differ from those of one process in fp32; empty for an exact plan."""
    return [*_arithmetic(plan), *_algorithms(plan, steps), *_statistics(plan, model)]


def _arithmetic(plan: Plan) -> Iterator[ExpectedDifference]:
    if plan.amp is not None and plan.amp.dtype == "bf16":
        says = "forward and backward compute in 8 significant bits: losses within 2 %, entries of gradients within 50 %"
        yield ExpectedDifference(
            "amp (bf16 by default here)" if plan.fast.bf16 else "amp='bf16'",
            says,
            outputs=0.05,
            loss=0.02,
            gradients=0.5,
            weights=0.05,
        )
    elif plan.amp is not None:
        says = (
            "forward and backward compute in 11 significant bits: losses within 0.5 %, entries of gradients within 10 %"
        )
        yield ExpectedDifference("amp='fp16'", says, outputs=0.01, loss=0.005, gradients=0.1, weights=0.01)
    if plan.low_memory is not None:
        says = "weights compute in 8 significant bits and moments are kept in 8 bits; no gradients are seen"
        yield ExpectedDifference("low_memory", says, outputs=0.05, loss=0.05, weights=0.05)
    if plan.comm_dtype is not None and plan.ranks > 1 and plan.dgc is None and plan.local is None:
        bits, off = (8, 0.02) if plan.comm_dtype == "bf16" else (11, 0.0025)
        says = f"gradients travel in {bits} significant bits, rounded twice: within {off:.2%}"
        yield ExpectedDifference(f"fp16_allreduce='{plan.comm_dtype}'", says, loss=off, gradients=off, weights=off)


def _algorithms(plan: Plan, steps: int) -> Iterator[ExpectedDifference]:
    if plan.replicas < 2:
        return
    if plan.dgc is not None and plan.dgc.rampup_begin_step < steps:
        sent = 1 - plan.dgc.sparsity[0]
        says = (
            f"of large gradients the {sent:.2%} largest entries are sent, the rest later: only the first loss is equal"
        )
        yield ExpectedDifference("dgc", says)
    if plan.local is not None:
        says = "replicas step alone, on gradients of their own, and average now and then: only the first loss is equal"
        name = "localsgd" if type(plan.local).__name__ == "LocalSgd" else "adaptive_localsgd"
        yield ExpectedDifference(name, says)


def _statistics(plan: Plan, model: nn.Module) -> Iterator[ExpectedDifference]:
    layers = batch_norm_names(model)
    if layers and plan.replicas > 1 and not plan.sync_batch_norm:
        says = f"'{layers[0]}' and what comes after it go by the mean and variance of each replica's own batch"
        yield ExpectedDifference("sync_batch_norm=False", says, outputs=None)
