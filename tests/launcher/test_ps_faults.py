"""kill -9 of a server and of a worker in one job: it ends, and as if nothing had been. ps_faults.py does the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import script
from ps_faults import BATCH, SERVERS, TRAIN, WORKERS, faults, job, warm
from serving import served

pytestmark = pytest.mark.timeout(600)


def undisturbed(mode: str, directory: Path, steps: int = 60) -> dict[str, Any]:
    """Run the same training undisturbed and without a launcher."""
    directory.mkdir()
    (directory / "train.py").write_text(TRAIN)
    words = [mode, str(steps), str(BATCH), "alone", str(directory / "out.json")]
    served(script, str(directory / "train.py"), words, servers=SERVERS, workers=WORKERS)
    return dict(json.loads((directory / "out.json").read_text()))


def test_sync_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    plain = undisturbed("sync", tmp_path / "plain")
    killed = job("sync", ["server-1", "rank-0"], tmp_path / "killed", replica=True, start=warm)
    assert faults("sync", killed, plain) == []
