"""If a server loses its disk, the next server has its data."""

import shutil
import threading

import numpy as np
import pytest
from kept_shard import PersistenceSettings, ask, make_job, opened, push, received, state_of, trained

from echelon.base.errors import PeerLost
from echelon.parameter_server.persistence import replication
from echelon.parameter_server.persistence.restore import Manifest
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard

JOB = make_job(mode="sync", trainers=2, keeping=PersistenceSettings(replica=True, snapshot_every=3600.0))


class Line:
    """The way from a server to the next one; it can be cut."""

    def __init__(self, neighbour):
        self.neighbour, self.cut = neighbour, False

    def __call__(self, frame):
        if self.cut:
            raise PeerLost("server 1 does not answer")
        return self.neighbour.handle(frame)


@pytest.fixture
def line(tmp_path):
    neighbour = opened(make_job(mode="sync", trainers=2), server=1, directory=tmp_path / "server-1")
    yield Line(neighbour)
    neighbour.close()


@pytest.mark.parametrize("lost", ["everything", "the journal", "the newest snapshot", "records"])
def test_a_server_that_lost_its_files_asks_the_next_one(tmp_path, line, lost):
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    for number in range(31):
        push(shard, number)
        if number in (5, 20):
            shard.persistence.snapshot()
    shard.close()
    if lost == "everything":
        shutil.rmtree(tmp_path / "server-0")
    elif lost == "the journal":
        for path in (tmp_path / "server-0").glob("journal-*"):
            path.unlink()
    elif lost == "records":  # a power cut left zeros in their place
        journal = max((tmp_path / "server-0").glob("journal-*"))
        written = journal.read_bytes()
        journal.write_bytes(written[:-4000] + bytes(4000))
    else:
        max((tmp_path / "server-0").glob("snapshot-*")).unlink()
    again = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    assert received(again) == 31
    assert state_of(again) == state_of(trained(31, JOB))
    again.close()


def test_the_neighbour_keeps_only_what_the_last_snapshot_needs(tmp_path, line):
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    for number in range(12):
        push(shard, number)
        shard.persistence.snapshot()
    mirror = tmp_path / "server-1" / "mirror-of-0"
    own = {path.name: path.read_bytes() for path in (tmp_path / "server-0").iterdir() if path.name != ".lock"}
    assert {path.name: path.read_bytes() for path in mirror.iterdir()} == own
    shard.close()


def test_absent_neighbour_does_not_stop_training_and_catches_up(tmp_path, line, capfd):
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    push(shard, 0)
    line.cut = True
    for number in range(1, 9):
        push(shard, number)
    assert capfd.readouterr().err.count("server 0 goes on without its replica") == 1
    line.cut = False
    push(shard, 9)
    shard.persistence.snapshot()
    push(shard, 10)
    shard.close()
    shutil.rmtree(tmp_path / "server-0")
    assert state_of(opened(JOB, directory=tmp_path / "server-0", mirror=line)) == state_of(trained(11, JOB))


def test_a_neighbour_that_lost_its_copy_gets_it_again(tmp_path, line, capfd):
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    for number in range(4):
        push(shard, number)
    shutil.rmtree(tmp_path / "server-1" / "mirror-of-0")
    push(shard, 4)
    assert "it lacks journal-" in capfd.readouterr().err
    shard.persistence.snapshot()
    push(shard, 5)
    shard.close()
    shutil.rmtree(tmp_path / "server-0")
    assert state_of(opened(JOB, directory=tmp_path / "server-0", mirror=line)) == state_of(trained(6, JOB))


def test_server_without_state_waits_for_its_neighbour(tmp_path, line, monkeypatch):
    """A server that lost its disk starts while the neighbour is away: it begins no empty state over its replica."""
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    for number in range(7):
        push(shard, number)
    shard.close()
    shutil.rmtree(tmp_path / "server-0")
    line.cut = True
    with monkeypatch.context() as patch:
        patch.setattr(replication, "PATIENCE", 0.3)
        with pytest.raises(
            AssertionError, match="server 0 has no state, and the next server, which may hold its replica"
        ):
            opened(JOB, directory=tmp_path / "server-0", mirror=line)
    threading.Timer(0.5, setattr, (line, "cut", False)).start()
    again = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    assert state_of(again) == state_of(trained(7, JOB))
    again.close()


