"""The footprint of a training script: it runs as it is, alone, up to its first batch (planner/explain/script.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from echelon.errors import EchelonError, UsageError
from echelon.footprint.asked import Asked
from echelon.footprint.footprint import find_footprint
from echelon.planner.explain.script import Waiting, ask
from echelon.strategy import Strategy
from echelon.strict import build


def ask_script(asked: Asked, arguments: Sequence[str]) -> dict[str, Any]:
    """``{"job": ..., "footprint": ...}``, as JSON has it."""
    if not Path(asked.model).is_file():
        raise UsageError(f"MODEL: no file at '{asked.model}'")
    return ask(asked.model, arguments, {"footprint": asked.to_dict()})


class Weighing(Waiting):
    """In the child: stands in for the engine, and answers at the first batch."""

    strategy: Strategy | None = None

    def _look_at(self, batch: Any) -> NoReturn:
        from echelon.planner.explain.source import profile_model
        from echelon.planner.machines.cluster import Cluster

        self._refuse_tables()
        try:
            asked = build(Asked, self._question["footprint"], "asked")
            cluster = Cluster.parse(asked.cluster)
            profile = profile_model(self._model, batch, self._loss, name=Path(asked.model).stem, cluster=cluster)
            job = asked.job(profile.batch, self.strategy)
            found = find_footprint(profile, job, asked.optimizer or self._optimizer)
        except EchelonError as error:
            self._answer({"error": str(error)})
        title = f"{profile.name}, {asked.optimizer or type(self._first).__name__}"
        self._answer({"title": title, "job": job.to_dict(), "footprint": found.to_json()})

    @property
    def _first(self) -> Any:
        given = self._optimizer
        listed = list(given.values()) if hasattr(given, "values") else given
        return listed[0] if isinstance(listed, list | tuple) else listed
