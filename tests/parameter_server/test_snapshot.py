"""A shard that is stopped and started again goes on as if nothing had been."""

import random
import time

import numpy as np
import pytest
from kept_shard import PersistenceSettings, make_job, numbers_of, opened, push, received, state_of, trained

from echelon.base.errors import CheckpointError
from echelon.parameter_server.persistence.restore import Manifest
from echelon.parameter_server.persistence.snapshot import merge_delta_rows
from echelon.parameter_server.table import BucketRows
from echelon.strategy.show_click_score import ShowClickScore

NARROW = {"dtype": "int8"}
SCORED = {"dtype": "bf16", "score": ShowClickScore(threshold=0.2, decay=0.7)}


@pytest.mark.parametrize(
    ("mode", "table"),
    [
        *((mode, {}) for mode in ("sync", "async", "bounded", "geo")),
        ("geo", NARROW),
        ("sync", SCORED),
        ("async", SCORED),
    ],
)
def test_a_restored_shard_equals_one_that_was_never_stopped(tmp_path, mode, table):
    job = make_job(mode=mode, trainers=2, **table)
    shard = opened(job, directory=tmp_path)
    for number in range(61):
        push(shard, number)
        if number in (7, 15, 16, 40):
            shard.persistence.snapshot()
    shard.close()
    again = opened(job, directory=tmp_path)
    assert received(again) == 61
    assert state_of(again) == state_of(trained(61, job))
    for number in range(61, 70):
        push(again, number)
    again.close()
    assert state_of(opened(job, directory=tmp_path)) == state_of(trained(70, job))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_snapshot_with_pushes_between_buckets_fits_together(tmp_path, mode):
    """Buckets are taken at different moments: the journal brings them to the same one."""
    job = make_job(mode=mode, trainers=2)
    shard = opened(job, directory=tmp_path)
    chance = random.Random(1)
    take, number = shard.persistence._held, 0

    def interrupted():
        nonlocal number
        if chance.random() < 0.3:
            push(shard, number)
            number += 1
        return take()

    shard.persistence._held = interrupted
    for _ in range(4):
        shard.persistence.snapshot()
    shard.close()
    assert number > 3
    assert state_of(opened(job, directory=tmp_path)) == state_of(trained(number, job))


def test_an_evicting_table_is_restored_with_the_rows_it_had(tmp_path):
    job = make_job(on_full="lru", capacity=3200)
    shard = opened(job, directory=tmp_path)
    for number in range(30):
        push(shard, number)
        if number % 7 == 0:
            shard.persistence.snapshot()
    shard.close()
    straight = trained(30, job)
    assert len(straight.tables["b"]) <= 200
    assert numbers_of(opened(job, directory=tmp_path)) == numbers_of(straight)


def test_without_journal_state_is_that_of_the_last_snapshot(tmp_path):
    job = make_job(keeping=PersistenceSettings(journal=False, snapshot_every=3600.0))
    shard = opened(job, directory=tmp_path)
    for number in range(25):
        push(shard, number)
        if number in (9, 19):
            shard.persistence.snapshot()
    shard.close()
    again = opened(job, directory=tmp_path)
    assert received(again) == 20
    assert state_of(again) == state_of(trained(20, job))
    again.close()


def test_deltas_outweighing_base_become_a_base_and_old_files_go(tmp_path):
    job = make_job()
    shard = opened(job, directory=tmp_path)
    lengths = []
    for number in range(40):
        push(shard, number)
        shard.persistence.snapshot()
        manifest = Manifest.read(tmp_path)
        lengths.append(len(manifest.chain))
        base, *deltas = [part.bytes for part in manifest.chain]
        assert sum(deltas[:-1]) <= base
        files = {path.name for path in tmp_path.iterdir()} - {".lock"}
        assert files == {"manifest.json", f"journal-{manifest.segment:08d}.seg", *(p.file for p in manifest.chain)}
    assert lengths.count(1) >= 2
    assert max(lengths) >= 3
    shard.close()
    assert state_of(opened(job, directory=tmp_path)) == state_of(trained(40, job))


