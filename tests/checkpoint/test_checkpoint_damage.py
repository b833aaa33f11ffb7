"""A checkpoint that is not what was written, or cannot be written, is one line: never a wrong value or a hang."""

import json
import os
import random
import resource
import shutil
import signal
import zlib
from pathlib import Path

import pytest
import torch
from harness import errors, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import echelon
from echelon.checkpoint import CheckpointError, Stored, Writer, export, find, latest, verify


def tensors():
    return {"model.weight": torch.arange(40.0).reshape(8, 5), "step": torch.tensor(3), "mask": torch.ones(3) > 0}


def writer(directory, **options):
    world = echelon.init()
    return Writer(directory, rank=world.rank, world_size=world.size, group=world.control, **options)


def save_from_two_ranks(directory):
    kept = writer(directory, asynchronous=False)
    shard = distribute_tensor(torch.arange(30.0).reshape(6, 5), init_device_mesh("cpu", (2,)), [Shard(0)])
    kept.save(1, tensors() | {"shard": shard}, {"epoch": 2})


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("good")
    run(save_from_two_ranks, directory, ranks=2)
    return latest(directory)


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / good.name))


def one_line(error):
    return "\n" not in str(error.value)


def load_everything(path):
    stored = Stored(path)
    for name in stored.names():
        stored.read(name)


@pytest.mark.parametrize("file", ["index.json", "rank-0.safetensors"])
def test_link_or_pipe_in_place_of_a_file_is_refused(copy, tmp_path, file):
    """Neither is a file outside the checkpoint read, nor does a pipe block the reader."""
    outside = tmp_path / "outside"
    (copy / file).rename(outside)
    (copy / file).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{file} is a symbolic link, which a checkpoint does not contain"):
        load_everything(copy)
    (copy / file).unlink()
    os.mkfifo(copy / file)
    with pytest.raises(CheckpointError, match=f"{file} is no regular file, which a checkpoint does not contain"):
        load_everything(copy)


@pytest.mark.parametrize("file", ["index.json", "rank-0.safetensors", "rank-1.safetensors"])
def test_no_flipped_bit_goes_unseen(copy, file):
    """Every byte of the index, every header byte, and as many of the data; each read through load and verify."""
    path = copy / file
    whole = bytearray(path.read_bytes())
    chance = random.Random(file)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            load_everything(copy)
        assert one_line(caught)
        assert file in str(caught.value)
        with pytest.raises(CheckpointError):
            verify(copy)
    path.write_bytes(whole)
    verify(copy)


@pytest.mark.parametrize("file", ["index.json", "rank-0.safetensors", "rank-1.safetensors"])
def test_truncated_extended_and_missing_files_are_named(copy, file):
    path = copy / file
    whole = path.read_bytes()
    for changed in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], whole + b"x"):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=file) as caught:
            load_everything(copy)
        assert one_line(caught)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{file}: No such file") as caught:
        load_everything(copy)
    assert one_line(caught)


