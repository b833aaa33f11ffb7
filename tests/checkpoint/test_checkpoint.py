"""Checkpoints return all that was saved: every dtype, on any number of ranks, as of the moment of saving."""

import contextlib
import json
import math
import time

import pytest
import torch
import torch.distributed as dist
from harness import errors, run
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import echelon
from echelon import Checkpoint
from echelon.base.errors import UsageError
from echelon.checkpoint import CheckpointError, Stored, Writer, export, find, latest, verify


def model(seed=0):
    """Sixteen replicated tensors of different sizes, the same on every rank."""
    source = torch.Generator().manual_seed(seed)
    return {f"model.{n:02d}": torch.randn(n * n, 7, generator=source) for n in range(16)}


def writer(directory, **options):
    world = echelon.init()
    return Writer(directory, rank=world.rank, world_size=world.size, group=world.control, **options)


def save_model(directory, **options):
    kept = writer(directory, **options)
    rank = echelon.rank()
    kept.save(7, model() | {f"rng.{rank}": torch.arange(5) + rank}, {"ranks": echelon.world_size(), "best": math.inf})
    kept.wait()


def loads_model(directory):
    echelon.init()
    found = model(seed=1)
    stored = Stored(find(directory))
    stored.load(found)
    return all(torch.equal(found[name], value) for name, value in model().items())


EVERY_DTYPE = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
]


def of_dtype(dtype, *shape):
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
    return torch.complex(whole.double(), -whole.double()).to(dtype) if dtype.is_complex else whole.to(dtype)


def same(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_dtype_and_form_returns_as_it_was(tmp_path, dtype, asynchronous):
    tensors = {
        "plain": of_dtype(dtype, 3, 5),
        "scalar": of_dtype(dtype),
        "empty": of_dtype(dtype, 0, 4),
        "transposed": of_dtype(dtype, 3, 5).t(),
        "strided": of_dtype(dtype, 9)[::2],
    }
    kept = Writer(tmp_path, asynchronous=asynchronous)
    kept.save(1, tensors, {})
    kept.wait()
    stored = Stored(latest(tmp_path))
    assert all(same(stored.read(name), value) for name, value in tensors.items())
    assert {stored.dtype(name) for name in stored.names()} == {dtype}
    into = {name: torch.zeros_like(value.t()).t() for name, value in tensors.items()}  # filled whatever their strides
    stored.load(into)
    assert all(same(into[name], value) for name, value in tensors.items())


def test_conjugate_views_and_parameters_are_stored_by_value(tmp_path):
    tensors = {"conj": torch.randn(3, dtype=torch.complex64).conj(), "weight": torch.nn.Parameter(torch.randn(2, 2))}
    Writer(tmp_path, asynchronous=False).save(1, tensors, {})
    stored, target = Stored(latest(tmp_path)), torch.nn.Parameter(torch.zeros(2, 2))
    stored.load({"weight": target})
    assert target.requires_grad
    assert torch.equal(target, tensors["weight"])
    assert torch.equal(stored.read("conj"), tensors["conj"])


def test_the_files_are_ordinary_safetensors_and_json(tmp_path):
    tensors = {"a": torch.randn(3, 3), "b": torch.randn(2).bfloat16(), "c": torch.tensor(True)}
    path = Writer(tmp_path, asynchronous=False).save(120, tensors, {"epoch": 3})
    assert path == tmp_path / "step-00000120"
    held = load_file(path / "rank-0.safetensors")
    assert all(same(held[name], value) for name, value in tensors.items())
    assert json.loads((path / "index.json").read_text())["facts"] == {"epoch": 3}


@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (2, 2), (4, 4), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_any_number_of_ranks_loads_what_any_number_wrote(tmp_path, wrote, reads):
    run(save_model, tmp_path, ranks=wrote)
    assert run(loads_model, tmp_path, ranks=reads) == [True] * reads
    stored = Stored(latest(tmp_path))
    assert (stored.step, stored.world_size) == (7, wrote)
    assert stored.facts == {"ranks": wrote, "best": math.inf}
    assert [stored.read(f"rng.{rank}").tolist() for rank in range(wrote)] == [
        [rank, rank + 1, rank + 2, rank + 3, rank + 4] for rank in range(wrote)
    ]
    verify(tmp_path)


def test_save_replicated_tensors_written_once_shared_by_ranks(tmp_path):
    """Replicated tensors are written once, and every rank writes its share of them."""
    run(save_model, tmp_path, ranks=4)
    sizes = [path.stat().st_size for path in latest(tmp_path).glob("rank-*.safetensors")]
    data = sum(value.nbytes for value in model().values())
    assert len(sizes) == 4
    assert sum(sizes) < data + 8192  # the headers
    assert max(sizes) < 1.5 * data / 4


def shards(mesh, rows=10):
    full = torch.arange(rows * 6, dtype=torch.float32).reshape(rows, 6)
    return {
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full.clone(), mesh, [Shard(1)]),
        "copies": distribute_tensor(full.clone(), mesh, [Replicate()]),
        "few": distribute_tensor(full[:3].clone(), mesh, [Shard(0)]),  # fewer rows than four ranks
    }


