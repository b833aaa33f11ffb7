"""A checkpoint of all servers is loaded by any number of servers, whatever happened while it was written."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch
from kept_shard import PARAMETERS, ask, make_job, numbers_of, opened, push, state_of, trained

from echelon.base.errors import CheckpointError
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint, load_into, locate
from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.protocol.hashing import bucket_of
from echelon.parameter_server.protocol.job_spec import BUCKETS, DenseRule, job_from_json
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.table import Table


def job_of(servers, mode="async", **options):
    return make_job(servers=servers, mode=mode, **options)


def shards_of(job, directory):
    return [opened(job, server, directory / f"server-{server}") for server in range(job.servers)]


def save(shards, path, step=0):
    for shard in shards:
        ask(shard, {"op": "save", "path": str(path), "step": step, "worker": 0})


def load(shards, path):
    return [ask(shard, {"op": "load", "path": str(path), "worker": 0}).head["step"] for shard in shards]


def rows_of(shards):
    """By table, {id: record} over all servers."""
    found = {}
    for shard in shards:
        for name, table in shard.tables.items():
            for bucket in table.buckets:
                rows = table.rows_of(bucket)
                found.setdefault(name, {}).update(zip(rows.ids.tolist(), map(bytes, rows.records), strict=True))
    return found


def dense_of(shards):
    """By parameter and name of the array, the whole of it, put together here from blocks."""
    found = {}
    for shard in shards:
        arrays = shard.dense.to_arrays()
        for number, block in enumerate(shard.dense.blocks):
            for key, array in arrays.items():
                at, _, name = key.partition("/")
                if at == str(number):
                    size = int(np.prod(PARAMETERS[block.parameter]))
                    whole = found.setdefault((block.parameter, name), np.full(size, np.nan, np.float32))
                    whole[block.offset : block.offset + block.length] = array
    return {key: value.tobytes() for key, value in found.items()}


@pytest.mark.parametrize(("before", "after"), [(1, 3), (5, 2)])
def test_another_number_of_servers_goes_on_with_the_same_numbers(tmp_path, before, after):
    """The loaded servers then take the same pushes as servers that were that many from the start."""
    one = shards_of(job_of(before), tmp_path / "a")
    two = [trained(12, job_of(after), server) for server in range(after)]
    for shard in one:
        for number in range(12):
            push(shard, number)
    save(one, tmp_path / "ckpt", step=12)
    loaded = shards_of(job_of(after), tmp_path / "b")
    assert load(loaded, tmp_path / "ckpt") == [12] * after
    served = [ServerShard(server, after) for server in range(after)]  # as servers that keep nothing
    for shard in served:
        ask(shard, {"op": "open", "worker": 0, "job": job_of(after).to_json()})
        assert load_into(shard, tmp_path / "ckpt") == 12
    assert rows_of(served) == rows_of(loaded) == rows_of(one) == rows_of(two)
    assert dense_of(loaded) == dense_of(one) == dense_of(two)
    steps = [[table.step for table in shard.tables.values()] for shard in loaded]
    assert steps == [[12, 12]] * after
    for shard in two:  # the same pushes upon both, numbered as each of them counts
        for membership in shard.members.memberships.values():
            membership.seq = membership.committed = -1
    for number in range(5):
        for shard in (*loaded, *two):
            push(shard, number)
    assert rows_of(loaded) == rows_of(two)
    assert dense_of(loaded) == dense_of(two)
    for shard in (*one, *loaded):
        shard.close()


def test_what_was_loaded_outlives_the_process(tmp_path):
    job = make_job()
    shard = opened(job, directory=tmp_path / "a")
    for number in range(5):
        push(shard, number)
    _save_all(shard, tmp_path / "ckpt")
    other = opened(job, directory=tmp_path / "b")
    for number in range(9):  # something else, which the checkpoint replaces
        push(other, number)
    load([other], tmp_path / "ckpt")
    expected = numbers_of(other)
    assert expected == numbers_of(shard)
    push(other, 9)
    after = state_of(other)
    other.close()
    assert state_of(opened(job, directory=tmp_path / "b")) == after
    shard.close()


def _save_all(shard, path, step=3):
    """``shard`` is one of many: the other parts are those of servers that had no push."""
    save([shard], path, step)
    for server in range(1, shard.servers):
        other = opened(shard.job, server, path.parent / "others" / str(server))
        save([other], path, step)
        other.close()


@pytest.mark.parametrize("pushes", [0, 2])
def test_passes_go_on_after_a_load(tmp_path, pushes):
    """Rows expire at the pass at which they do in a job that was not stopped, also if no push comes before its end."""

    def end_pass(shard):
        ask(shard, {"op": "new_pass", "worker": 0})

    def train(shard, first, count):
        for number in range(first, first + count):
            push(shard, number)

    (kept,) = shards_of(job_of(1), tmp_path / "a")
    for epoch in range(3):
        train(kept, 4 * epoch, 4)
        if epoch < 2:
            end_pass(kept)
    save([kept], tmp_path / "ckpt", step=12)
    (loaded,) = shards_of(job_of(1), tmp_path / "b")
    load([loaded], tmp_path / "ckpt")
    held = len(loaded.tables["b"])
    for shard, at in ((kept, 12), (loaded, 0)):
        train(shard, at, pushes)
        end_pass(shard)
        end_pass(shard)  # a retry
    assert (kept.store.passes, loaded.store.passes) == (3, 3)
    for shard in (kept, loaded):
        train(shard, 12 + pushes if shard is kept else pushes, 1)
        end_pass(shard)
    assert (kept.store.passes, loaded.store.passes) == (4, 4)
    assert len(loaded.tables["b"]) < held


def test_saves_while_pushes_come_keep_every_record_whole(tmp_path):
    """In an async job each saved row, with weights, state and counts, is one that some push left."""
    job = make_job()
    shard, straight = opened(job, directory=tmp_path / "a"), opened(job)
    history = {name: {} for name in shard.tables}
    held, number = shard.persistence._held, 0

    def interrupted():
        nonlocal number
        push(shard, number)
        push(straight, number)
        number += 1
        for name, table in straight.tables.items():
            for ids, records in _all_rows(table):
                for id_, record in zip(ids.tolist(), map(bytes, records), strict=True):
                    history[name].setdefault(id_, []).append((number, record))
        return held()

    shard.persistence._held = interrupted
    _save_all(shard, tmp_path / "ckpt")
    versions = set()
    with ServerCheckpoint(tmp_path / "ckpt") as saved:
        for name in straight.tables:
            for rows in saved.buckets(name):
                for id_, record in zip(rows.ids.tolist(), map(bytes, rows.records), strict=True):
                    versions.add(min(at for at, known in history[name][id_] if known == record))
    assert len(versions) > 2  # pushes did come in between
    shard.close()


def _all_rows(table: Table):
    for bucket in table.buckets:
        rows = table.rows_of(bucket)
        if len(rows.ids):
            yield rows.ids, rows.records


def test_a_sync_step_that_ends_during_a_save_is_not_half_in_it(tmp_path):
    job = make_job(mode="sync", trainers=2)
    shard = opened(job, directory=tmp_path / "a")
    for number in range(9):  # worker 1's part of step 4 is missing
        push(shard, number)
    held, calls = shard.persistence._held, 0

    def interrupted():
        nonlocal calls
        calls += 1
        if calls == 3:
            push(shard, 9)
        return held()

    shard.persistence._held = interrupted
    _save_all(shard, tmp_path / "ckpt")
    loaded = opened(job, directory=tmp_path / "b")
    load([loaded], tmp_path / "ckpt")
    assert numbers_of(loaded) == numbers_of(trained(10, job))
    loaded.close()
    shard.close()


def test_incomplete_or_damaged_checkpoint_changes_nothing(tmp_path):
    """An incomplete or damaged checkpoint is refused in one line and changes nothing."""
    job = job_of(2)
    shards = shards_of(job, tmp_path / "a")
    for shard in shards:
        push(shard, 0)
    expected = [state_of(shard) for shard in shards]
    ckpt = tmp_path / "ckpt"

    def refused(match):
        answer = shards[0].handle(_frame(ckpt))
        assert match in answer.head["error"], answer.head
        assert "\n" not in answer.head["error"]
        assert [state_of(shard) for shard in shards] == expected

    refused("no checkpoint of servers at")
    save(shards[:1], ckpt, 1)
    refused("server-1-of-2.json is missing; the save was interrupted")
    save(shards[1:], ckpt, 2)
    refused("its parts are of different steps")
    save(shards[1:], ckpt, 1)
    part = ckpt / "server-1-of-2.rec"
    content = part.read_bytes()
    for at in np.random.default_rng(2).integers(0, len(content), 10):
        flipped = bytearray(content)
        flipped[at] ^= 16
        part.write_bytes(flipped)
        refused("server-1-of-2.rec")
    part.write_bytes(content[:-3])
    refused("server-1-of-2.rec is truncated")
    part.write_bytes(content)
    assert load(shards, ckpt) == [1, 1]
    for shard in shards:
        shard.close()


def _frame(path):
    return WireMessage({"op": "load", "worker": 0, "path": str(path)})


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path):
    shard = opened(job_of(1), directory=tmp_path / "a")
    save([shard], tmp_path / "ckpt")
    shard.close()
    other = job_of(1).to_json()
    other["tables"][0]["dim"] = 4
    wider = opened(job_from_json(other), directory=tmp_path / "b")
    answer = wider.handle(_frame(tmp_path / "ckpt"))
    assert "holds table 'a' with dim 3, Adam and 6 floats of state" in answer.head["error"]
    wider.close()


def test_checkpoint_of_another_dtype_is_rounded_and_said(tmp_path, capfd):
    shard = opened(job_of(1), directory=tmp_path / "a")
    for number in range(4):
        push(shard, number)
    save([shard], tmp_path / "ckpt")
    narrow = job_of(1).to_json()
    narrow["tables"][1]["dtype"] = "bf16"
    other = opened(job_from_json(narrow), directory=tmp_path / "b")
    ask(other, {"op": "load", "worker": 0, "path": str(tmp_path / "ckpt")})
    said = capfd.readouterr().err
    assert "table 'b': the checkpoint's float32 weights are loaded as bf16, rounded to the nearest" in said
    assert "table 'a'" not in said
    ids = np.concatenate([ids for ids, _ in shard.tables["b"].items()])
    exact, found = (each.tables["b"].pull_state(ids) for each in (shard, other))
    np.testing.assert_array_equal(found[:, :2], torch.from_numpy(exact[:, :2]).bfloat16().float().numpy())
    np.testing.assert_array_equal(found[:, 2:], exact[:, 2:])
    for each in (shard, other):
        each.close()


def test_the_highest_complete_step_below_a_directory_is_found(tmp_path):
    shard = opened(job_of(1), directory=tmp_path / "a")
    for step in (5, 20, 100):
        save([shard], tmp_path / "run" / f"step-{step}" / "servers", step)
    shard.close()
    (tmp_path / "run" / "step-100" / "servers" / "server-0-of-1.json").write_text("damaged")
    assert locate(tmp_path / "run") == tmp_path / "run" / "step-20" / "servers"
    assert locate(tmp_path / "run" / "step-5" / "servers") == tmp_path / "run" / "step-5" / "servers"
    with pytest.raises(CheckpointError, match="no checkpoint of servers"):
        ServerCheckpoint(locate(tmp_path / "a"))


def test_saving_and_loading_need_little_memory_beside_the_table(tmp_path):
    """64 buckets with 800,000 rows, of which a save holds two portions of about a megabyte at a time."""
    job = make_job()
    shard = opened(job, directory=tmp_path / "a")
    ids = np.arange(12_800_000)
    ids = ids[bucket_of(ids, BUCKETS) < 64]
    table = shard.tables["b"]
    table.push(ids, np.ones((len(ids), 2), np.float32))
    size = len(table) * table.words * 4
    peaks = []
    for act in (shard.persistence.snapshot, lambda: save([shard], tmp_path / "ckpt")):
        tracemalloc.start()
        act()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len(ids) > 700_000
    assert max(peaks) < size / 4, (peaks, size)
    shard.close()


def test_tables_without_dense_blocks_are_saved_and_loaded(tmp_path):
    job = dataclasses.replace(job_of(1), blocks=(), dense=DenseRule())
    shards = [ServerShard(0, 1, keep=lambda s, d=d: ShardPersistence(s, tmp_path / d, job.keeping)) for d in "ab"]
    for shard in shards:
        ask(shard, {"op": "open", "worker": 0, "job": job.to_json()})
    ids = np.arange(100)
    head = {"op": "push", "worker": 0, "seq": 0, "tables": {"b": 100}, "commit": True, "has": ["ids", "rows"]}
    ask(shards[0], head, [ids, np.ones(200, np.float32)])
    save(shards[:1], tmp_path / "ckpt")
    load(shards[1:], tmp_path / "ckpt")
    assert rows_of(shards[1:]) == rows_of(shards[:1])
    assert len(rows_of(shards[1:])["b"]) == 100
    for shard in shards:
        shard.close()
