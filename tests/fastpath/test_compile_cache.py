"""Compiled programs are kept in a directory of the run that this user made there, and in no other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from echelon.fastpath import compile_cache
from echelon.fastpath.compile_cache import FOLDER, VARIABLE, keep_programs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_cache_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is undone
    monkeypatch.delenv(VARIABLE)


def kept_in(directory: Path) -> Path:
    os.environ.pop(VARIABLE, None)
    assert keep_programs(directory, CPU) is None
    return Path(os.environ[VARIABLE])


def test_a_restart_finds_the_folder_of_the_first_run(tmp_path: Path) -> None:
    folder = kept_in(tmp_path / "run")
    assert folder.parent == tmp_path / "run" / FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "program").write_text("")
    assert kept_in(tmp_path / "run") == folder
    assert (folder / "program").exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_another_processor_has_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept_in(tmp_path)
    monkeypatch.setattr(compile_cache, "_processor", lambda: "flags: others")
    assert kept_in(tmp_path) != first


def test_torch_keeps_its_programs_there(tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = kept_in(tmp_path)
    assert cache_dir() == str(folder)


def test_a_place_that_the_user_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mine")
    assert keep_programs(tmp_path, CPU) is None
    assert os.environ[VARIABLE] == "mine"
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_directory_leaves_torch_its_own() -> None:
    assert keep_programs(None, CPU) is None
    assert VARIABLE not in os.environ


def refused(directory: Path) -> str:
    os.environ.pop(VARIABLE, None)
    line = keep_programs(directory, CPU)
    assert VARIABLE not in os.environ
    assert line is not None
    assert line.startswith("fast: compiled programs are not kept: ")
    return line


def test_a_copied_folder_is_not_used(tmp_path: Path) -> None:
    kept_in(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert "was copied from elsewhere, and may hold code of others; remove it" in refused(tmp_path / "copy")


def test_a_folder_without_note_is_not_used(tmp_path: Path) -> None:
    folder = kept_in(tmp_path)
    (folder / compile_cache.ORIGIN).unlink()
    assert "was copied from elsewhere" in refused(tmp_path)


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    kept_in(tmp_path).chmod(0o770)
    assert "is open to other users" in refused(tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory)" in refused(tmp_path / "file")