def save_shards(directory):
    kept = writer(directory)
    tensors = shards(init_device_mesh("cpu", (echelon.world_size(),)))
    kept.save(1, tensors, {})
    for tensor in tensors.values():
        tensor.to_local().zero_()
    kept.wait()


def loads_shards(directory):
    echelon.init()
    mesh = init_device_mesh("cpu", (echelon.world_size(),))
    wanted, found = shards(mesh), {name: tensor.clone() * 0 for name, tensor in shards(mesh).items()}
    Stored(find(directory)).load(found)
    return all(torch.equal(found[name].to_local(), wanted[name].to_local()) for name in wanted)


@pytest.mark.parametrize("wrote", [2, 4])
def test_shards_are_cut_anew_for_another_number_of_ranks(tmp_path, wrote):
    run(save_shards, tmp_path, ranks=wrote)
    for reads in (2, 4):
        assert run(loads_shards, tmp_path, ranks=reads) == [True] * reads
    stored, full = Stored(latest(tmp_path)), torch.arange(60.0).reshape(10, 6)
    assert all(torch.equal(stored.read(name), full) for name in ("rows", "columns", "copies"))
    assert torch.equal(stored.read("few"), full[:3])


def save_plain_load_sharded(directory):
    save_model(directory)
    mesh = init_device_mesh("cpu", (echelon.world_size(),))
    found = {"model.09": distribute_tensor(torch.zeros(81, 7), mesh, [Shard(0)])}
    Stored(find(directory)).load(found)
    return found["model.09"].to_local().tolist()


def test_a_tensor_saved_whole_is_loaded_in_shards(tmp_path):
    first, second = run(save_plain_load_sharded, tmp_path, ranks=2)
    assert first + second == model()["model.09"].tolist()


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def save_and_go_on_training(directory, device):
    kept = writer(directory)
    tensors = {name: value.to(device) for name, value in model().items()}
    for step in range(3):
        kept.save(step, tensors, {})
        for tensor in tensors.values():
            tensor.add_(1)
    kept.wait()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_holds_values_of_the_moment_of_the_call(tmp_path, ranks, device):
    """A checkpoint holds the values of the moment it was requested, although training goes on meanwhile."""
    run(save_and_go_on_training, tmp_path, device, ranks=ranks)
    wanted = model()
    for step in range(3):
        stored = Stored(tmp_path / f"step-{step:08d}")
        assert all(torch.equal(stored.read(name), value) for name, value in wanted.items())
        for tensor in wanted.values():
            tensor.add_(1)


def save_what_changes(directory):
    """Shapes and names change on one rank, on the other, on both, on none; a failed save lies in between."""
    kept, rank = writer(directory, asynchronous=False), echelon.rank()
    plans = [(2, 2), (3, 2), (3, 4), (3, 4), (1, 0), (3, 4)]
    for step, sizes in enumerate(plans):
        shared = {"shared": torch.full((len(set(sizes)),), step)}
        kept.save(step, shared | {f"rng.{rank}.{n}": torch.tensor(step) for n in range(sizes[rank])}, {})
        with contextlib.suppress(CheckpointError):
            kept.save(step + 100, {"shared": torch.zeros(rank + 1), "new": torch.zeros(5)}, {})


