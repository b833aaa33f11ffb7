"""Time of planning: a 12-layer BERT on 8 devices, and a model of 1T parameters on 1,000 to 100,000.

    python benchmarks/planner/planner_speed.py [--out FILE] [--only NAME ...]

Times are seconds of wall clock and of this process's CPU (on a busy machine the second is what planning needs), of the
profile and of the search apart. A line for each, then all as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.plan_search.search import search
from echelon.planner.profiling.builders import bert, gpt
from echelon.planner.profiling.profile import Profile


class Case(NamedTuple):
    profile: Callable[[], Profile]
    cluster: str
    batch: int
    allow: tuple[str, ...]
    limit: float  # seconds that it may take in all


def trillion() -> Profile:
    """128 layers of hidden size 25,600 (Narayanan et al. 2021, table 1): 1.0e12 parameters."""
    return gpt(128, 25600, 160, 2048)


CASES = {
    "bert-12 on 8": Case(lambda: bert(12, 768, 12, 512), "1x8xA100", 256, (), 3.0),
    "1T on 1,000": Case(trillion, "125x8xH100", 1536, ("amp",), 10.0),
    "1T on 10,000": Case(trillion, "1250x8xH100", 3072, ("amp",), 10.0),
    "1T on 100,000": Case(trillion, "12500x8xH100", 6144, ("amp",), 10.0),
}


def measure(case: Case) -> dict[str, Any]:
    clocks = [_now()]
    profile = case.profile()
    clocks.append(_now())
    cluster = Cluster.parse(case.cluster, bench=False)
    answer = search(profile, cluster, batch=case.batch, allow=case.allow)
    clocks.append(_now())
    (wall_profile, cpu_profile), (wall_search, cpu_search) = (
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(clocks)
    )
    return {
        "cluster": case.cluster,
        "batch": case.batch,
        "wall_seconds": {"profile": wall_profile, "search": wall_search, "all": wall_profile + wall_search},
        "cpu_seconds": {"profile": cpu_profile, "search": cpu_search, "all": cpu_profile + cpu_search},
        "limit_seconds": case.limit,
        "considered": answer.considered,
        "best": str(answer.best[0].draft) if answer.best else None,
        "step_seconds": answer.best[0].seconds if answer.best else None,
        "nearest": answer.nearest.reason if answer.nearest else None,
    }


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "cases": {}}
    for name in options.only:
        found["load"] = os.getloadavg()[0]
        result = found["cases"][name] = measure(CASES[name])
        wall, cpu = result["wall_seconds"]["all"], result["cpu_seconds"]["all"]
        print(f"{name}: {wall:.1f} s ({cpu:.1f} s CPU), {result['considered']} drafts: {result['best']}", flush=True)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
