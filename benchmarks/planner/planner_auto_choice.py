"""The planner's answer for planner_auto.py: the plan that it predicts to be the best, and those that auto tries."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.planner.planner_models import OPTIMIZER
from echelon.plan.draft import Draft
from echelon.planner.apply.auto import trial_candidates
from echelon.planner.apply.default_comparison import compare_with_default, default_choice, is_measured
from echelon.planner.cluster.cluster import Cluster, Host, Link
from echelon.planner.default_run import FP32_EAGER
from echelon.planner.plan_search.search import search
from echelon.planner.profiling.profile import Profile
from echelon.strategy import Auto


class Answer(NamedTuple):
    """The plan that is predicted to be the best, and the plans that auto tries before it runs one."""

    predicted: Draft
    candidates: tuple[Draft, ...]


def machines(hosts: int, each: int, bench: Path, network: Link) -> Cluster:
    """This machine's cores, shared by all ranks, as hosts on such a network."""
    (_, here), *_ = Cluster.parse(f"{hosts * each}xhere", bench=bench).hosts
    host = Host(here.devices[:each], here.link)
    return Cluster(((hosts, host),), network, f"{hosts}x{each} at {network.name}")


def choose(found: Profile, cluster: Cluster, rows: int, trials: int) -> Answer:
    """The best plan that uses all ranks, for a job has no others, and what auto would measure before it runs."""
    auto = Auto(measure=True, trials=trials)
    answer = search(found, cluster, batch=rows, optimizer=OPTIMIZER, devices=cluster.size, keep=50)
    plain = default_choice(found, cluster, rows, FP32_EAGER, {"optimizer": OPTIMIZER})
    against = compare_with_default(answer.best[0], plain, 0, measured=is_measured(cluster))
    candidates = trial_candidates(answer, against, auto, cluster.size, {})
    return Answer(against.choices[0].draft, tuple(each.draft for each in candidates))
