"""No test of the launcher leaves a launcher behind; and which of them are spared the fresh start of every rank."""

from collections.abc import Iterator

import command
import pytest

#: Tests of what a job does: their launchers fork ranks that are warm. How ranks are started, found and ended is what
#: test_run.py, test_roles.py, test_failure.py, test_hosts.py and others prove, on ranks that come to be as a user's do.
WARM = (
    "test_doctor_run.py",
    "test_elastic.py",
    "test_hybrid_failure.py",
    "test_memory_run.py",
    "test_record_run.py",
    "test_run_plan.py",
    "test_stall_run.py",
    "test_survival.py",
    "test_timeline_run.py",
    "test_verify_run.py",
)


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    command.warm = request.path.name in WARM
    yield
    command.warm = False


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what a job does, among others of how its ranks come to be: they are spared the fresh start."""
    monkeypatch.setattr(command, "warm", True)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    command.stop_all()
