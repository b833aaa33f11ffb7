"""No test of the launcher leaves a launcher behind."""

from collections.abc import Iterator

import command
import pytest


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    command.stop_all()