def test_tensors_may_change_from_save_to_save(tmp_path):
    run(save_what_changes, tmp_path, ranks=2)
    for step, sizes in enumerate([(2, 2), (3, 2), (3, 4), (3, 4), (1, 0), (3, 4)]):
        stored = Stored(tmp_path / f"step-{step:08d}")
        names = {f"rng.{rank}.{n}" for rank in (0, 1) for n in range(sizes[rank])}
        assert set(stored.names()) == names | {"shared"}
        assert {stored.read(name).unique().item() for name in stored.names()} == {step}
    assert len(steps_in(tmp_path)) == 6


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_is_loaded_to_where_the_tensors_are(tmp_path, device):
    Writer(tmp_path).save(1, {name: value.to(device) for name, value in model().items()}, {}, wait=True)
    found = {name: value.to(device) for name, value in model(seed=1).items()}
    Stored(find(tmp_path)).load(found)
    assert all(value.device.type == device for value in found.values())
    assert all(torch.equal(found[name].cpu(), value) for name, value in model().items())


def test_waiting_for_one_save_leaves_it_complete(tmp_path):
    path = Writer(tmp_path, asynchronous=True).save(1, model(), {}, wait=True)
    assert latest(tmp_path) == path
    verify(path)


def steps_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_only_the_newest_are_kept(tmp_path):
    kept = Writer(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        kept.save(step, model(), {})
    kept.wait()
    assert steps_in(tmp_path) == ["step-00000030", "step-00000040"]


def test_going_back_to_an_earlier_step_removes_nothing_later(tmp_path):
    kept = Writer(tmp_path, keep=1, asynchronous=False)
    kept.save(100, model(), {})
    kept.save(50, model(), {})
    assert steps_in(tmp_path) == ["step-00000050", "step-00000100"]


def test_steps_are_counted_not_spelt(tmp_path):
    kept = Writer(tmp_path, asynchronous=False)
    for step in (99_999_999, 100_000_000, 9):
        kept.save(step, {"x": torch.tensor(step)}, {})
    assert Stored(find(tmp_path)).read("x") == 100_000_000


def test_saving_a_step_again_replaces_it(tmp_path):
    kept = Writer(tmp_path, asynchronous=False)
    kept.save(5, {"x": torch.tensor(1), "old": torch.zeros(3)}, {})
    kept.save(5, {"x": torch.tensor(2)}, {})
    assert Stored(latest(tmp_path)).names() == ["x"]
    assert Stored(latest(tmp_path)).read("x") == 2
    assert steps_in(tmp_path) == ["step-00000005"]


def test_interrupted_replacement_leaves_earlier_checkpoint(tmp_path):
    """A replacement that was interrupted leaves the earlier checkpoint to be found."""
    kept = Writer(tmp_path, asynchronous=False)
    kept.save(5, {"x": torch.tensor(1)}, {}).rename(tmp_path / ".step-00000005.replaced")
    assert Stored(find(tmp_path)).read("x") == 1
    kept.save(6, {"x": torch.tensor(2)}, {})
    assert steps_in(tmp_path) == ["step-00000005", "step-00000006"]
    assert Stored(tmp_path / "step-00000005").read("x") == 1


def test_leftovers_of_killed_saves_are_swept_and_never_found(tmp_path):
    for name in (".step-00000009.writing", ".step-00000008.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) is None
    Writer(tmp_path, asynchronous=False).save(9, {"x": torch.tensor(1)}, {})
    assert steps_in(tmp_path) == ["notes", "step-00000009"]


def test_export_writes_the_weights_alone_with_tied_names(tmp_path):
    tied = torch.randn(4, 3).bfloat16()
    tensors = {"model.embedding": tied, "model.bias": torch.tensor(2.0), "optimizer.step": torch.tensor(3)}
    Writer(tmp_path, asynchronous=False).save(1, tensors, {"aliases": {"head": "embedding"}})
    assert export(tmp_path, tmp_path / "out.safetensors") == 3
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"embedding", "head", "bias"}
    assert torch.equal(found["embedding"], tied)
    assert torch.equal(found["head"], tied)
    assert found["bias"] == 2
    assert steps_in(tmp_path) == ["out.safetensors", "step-00000001"]


def test_export_puts_shards_together(tmp_path):
    run(save_shards, tmp_path, ranks=2)
    assert export(tmp_path, tmp_path / "out.safetensors", prefix="") == 4
    assert torch.equal(load_file(tmp_path / "out.safetensors")["columns"], torch.arange(60.0).reshape(10, 6))


# ---- what cannot be saved ----


@pytest.mark.parametrize(
    ("tensors", "facts", "said"),
    [
        ({"x": torch.zeros(2).to_sparse()}, {}, "'x' is a torch.sparse_coo tensor"),
        ({"x": torch.zeros(2, device="meta")}, {}, "'x' is on the meta device"),
        ({"x": [1, 2]}, {}, "'x' is a list, not a tensor"),
        ({"__metadata__": torch.zeros(1)}, {}, "'__metadata__' cannot be the name"),
        ({}, {"rate": torch.tensor(1.0)}, "facts['rate'] is a Tensor"),
        ({}, {"seen": {3: "a"}}, "facts['seen'] has the key 3"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path, tensors, facts, said):
    with pytest.raises(CheckpointError) as caught:
        Writer(tmp_path).save(1, tensors, facts)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert steps_in(tmp_path) == []


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="keep=0 would remove every checkpoint"):
        Writer(tmp_path, keep=0)


def disagree(directory, how):
    kept = writer(directory, timeout=1.0 if how == "silent" else 60.0)
    rank = echelon.rank()
    echelon.barrier()  # all connections stand before one leaves
    if how == "step":
        kept.save(rank, {"x": torch.zeros(1)}, {})
    elif how == "shape":
        kept.save(1, {"x": torch.zeros(2 + rank)}, {})
    elif how == "partial":
        mesh = init_device_mesh("cpu", (2,))
        kept.save(1, {"x": DTensor.from_local(torch.zeros(2), mesh, [Partial()])}, {})
    elif how == "facts":
        kept.save(1, {"x": torch.zeros(2)}, {"bad": object()} if rank else {})
    elif how == "left" and rank == 1:
        dist.destroy_process_group()
    elif how == "silent" and rank == 1:
        time.sleep(3)
    else:
        kept.save(1, {"x": torch.zeros(2)}, {})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("step", "rank 0 saves step 0, but rank 1 step 1"),
        ("shape", "'x' is float32 [2] on rank 0 but float32 [3] on rank 1"),
        ("partial", "'x' is a partial sum"),
        ("facts", "rank 1: facts['bad'] is a object"),
    ],
)
def test_ranks_that_disagree_all_hear_why(tmp_path, how, said):
    lines = errors(disagree, tmp_path, how, ranks=2)
    assert all(said in line for line in lines)
    assert all(line.startswith("CheckpointError: ") and "\n" not in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["left", "silent"])
def test_a_rank_that_does_not_come_is_missed_on_the_others(tmp_path, how):
    lines = errors(disagree, tmp_path, how, ranks=2)
    assert lines[0].startswith("PeerLostWhileSaving: saving step 1: rank 0 lost contact with another rank")
    assert "\n" not in lines[0]
    assert lines[1] == ""
    assert latest(tmp_path) is None


def test_settings_are_checked_where_they_are_made():
    assert Checkpoint(dir="ckpt", every=100, keep=3) == Checkpoint(dir="ckpt", every=100, keep=3, resume=True)
    for wrong, said in [
        ({"every": 0}, r"Checkpoint\(every=0\): expected 1 or more"),
        ({"keep": -1}, r"Checkpoint\(keep=-1\): expected 1 or more"),
        ({"evry": 1}, "no option 'evry'; did you mean 'every'"),
    ]:
        with pytest.raises(UsageError, match=said):
            Checkpoint(dir="ckpt", **wrong)
