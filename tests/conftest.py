"""Which files go first: those that take longest, so that at the end no worker is left alone with one of them. And one
fork server for all workers."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: workers and their ranks share two cores

import fork_server

#: How long an example takes depends on what else the machine does.
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
