"""One rank of planner_auto.py: builds a plan, trains with it for some steps, drops it, whenever told to.

    python planner_auto_worker.py TASK        in the environment that torchrun would make

Each line of input is a request, answered by a line: {"do": "build", "plan": ...}, {"do": "train", "warm_up": 1,
"steps": 3}, {"do": "drop"}, {"do": "network"}. What goes wrong is answered too: {"failed": why}.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import echelon
from benchmarks.pipeline.bubbles import first_in_line
from benchmarks.planner.planner_models import TASKS, Batch, Task, part_of, row_counts
from echelon.distributed import world as worlds
from echelon.plan.saved_plan import SavedPlan
from echelon.tools.bench.collective_timing import collective_rows
from echelon.tools.bench.overlap import overlap_rows

RANK = int(os.environ["RANK"])


class Rank:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._engine: Any = None
        self._rows: Callable[[Batch], Batch] = lambda batch: batch

    def build(self, plan: dict[str, Any]) -> dict[str, Any]:
        saved = SavedPlan.from_json(json.dumps(plan))
        model, optimizer = self._task.start()
        self._engine = echelon.distribute(
            model, loss=self._task.loss, optimizer=optimizer, plan=saved, log=echelon.Log(console=False)
        )
        draft = saved.draft
        place = draft.order.index(RANK) if draft.order else RANK
        replica = place // (draft.stage * draft.split)
        counts = row_counts(self._task.rows, draft.shares, draft.replicate)
        self._rows = lambda batch: part_of(batch, counts, replica)
        self._batches = map(self._rows, self._task.batches())
        return {}

    def train(self, warm_up: int, steps: int) -> dict[str, Any]:
        losses, seconds = [], []
        for batch in itertools.islice(self._batches, warm_up):
            losses.append(self._engine.step(*batch))
        echelon.barrier()
        for batch in itertools.islice(self._batches, steps):
            begin = time.perf_counter()
            losses.append(self._engine.step(*batch))
            float(losses[-1])
            seconds.append(time.perf_counter() - begin)
        echelon.barrier()
        return {"seconds": seconds, "losses": [float(loss) for loss in losses]}

    def drop(self) -> dict[str, Any]:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        return {}

    def network(self) -> dict[str, Any]:
        """Measure messages and collectives between the ranks, as ``echelon bench`` does."""
        world = worlds.current()
        return {"collectives": collective_rows(world, quick=True), "overlap": overlap_rows(world, quick=True)}


def own_core() -> None:
    """Pin this rank to a core of its own, as on a separate host, unless there are too few."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[RANK % len(allowed)]})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; only answers go to the real output
    os.dup2(2, 1)
    first_in_line()
    own_core()
    torch.set_num_threads(1)
    echelon.init()
    rank = Rank(TASKS[sys.argv[1]])
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(rank, request.pop("do"))(**request)
        except (RuntimeError, echelon.EchelonError) as error:
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # the others may be gone already: nothing to say goodbye to


if __name__ == "__main__":
    main()
