"""kill -9 of a server and of a worker in one job: it ends, and as if nothing had been. ps_faults.py does the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from ps_faults import faults, job

pytestmark = pytest.mark.timeout(600)


def test_sync_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    plain = job("sync", [], tmp_path / "plain")
    killed = job("sync", ["server-1", "rank-0"], tmp_path / "killed", replica=True)
    assert faults("sync", plain, plain.result) == []
    assert faults("sync", killed, plain.result) == []
