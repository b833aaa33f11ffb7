"""Comparison of the plan that ``auto`` has found with a run without a strategy, which it must not be slower than."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.base.formatting import duration
from echelon.plan.draft import Draft
from echelon.planner.apply.trial import BEGUN, COUNTED, WARM
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
    started = time.monotonic() - BEGUN if started is None else started
    costs = 2 * (started + (WARM + COUNTED) * plain.seconds)
    if steps * plain.seconds * doubt > costs:
        line = f"{beside}: too close to tell, so both are measured (some {duration(costs)})"
        return DefaultComparison((first, other), line, measure=True)
    taken = "the found plan is taken" if first is best else "it is taken, as the difference is within the error"
    return DefaultComparison((first,), f"{beside}: {taken}")


def is_measured(cluster: Cluster) -> bool:
    """Return True if ``echelon bench`` has measured the devices."""
    return all(device.origin_of("products") == "measured" for device in cluster.kinds)