def test_replica_refuses_an_earlier_process_and_an_earlier_state(tmp_path, line, capfd):
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    for number in range(7):
        push(shard, number)
    shard.persistence.snapshot()
    shard.close()
    again = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    mirror = tmp_path / "server-1" / "mirror-of-0"
    before = {path.name: path.read_bytes() for path in mirror.iterdir()}
    head = {"op": "mirror", "worker": -1, "server": 0, "session": "test"}
    empty = Manifest(1, 0, 1, False, ())
    empty.write(tmp_path)
    manifest = np.frombuffer((tmp_path / "manifest.json").read_bytes(), np.uint8)
    for epoch, file in ((1, "journal-00000001.seg"), (1, "manifest.json"), (2, "manifest.json")):
        answer = line(WireMessage({**head, "epoch": epoch, "file": file, "offset": 0}, [manifest]))
        expected = "belongs to a later process" if epoch == 1 else "has all changes up to 8, and is not replaced by one"
        assert expected in answer.head["error"]
    assert {path.name: path.read_bytes() for path in mirror.iterdir()} == before
    push(again, 7)
    assert "without its replica" not in capfd.readouterr().err
    again.close()


def test_replica_refuses_a_manifest_without_its_snapshot(tmp_path, line, capfd):
    """A neighbour whose disk is replaced between a snapshot and its manifest must not look complete."""
    shard = opened(JOB, directory=tmp_path / "server-0", mirror=line)
    push(shard, 0)

    class Replaced(Line):
        def __call__(self, frame):
            if frame.head.get("file") == "manifest.json":
                shutil.rmtree(tmp_path / "server-1" / "mirror-of-0")
            return super().__call__(frame)

    shard.persistence._replica._call = Replaced(line.neighbour)
    shard.persistence.snapshot()
    assert "which its manifest needs" in capfd.readouterr().err
    shard.persistence._replica._call = line
    shard.persistence.snapshot()
    push(shard, 1)
    shard.close()
    shutil.rmtree(tmp_path / "server-0")
    assert state_of(opened(JOB, directory=tmp_path / "server-0", mirror=line)) == state_of(trained(2, JOB))


def test_two_servers_may_mirror_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "echelon.parameter_server.persistence.persistence.CATCH_UP", 3600.0
    )  # snapshots are taken here alone
    job = make_job(servers=2, mode="async", keeping=PersistenceSettings(replica=True, snapshot_every=3600.0))
    lines = [Line(ServerShard(server, 2)) for server in (1, 0)]  # no job is open there yet
    shards = [opened(job, server, tmp_path / f"server-{server}", lines[server]) for server in range(2)]
    for server in range(2):
        lines[server].neighbour = shards[1 - server]
    for shard in shards:
        shard.persistence.snapshot()
    training = [threading.Thread(target=lambda s=shard: [push(s, n) for n in range(20)]) for shard in shards]
    for thread in training:
        thread.start()
    for thread in training:
        thread.join()
    for server, shard in enumerate(shards):
        shard.close()
        own, mirror = tmp_path / f"server-{server}", tmp_path / f"server-{1 - server}" / f"mirror-of-{server}"
        kept = {path.name: path.read_bytes() for path in mirror.iterdir()}
        assert kept == {name: (own / name).read_bytes() for name in kept}
        assert sum(name.startswith("journal-") for name in kept) == 1


@pytest.mark.parametrize(
    "head",
    [
        {"op": "mirror", "server": 0, "file": "../../x", "offset": 0},
        {"op": "mirror", "server": 0, "file": "x.seg", "offset": 0},
        {"op": "mirror", "server": "../..", "file": "manifest.json"},
        {"op": "mirror", "server": -1, "file": "manifest.json"},
        {"op": "mirror", "server": 0, "file": "journal-00000001.seg", "offset": -5},
        {"op": "mirror", "server": 0, "file": "journal-00000001.seg", "offset": "all"},
        {"op": "mirrored", "server": 0, "file": "/etc/hostname"},
        {"op": "mirrored", "server": 0, "file": "journal-00000001.seg"},
        {"op": "mirror", "server": 0},
        {"op": "mirror", "server": 0, "keep": "no list of names", "segment": None},
    ],
)
def test_nothing_else_can_be_read_or_written_by_a_peer(tmp_path, line, head):
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    answer = line(WireMessage({"worker": -1, **head}, [np.zeros(3, np.uint8)]))
    assert "\n" not in answer.head["error"]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    assert ask(line.neighbour, {"op": "stats"}).head["ok"]
