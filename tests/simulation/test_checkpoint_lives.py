"""Lives of jobs that save checkpoints, by seed: kills, errors and power cuts at any disk operation of a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_life import live, simulated_savers

from echelon.checkpoint import directory, save, tensorfile

LIVES = 100


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> Iterator[None]:
    with simulated_savers():
        yield


def test_saves_are_complete_or_absent() -> None:
    for seed in range(LIVES):
        result = live(seed)
        assert not result.violations, (
            f"seed {seed} breaks a law; `make simulate RUN='checkpoint_life.py {seed}'` shows its trace: "
            f"{result.violations}"
        )


def publish_before_index(self: Any, index: Any) -> None:
    directory.publish(self._aside, self._directory, self._step)
    tensorfile.write_whole(directory.final_path(self._directory, self._step) / directory.INDEX, index.to_bytes())


def publish_over(aside: Path, home: Path, step: int) -> Path:
    final = directory.final_path(home, step)
    if final.exists():
        directory.remove_tree(final)
    aside.rename(final)
    directory.sync_directory(home)
    return final


def prune_one_more(home: Path, step: int, keep: int) -> None:
    steps = sorted(old for old in directory.complete(home) if old <= step)
    for old in steps[: -max(1, keep - 1)] if keep > 1 else steps:
        directory.remove_tree(directory.complete(home)[old])


#: Mistakes of saving that lives must find.
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "published before its index": (save.CheckpointSave, "_publish", publish_before_index),
    "files not synced": (tensorfile, "_flush", lambda file: file.flush()),
    "name not synced": (directory, "sync_directory", lambda path: None),
    "removed in place": (directory, "prune", prune_one_more),
    "leftovers not swept": (directory, "sweep", lambda path: None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_lives_find_a_mistake_of_saving(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, changed = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, changed)
    assert any(live(seed).violations for seed in range(60))
