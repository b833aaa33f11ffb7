"""Comparison of the plan that ``auto`` has found with a run without a strategy, which it must not be slower than.

Plans that are predicted to be nearly as quick as the best may be quicker: predictions of ranks on CPUs err by 8 to
21 %. Where that can cost more than some measured steps of each, they are measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.base.formatting import duration
from echelon.plan.draft import Draft
from echelon.planner.apply.trial import BEGUN, WARM, counted_steps
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.default_run import DefaultRun
from echelon.planner.model_costs import ProfileLike
from echelon.planner.plan_search.neighbours import describe_overflow
from echelon.planner.plan_search.search_result import PlanChoice

#: Difference of two predictions, as a fraction, below which either plan may be the faster one: for machines that
#: ``echelon bench`` has measured, and for figures of the catalog.
DOUBT_MEASURED, DOUBT_CATALOG = 0.03, 0.1
#: Times the doubt: a larger difference needs no measured trial.
CLEAR = 2
#: The same between plans on several ranks of CPUs, which share memory and caches, and whose messages need them too:
#: about the mean error of such predictions (``benchmarks/measured/planner_auto.json``).
DOUBT_CPU_RANKS = 0.15


@dataclass(frozen=True)
class DefaultComparison:
    """The outcome of a comparison.

    choices: plans to run; with several, the first is the one predicted to be faster
    line:    the outcome as text, with the reason
    measure: True if a measured trial of the choices costs less time than a wrong choice may
    """

    choices: tuple[PlanChoice, ...]
    line: str
    measure: bool = False


def default_choice(
    profile: ProfileLike, cluster: Cluster, samples: int, usual: DefaultRun, stepping: Mapping[str, Any]
) -> PlanChoice:
    """Return the plan of a run without a strategy: a replica on every device, all samples at once.

    stepping: arguments of ``predict`` about the optimizer
    """
    ranks = cluster.size
    each, more = divmod(samples, ranks)
    draft = Draft(
        batch=samples,
        replicate=ranks,
        amp=usual.amp,
        compile=usual.compiles(replicate=ranks, stage=1, split=1, shard=0),
        shares=(each + 1.0,) * more + (float(each),) * (ranks - more) if more and each else (),
    )
    return PlanChoice(draft, predict(profile, cluster, draft, **stepping))


def compare_with_default(
    best: PlanChoice, plain: PlanChoice, steps: int, *, measured: bool, started: float | None = None
) -> DefaultComparison:
    """Return the plan to run: the found one, or the default one where it is as fast.

    steps:    steps that will surely follow, which a trial can save time on
    measured: True if the figures of the cluster were measured
    started:  seconds that this process took to get here, which each trial takes too; default: those until now
    """
    if plain.draft == best.draft:
        return DefaultComparison((best,), "this is the plan of a run without a strategy")
    if not plain.prediction.fits:
        lacking = describe_overflow(plain.prediction)
        return DefaultComparison((best,), f"a run without a strategy does not fit: {lacking}")
    gain = 1 - best.seconds / plain.seconds
    doubt = DOUBT_MEASURED if measured else DOUBT_CATALOG
    beside = f"a run without a strategy would take {duration(plain.seconds)}"
    if gain > CLEAR * doubt:
        return DefaultComparison((best,), f"{beside} ({plain.seconds / best.seconds - 1:+.0%})")
    first, other = (best, plain) if gain > doubt else (plain, best)
    costs = trial_seconds((first, other), started)
    if steps * plain.seconds * doubt > costs:
        line = f"{beside}: too close to tell, so both are measured (some {duration(costs)})"
        return DefaultComparison((first, other), line, measure=True)
    taken = "the found plan is taken" if first is best else "it is taken, as the difference is within the error"
    return DefaultComparison((first,), f"{beside}: {taken}")


def with_rivals(
    against: DefaultComparison, rivals: Sequence[PlanChoice], steps: int, doubt: float, started: float | None = None
) -> DefaultComparison:
    """Return the comparison with measured trials of plans that may be quicker, if these cost less than they may save.

    rivals: other plans; of these, the ones within twice ``doubt`` of the plan to run are measured
    """
    first = against.choices[0]
    known = {choice.draft for choice in against.choices}
    within = (1 + CLEAR * doubt) * first.seconds
    near = [one for one in rivals if one.draft not in known and one.seconds < within]
    if not near:
        return against
    choices = (*against.choices, *near)
    costs = trial_seconds(choices, started)
    if steps * first.seconds * doubt <= costs:
        return against
    line = f"{len(choices)} plans are too close to tell, so they are measured (some {duration(costs)})"
    beside = against.line.partition(": ")[0] if against.measure else against.line
    return replace(against, choices=choices, line=f"{beside}; {line}", measure=True)


def trial_seconds(choices: Sequence[PlanChoice], started: float | None = None) -> float:
    """Return about how long trials of the choices take, each in processes that start as this one did."""
    started = time.monotonic() - BEGUN if started is None else started
    return sum(started + (WARM + counted_steps(choice.seconds)) * choice.seconds for choice in choices)


def doubt_of(cluster: Cluster) -> float:
    """Return the difference of two predictions, as a fraction, below which either plan may be the faster one."""
    if cluster.size > 1 and any(device.name.startswith("CPU") for device in cluster.kinds):
        return DOUBT_CPU_RANKS
    return DOUBT_MEASURED if is_measured(cluster) else DOUBT_CATALOG


def is_measured(cluster: Cluster) -> bool:
    """Return True if ``echelon bench`` has measured the devices."""
    return all(device.origin_of("products") == "measured" for device in cluster.kinds)
