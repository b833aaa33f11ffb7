"""A table as Parquet and safetensors: the rows that pulls see, whole or what changed, online and from a checkpoint."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from kept_shard import ask, make_job, opened, push
from safetensors import safe_open
from safetensors.numpy import load_file

from echelon.base.errors import CheckpointError, UsageError
from echelon.parameter_server.persistence.table_export import TableExport, export_checkpoint, write_table
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import BucketRows


def weights_of(shard, table="a"):
    """{id: weights} as the table itself gives them: an independent way to the rows."""
    return {
        id_: row.tobytes()
        for ids, rows in shard.tables[table].items()
        for id_, row in zip(ids.tolist(), rows, strict=True)
    }


def read(path):
    """({id: weights}, ids that are gone) of an exported file."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        pairs = list(zip(table["id"].to_pylist(), table["weights"].to_pylist(), strict=True))
        rows = {id_: np.array(row, np.float32).tobytes() for id_, row in pairs if row is not None}
        assert len(rows) + sum(row is None for _, row in pairs) == len(pairs)
        return rows, {id_ for id_, row in pairs if row is None}
    tensors = load_file(next(path.iterdir()) if path.is_dir() else path)
    rows = dict(zip(tensors["ids"].tolist(), map(bytes, tensors["weights"]), strict=True))
    assert len(rows) == len(tensors["ids"])
    return rows, set(tensors.get("removed", np.zeros(0, np.int64)).tolist())


def export(shard, path, table="a", since=None):
    head = {"op": "export", "worker": 0, "path": str(path), "table": table, "format": path.suffix[1:], "since": since}
    return ask(shard, head).head


@pytest.fixture
def one(tmp_path):
    """One of the servers: what it writes is a part in a directory."""
    made = opened(make_job(), directory=tmp_path / "state")
    yield made
    made.close()


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_export_holds_existing_rows_and_deltas_lead_to_the_next(tmp_path, one, ending):
    """An export holds the rows that exist, and a delta turns one export into the next."""
    for number in range(18):
        push(one, number)
    answer = export(one, tmp_path / f"whole.{ending}", "b")
    first = weights_of(one, "b")
    assert (answer["rows"], read(tmp_path / f"whole.{ending}")) == (len(first), (first, set()))
    for number in range(18, 62):  # passes end: rows are made, changed and forgotten
        push(one, number)
        if number == 40:
            one.persistence.snapshot()
    export(one, tmp_path / f"delta.{ending}", "b", since=answer["version"])
    changed, gone = read(tmp_path / f"delta.{ending}")
    second = weights_of(one, "b")
    assert gone
    assert set(first) - set(second) <= gone
    assert {**{id_: row for id_, row in first.items() if id_ not in gone}, **changed} == second
    export(one, tmp_path / f"again.{ending}", "b")  # base and deltas together
    assert read(tmp_path / f"again.{ending}") == (second, set())


def test_ids_that_wait_for_admission_are_not_exported(tmp_path, one):
    push(one, 0)
    assert export(one, tmp_path / "a.parquet")["rows"] == 0  # admit_after=2: all wait
    for number in range(1, 6):
        push(one, number)
    export(one, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == (weights_of(one), set())


def test_a_delta_that_cannot_be_told_apart_is_refused(tmp_path, one):
    push(one, 0)
    one.persistence.snapshot(base=True)
    answer = one.handle(_frame(tmp_path / "x.parquet", since=1))
    assert "changes since snapshot 1 are not known" in answer.head["error"]
    assert not (tmp_path / "x.parquet").exists()


def _frame(path, **more):
    from echelon.parameter_server.protocol.message import WireMessage

    return WireMessage({"op": "export", "worker": 0, "path": str(path), "table": "a", "format": "parquet", **more})


def test_several_servers_write_a_directory_of_parts(tmp_path):
    job = make_job(servers=3)
    shards = [opened(job, server, tmp_path / f"server-{server}") for server in range(3)]
    expected = {}
    for shard in shards:
        for number in range(4):
            push(shard, number)
        export(shard, tmp_path / "out.parquet", "b")
        expected |= weights_of(shard, "b")
    assert {path.name for path in (tmp_path / "out.parquet").iterdir()} == {f"part-{i}-of-3.parquet" for i in range(3)}
    assert read(tmp_path / "out.parquet") == (expected, set())
    for shard in shards:
        shard.close()


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_a_checkpoint_is_exported_without_servers(tmp_path, ending):
    job = make_job(servers=2)
    shards = [opened(job, server, tmp_path / f"server-{server}") for server in range(2)]
    expected = {}
    for shard in shards:
        for number in range(5):
            push(shard, number)
        ask(shard, {"op": "save", "worker": 0, "path": str(tmp_path / "run" / "step-5"), "step": 5})
        expected |= weights_of(shard)
        shard.close()
    out = tmp_path / f"a.{ending}"
    assert export_checkpoint(tmp_path / "run", out, "a") == len(expected)
    assert read(out) == (expected, set())
    if ending == "safetensors":
        with safe_open(out, "numpy") as file:
            assert file.metadata() == {"table": "a", "version": "5"}
    else:
        assert pq.read_schema(out).metadata[b"table"] == b"a"
    with pytest.raises(UsageError, match="has the tables a, b; choose one with --table"):
        export_checkpoint(tmp_path / "run", out)
    with pytest.raises(UsageError, match="has no table 'aa'"):
        export_checkpoint(tmp_path / "run", out, "aa")
    with pytest.raises(UsageError, match=r"cannot export to .*'csv'"):
        export_checkpoint(tmp_path / "run", tmp_path / "a.csv", "a")
    with pytest.raises(CheckpointError, match="no checkpoint of servers"):
        export_checkpoint(tmp_path / "nowhere", out, "a")


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_failed_export_leaves_no_file_and_keeps_the_old_one(tmp_path, ending):
    def broken():
        yield BucketRows(np.arange(2), np.zeros((2, 5), np.uint32))
        raise CheckpointError("the rest is damaged")

    out = tmp_path / f"t.{ending}"
    write_table(TableExport(TableSpec(name="t", dim=3), [BucketRows(np.array([7]), np.zeros((1, 5), np.uint32))]), out)
    before = out.read_bytes()
    with pytest.raises(CheckpointError, match="the rest is damaged"):
        write_table(TableExport(TableSpec(name="t", dim=3), broken()), out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_bytes() == before


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_an_empty_table_is_a_file_without_rows(tmp_path, ending):
    out = tmp_path / f"t.{ending}"
    assert write_table(TableExport(TableSpec(name="t", dim=3), []), out) == 0
    assert read(out) == ({}, set())
