"""Which files go first: those that take longest, so that at the end no worker is left alone with one of them."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: workers and their ranks share two cores

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
    "test_ps_faults.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
