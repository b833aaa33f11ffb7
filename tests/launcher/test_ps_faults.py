"""kill -9 of a server and of a worker in one job: it ends, and as if nothing had been. ps_faults.py does the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import script
from ps_faults import BATCH, EPOCH, SERVERS, TRAIN, WORKERS, faults, job, warm
from serving import served

pytestmark = pytest.mark.timeout(600)


def undisturbed(mode: str, directory: Path, steps: int) -> dict[str, Any]:
    """Run the same training undisturbed and without a launcher."""
    directory.mkdir()
    (directory / "train.py").write_text(TRAIN)
    (directory / "end").write_text(str(steps))
    words = [mode, str(EPOCH), str(BATCH), "0", "alone", str(directory / "out.json")]
    served(script, str(directory / "train.py"), words, servers=SERVERS, workers=WORKERS)
    return dict(json.loads((directory / "out.json").read_text()))


def test_sync_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    killed = job("sync", ["server-1", "rank-0"], tmp_path / "killed", replica=True, start=warm)
    plain = undisturbed("sync", tmp_path / "plain", killed.steps)
    assert faults("sync", killed, plain) == []
