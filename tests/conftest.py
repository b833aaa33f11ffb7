"""Order of test files: the slowest go first, so that at the end no worker is left alone with one of them. One
fork server serves all workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: workers and their ranks share two cores
if os.environ.get("ECHELON_TEST_GPU"):  # set by `make test-gpu`
    os.environ["ECHELON_FAST"] = "0"  # results are compared in fp32; tests of the fast path ask for its parts
if os.environ.get("ECHELON_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `make test` is the same on every machine

import fork_server

try:
    import hypothesis
except ImportError:  # a machine with a GPU may lack it: tests beside those that need it run there
    sys.path.append(str(Path(__file__).parent / "gpu" / "stand_ins"))  # ranks take over this path
else:  # how long an example takes depends on what else the machine does
    hypothesis.settings.register_profile("suite", deadline=None)
    hypothesis.settings.load_profile("suite")

LONGEST = (
    "test_zoo_learning.py",
    "test_ray.py",
    "test_roles.py",
    "test_zoo_recipes.py",
    "test_examples.py",
    "test_hybrid_state.py",
    "test_strategies.py",
    "test_run_plan.py",
    "test_zoo_train.py",
    "test_docs.py",
    "test_hosts.py",
    "test_hybrid.py",
    "test_run.py",
    "test_bench.py",
    "test_ps_faults.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fork_server"] = fork_server.offer()


def pytest_configure(config: pytest.Config) -> None:
    fork_server.join(getattr(config, "workerinput", {}).get("fork_server", {}))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="module", autouse=True)
def _no_world_left() -> Iterator[None]:
    """Leave the job that a module's tests have joined in this process: tests of the next module would be in it."""
    yield
    if "echelon.distributed.world" in sys.modules:
        sys.modules["echelon.distributed.world"].shutdown()