def reseal(path, change):
    """Change the index as someone would who knows the format, checksum and all."""
    content = json.loads((path / "index.json").read_text())
    del content["checksum"]
    change(content)
    text = ("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())).encode()
    (path / "index.json").write_bytes(text + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(text))


def at(*keys, to):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


def without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


WEIGHT = ("tensors", "model.weight")
CHUNK = (*WEIGHT, "chunks", 0)
FILE = ("files", "rank-0.safetensors")
HUGE = 2**62
HOSTILE = {
    "a path out of the directory": at(*CHUNK, "file", to="../../x.safetensors"),
    "an absolute path": at(*CHUNK, "file", to="/etc/passwd"),
    "a path among the files": lambda content: content["files"].update({"../rank-0.safetensors": {}}),
    "a device": at(*CHUNK, "file", to="/dev/zero"),
    "a file that is not listed": at(*CHUNK, "file", to="rank-7.safetensors"),
    "a file name of another type": at(*CHUNK, "file", to=["rank-0.safetensors"]),
    "a huge shape": at(*WEIGHT, "shape", to=[HUGE, HUGE]),
    "a huge empty shape": at(*WEIGHT, "shape", to=[0, HUGE, HUGE]),
    "a number beyond 64 bits": at(*WEIGHT, "shape", to=[10**40]),
    "a huge number of bytes": at(*CHUNK, "nbytes", to=HUGE),
    "a huge start": at(*CHUNK, "start", to=HUGE),
    "a start in another tensor": at(*CHUNK, "start", to=0),
    "a huge header": at(*FILE, "header_nbytes", to=HUGE),
    "a negative offset": at(*CHUNK, "offsets", to=[-1, 0]),
    "an offset out of the tensor": at(*CHUNK, "offsets", to=[1, 0]),
    "too few dimensions": at(*CHUNK, "sizes", to=[40]),
    "too many dimensions": at(*WEIGHT, "shape", to=[1] * 1000),
    "no pieces": at(*WEIGHT, "chunks", to=[]),
    "the same piece twice": lambda content: content["tensors"]["model.weight"]["chunks"].append(
        content["tensors"]["model.weight"]["chunks"][0]
    ),
    "the same bytes under two names": lambda content: content["tensors"].update(
        {"again": content["tensors"]["model.weight"]}
    ),
    "a fraction": at(*CHUNK, "start", to=1.5),
    "a truth value as a number": at("step", to=True),
    "not a number": at("world_size", to=float("nan")),
    "an unknown dtype": at(*WEIGHT, "dtype", to="load"),
    "a dtype of another size": at(*WEIGHT, "dtype", to="float64"),
    "a dtype of another type": at(*WEIGHT, "dtype", to={"float32": 1}),
    "a checksum of another form": at(*CHUNK, "checksum", to="crc"),
    "tensors as a list": at("tensors", to=[1, 2]),
    "a tensor as text": at(*WEIGHT, to="weight"),
    "facts as text": at("facts", to="x"),
    "no facts": without("facts"),
    "no checksum of a piece": without(*CHUNK, "checksum"),
    "a tensor less": without("tensors", "step"),
    "no files": at("files", to={}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index_is_refused(copy, what):
    reseal(copy, HOSTILE[what])
    with pytest.raises(CheckpointError, match="is not a usable index") as caught:
        load_everything(copy)
    assert one_line(caught)
    assert str(copy / "index.json") in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", [b"[]", b"{}", b"null", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b"\xff\xfe"]
)
def test_an_index_that_is_no_index_is_refused(copy, text):
    for sealed in (text, b',\n"checksum": "'.join((text, b'%08x"\n}\n' % zlib.crc32(text)))):
        (copy / "index.json").write_bytes(sealed)
        with pytest.raises(CheckpointError, match=r"index\.json") as caught:
            load_everything(copy)
        assert one_line(caught)


def test_resealing_without_a_change_is_accepted(copy):
    reseal(copy, lambda content: None)
    verify(copy)


def test_another_format_version_is_named(copy):
    reseal(copy, at("version", to=2))
    with pytest.raises(CheckpointError, match="version 2, this Echelon reads echelon-checkpoint version 1"):
        Stored(copy)


def test_another_model_is_named_by_its_first_differences(good):
    into = {f"model.layer{n}": torch.zeros(1) for n in range(9)}
    into |= {"model.weight": torch.zeros(8, 6), "step": torch.tensor(3.0), "mask": torch.ones(3) > 0}
    with pytest.raises(CheckpointError) as caught:
        Stored(good).load(into)
    assert "of 12 tensors 11 differ: 'model.layer0' is not in it" in str(caught.value)
    assert "and 8 more" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"'model.weight' is float32 \[8, 5\] there and float32 \[8, 6\] here"):
        Stored(good).load({"model.weight": torch.zeros(8, 6)})
    with pytest.raises(CheckpointError, match=r"'step' is int64 \[\] there and float32 \[\] here"):
        Stored(good).load({"step": torch.tensor(3.0)})


def test_nothing_is_filled_when_the_model_is_another(good):
    weight = torch.full((8, 5), -1.0)
    with pytest.raises(CheckpointError):
        Stored(good).load({"model.weight": weight, "other": torch.zeros(1)})
    assert bool((weight == -1).all())


def test_where_nothing_is_says_what_was_looked_for(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "step-00000001").mkdir()
    for path, said in [("none", "there is no such directory"), ("file", "this is a file"), (".", "index.json")]:
        with pytest.raises(CheckpointError) as caught:
            load_everything(find(tmp_path / path))
        assert said in str(caught.value)
        assert one_line(caught)
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_places_that_cannot_be_written_are_named_with_the_reason(tmp_path, asynchronous):
    (tmp_path / "file").write_text("x")
    for place, reason in [
        (Path("/proc/checkpoints"), "No such file or directory"),
        (Path("/proc/self"), ""),
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
    ]:
        kept = Writer(place, asynchronous=asynchronous)
        with pytest.raises(CheckpointError, match="saving step 1: cannot write") as caught:
            kept.save(1, tensors(), {})
        assert reason in str(caught.value)
        assert one_line(caught)


def fill_the_disk(directory, full, wait):
    """A limit on file size stands in for a full disk: the same call fails, half way through the file."""
    kept = writer(directory)
    kept.save(1, {"x": torch.zeros(10)}, {}, wait=True)
    if echelon.rank() in full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    big = {f"x{n}": torch.zeros(60_000) for n in range(4)}
    try:
        kept.save(2, big, {}, wait=wait)
        kept.wait()
    except CheckpointError as error:
        failed = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kept.save(3, big, {}, wait=True)  # with room again, the same writer goes on
    return failed


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("ranks", "full"), [(1, [0]), (2, [0]), (2, [1]), (3, [1, 2])])
def test_full_disk_on_one_rank_raises_on_all_leaves_no_files(tmp_path, ranks, full, wait):
    """A full disk on one rank raises the same error on all ranks and leaves no files of that save."""
    lines = run(fill_the_disk, tmp_path, full, wait, ranks=ranks)
    who = f"rank {full[0]}: " if ranks > 1 else ""
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"saving step 2: {who}cannot write {tmp_path}")
    assert "File too large; free some space there" in lines[0]
    assert ("and 1 more ranks failed" in lines[0]) == (len(full) > 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    verify(tmp_path / "step-00000001")
    verify(tmp_path / "step-00000003")


def elsewhere(directory):
    """Hosts that do not share the directory: each rank has its own."""
    kept = writer(directory / str(echelon.rank()), asynchronous=False)
    kept.save(1, tensors(), {})


def test_a_directory_that_hosts_do_not_share_is_told(tmp_path):
    lines = errors(elsewhere, tmp_path, ranks=2)
    assert len(set(lines)) == 1
    assert "rank 1: cannot write" in lines[0]
    assert "choose a directory that all hosts share" in lines[0]
    assert latest(tmp_path / "0") is None
    assert latest(tmp_path / "1") is None


def test_export_without_weights_or_place_is_told(good, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no tensor under 'module\.'; it holds 4 others, such as 'mask'"):
        export(good, tmp_path / "out.safetensors", prefix="module.")
    with pytest.raises(CheckpointError, match=r"cannot write .*No such file or directory") as caught:
        export(good, tmp_path / "none" / "out.safetensors")
    assert one_line(caught)
    with pytest.raises(CheckpointError, match=r"cannot write .*Is a directory"):
        export(good, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_exports_nothing(copy, tmp_path):
    path = copy / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    path = copy / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        export(copy, out, prefix="")
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "step-00000001"]