def test_a_long_journal_calls_for_a_snapshot_by_itself(tmp_path):
    shard = opened(make_job(), directory=tmp_path, journal_limit=20_000)
    first = Manifest.read(tmp_path).number
    number = 0
    while Manifest.read(tmp_path).number == first:
        push(shard, number)
        number += 1
    shard.close()


def test_disk_refusing_a_record_refuses_only_that_push(tmp_path, monkeypatch):
    job = make_job()
    shard = opened(job, directory=tmp_path)
    push(shard, 0)
    segment = shard.persistence._segment
    size = segment.path.stat().st_size

    def full(handle, views):
        import os

        os.write(handle, b"half of a record")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("echelon.parameter_server.persistence.file_record.os.writev", full)
        with pytest.raises(AssertionError, match="No space left on device; free some space"):
            push(shard, 1)
    assert segment.path.stat().st_size == size
    push(shard, 1)
    shard.close()
    assert state_of(opened(job, directory=tmp_path)) == state_of(trained(2, job))


def test_failed_snapshot_is_followed_by_a_complete_base(tmp_path, monkeypatch):
    job = make_job()
    shard = opened(job, directory=tmp_path)
    push(shard, 0)
    shard.persistence.snapshot()
    push(shard, 1)

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("echelon.parameter_server.persistence.snapshot.os.fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            shard.persistence.snapshot()
    push(shard, 2)
    shard.persistence.snapshot()
    assert len(Manifest.read(tmp_path).chain) == 1
    shard.close()
    assert state_of(opened(job, directory=tmp_path)) == state_of(trained(3, job))


def test_another_session_replaces_job_with_snapshot_under_way(tmp_path):
    """The keeper of the first job is closed under the shard's lock, while its thread waits for that lock."""
    job = make_job()
    shard = opened(job, directory=tmp_path / "a")
    push(shard, 0)
    persistence = shard.persistence
    with shard.lock:
        persistence._due.set()
        while persistence._due.is_set():  # until the thread has begun, and waits for the lock
            time.sleep(0.001)
        persistence.close()
    assert not persistence._thread.is_alive()
    assert received(opened(job, directory=tmp_path / "a")) == 1


def test_merged_rows_are_those_of_the_later_delta():
    def rows(ids, value, removed=()):
        return BucketRows(
            np.array(ids, np.int64), np.full((len(ids), 2), value, np.uint32), np.array(removed, np.int64)
        )

    found = merge_delta_rows(merge_delta_rows(rows([1, 2, 3], 7), rows([2, 4], 8, [3])), rows([3], 9, [4]))
    assert dict(zip(found.ids.tolist(), found.records[:, 0].tolist(), strict=True)) == {1: 7, 2: 8, 3: 9}
    assert found.removed.tolist() == [4]
    assert merge_delta_rows(None, rows([1], 1)).ids.tolist() == [1]


@pytest.mark.parametrize("there", ["snapshot", "manifest", "journal"])
def test_damaged_file_is_named_in_one_line_nothing_half_loaded(tmp_path, there):
    job = make_job()
    shard = opened(job, directory=tmp_path)
    for number in range(6):
        push(shard, number)
        if number in (2, 4):
            shard.persistence.snapshot()
    shard.close()
    path = max(tmp_path.glob(f"{there}*"))
    content = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(content), 12):
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(at % 8)
        path.write_bytes(flipped)
        with pytest.raises(AssertionError) as caught:
            opened(job, directory=tmp_path)
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value).split("assert")[0].strip()
    path.write_bytes(content)
    assert state_of(opened(job, directory=tmp_path)) == state_of(trained(6, job))


def test_a_truncated_snapshot_is_said_and_not_loaded(tmp_path):
    job = make_job()
    shard = opened(job, directory=tmp_path)
    push(shard, 0)
    shard.persistence.snapshot()
    shard.close()
    path = max(tmp_path.glob("snapshot-*"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AssertionError, match=f"{path.name} is truncated"):
        opened(job, directory=tmp_path)
    path.unlink()
    with pytest.raises(AssertionError, match=f"cannot read .*{path.name}"):
        opened(job, directory=tmp_path)
