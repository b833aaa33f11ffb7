"""Paths and names that a worker, a peer or a file gives: a server writes and reads where it may, and nowhere else."""

import os
from pathlib import Path

import pytest
from kept_shard import ask, make_job, opened, push

from echelon.base.environment import PS_PATHS
from echelon.base.errors import CheckpointError, UsageError
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint
from echelon.parameter_server.persistence.persistence import home_of
from echelon.parameter_server.persistence.requested_path import absolute, requested_path
from echelon.parameter_server.persistence.restore import Manifest, read_json, write_json
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.worker.session import ParameterServerSession


@pytest.fixture
def shard(tmp_path):
    made = opened(make_job(servers=1), directory=tmp_path / "state")
    push(made, 0)
    yield made
    made.close()


def refusal(shard, **head):
    answer = shard.handle(WireMessage({"worker": 0, "table": "a", "format": "parquet", "step": 1, **head}))
    return answer.head.get("error", "")


@pytest.mark.parametrize("op", ["save", "load", "export"])
@pytest.mark.parametrize(
    "name", ["{out}/x.parquet", "{inside}/../out/x.parquet", "{inside}/link/x.parquet", "x.parquet"]
)
def test_path_outside_of_the_named_directories_is_refused(tmp_path, shard, monkeypatch, op, name):
    inside, out = tmp_path / "inside", tmp_path / "out"
    inside.mkdir()
    out.mkdir()
    (inside / "link").symlink_to(out)
    monkeypatch.setenv(PS_PATHS, f"/nowhere:{inside}")
    error = refusal(shard, op=op, path=name.format(inside=inside, out=out))
    assert "lies outside of" in error or "is relative" in error
    assert not any(out.iterdir())


def test_path_inside_of_the_named_directories_is_written(tmp_path, shard, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "named").symlink_to(real)
    monkeypatch.setenv(PS_PATHS, str(tmp_path / "named"))  # a link itself, as mounts often are
    ask(shard, {"op": "export", "worker": 0, "path": str(real / "a" / "x.parquet"), "table": "a", "format": "parquet"})
    ask(shard, {"op": "save", "worker": 0, "path": str(tmp_path / "named" / "s"), "step": 1})
    assert (real / "a" / "x.parquet").exists()
    with ServerCheckpoint(real / "s") as saved:
        saved.verify()


@pytest.mark.parametrize("name", ["authorized_keys", ".bashrc", "x.parquet.sh", "x.safetensors"])
def test_export_replaces_only_files_named_as_exports(tmp_path, shard, name):
    target = tmp_path / name
    target.write_text("mine")
    assert "must end in .parquet" in refusal(shard, op="export", path=str(target))
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", [".x.parquet.writing", ".x.safetensors.writing", ".x.safetensors.writing-ids"])
def test_export_writes_through_no_link(tmp_path, shard, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / name).symlink_to(victim)
    form = "parquet" if "parquet" in name else "safetensors"
    error = refusal(shard, op="export", path=str(tmp_path / f"x.{form}"), format=form)
    assert "symbolic links" in error
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", [".server-0-of-1.writing", ".server-0-of-1.json.writing"])
def test_save_writes_through_no_link(tmp_path, shard, name):
    place, victim = tmp_path / "place", tmp_path / "victim"
    place.mkdir()
    victim.write_text("mine")
    (place / name).symlink_to(victim)
    assert "symbolic links" in refusal(shard, op="save", path=str(place))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["server-0-of-1.rec", "server-0-of-1.json"])
def test_saved_part_that_is_a_link_or_a_pipe_is_refused(tmp_path, shard, kind, name):
    place = tmp_path / "place"
    ask(shard, {"op": "save", "worker": 0, "path": str(place), "step": 1})
    (place / name).rename(tmp_path / "elsewhere")
    (place / name).symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(place / name)
    error = refusal(shard, op="load", path=str(place))
    assert name in error
    assert "which a checkpoint does not contain" in error


@pytest.mark.parametrize("session", ["../../x", "/x", "..", "", "a" * 5000, "a\0b"])
def test_name_of_a_session_leads_out_of_no_state_directory(tmp_path, session):
    assert home_of(tmp_path, session, 3).parent.parent == tmp_path
    assert ".." not in home_of(tmp_path, session, 3).parts


@pytest.mark.parametrize("name", ["..", "../servers-00000001", "/x", "servers-1", "servers-00000001/..", 7])
def test_index_that_names_another_directory_is_refused(tmp_path, name):
    session = ParameterServerSession.__new__(ParameterServerSession)
    session.client, session.worker = object(), 0
    with pytest.raises(CheckpointError, match="as its servers' part"):
        session.load(tmp_path / "step-00000001", name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("number", "../x"), ("number", -1), ("number", True), ("bytes", "1"), ("index", 1.5), ("rows", None)],
)
def test_manifest_whose_figures_are_none_is_refused(tmp_path, shard, field, value):
    home = tmp_path / "state"
    plain = read_json(home / "manifest.json")
    plain["chain"][0][field] = value
    write_json(tmp_path / "manifest.json", plain)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        Manifest.read(tmp_path)


def test_requested_path_is_absolute_and_free_of_dots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PS_PATHS, raising=False)
    assert absolute(Path("a/../b")) == tmp_path.resolve() / "b"
    assert requested_path("/a/b") == Path("/a/b")
    with pytest.raises(UsageError, match="relative"):
        requested_path("a")
