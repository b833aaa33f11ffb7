"""Directories of runs: each job creates one, and commands take the newest."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echelon.base.errors import UsageError
from echelon.observability.runlog.run_directory import new_run_directory, newest_run_directory


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_jobs_that_start_together_get_different_directories() -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(new_run_directory, ["train"] * 40))
    assert sorted(made) == sorted(Path("runs", f"train-{number}") for number in range(1, 41))


def test_number_follows_the_largest_one_of_the_same_name() -> None:
    for name in ("train-2", "train-x", "train-lm-7", "train"):
        Path("runs", name).mkdir(parents=True)
    assert new_run_directory("train") == Path("runs/train-3")
    assert new_run_directory("train-lm") == Path("runs/train-lm-8")
    assert new_run_directory("[a]*") == Path("runs/[a]*-1")
    assert new_run_directory("[a]*") == Path("runs/[a]*-2")


def test_newest_run_is_the_one_that_was_written_last() -> None:
    for age, (name, file) in enumerate([("c", "metrics.jsonl"), ("a", "rank-0.log"), ("b", "run.json")]):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, file).touch()
        os.utime(Path("runs", name, file), (1e9 - age, 1e9 - age))
    Path("runs/empty").mkdir()
    assert newest_run_directory() == "runs/c"
    Path("runs/a/metrics.jsonl").touch()
    assert newest_run_directory() == "runs/a"


def test_without_a_run_the_line_says_where_it_was_looked_for() -> None:
    Path("runs/empty").mkdir(parents=True)
    with pytest.raises(UsageError, match="there is no run in 'runs'; name the log directory of a run"):
        newest_run_directory()
