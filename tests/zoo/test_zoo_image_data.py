"""Image data sets: files written here byte by byte are read back exactly, and broken ones are named in one line."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import run
from PIL import Image

import echelon
from echelon.base.errors import DataError
from echelon.data import Loader
from echelon.zoo import registry
from echelon.zoo.datasets.images.image_cache import SHARED
from echelon.zoo.datasets.mock import MADE_BY
from echelon.zoo.entry import Request
from echelon.zoo.tasks import OWN, TASKS
from echelon.zoo.train.input import loader_options

GPU = torch.cuda.is_available()
BUNDLED = Path(echelon.__file__).parent / "zoo" / "datasets" / "bundled"


def opened(name, folder=None, **values):
    plain = {"image_size": 8, "channels": 3, "preprocessing_name": "none", "num_classes": 1001, "model_name": "lenet"}
    values = {**plain, "dataset_dir": None if folder is None else str(folder), **values}
    return registry.dataset(name).open(Request(values, "classify_images"))


def refused(name, folder, **values):
    with pytest.raises(DataError) as caught:
        list(Loader(opened(name, folder, **values).train, batch_size=4))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def noise(*shape, seed=0):
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


# ---- made up ----


def test_mock_feeds_every_task():
    of_own_models = {"classify", OWN}  # their data comes with them
    assert set(MADE_BY) == set(TASKS) - of_own_models == set(registry.dataset("mock").tasks)


def test_made_up_images_are_the_same_every_time_and_as_asked():
    first, again = (opened("mock", image_size=20, channels=1, num_classes=7) for _ in range(2))
    images, labels = first.train.dataset.tensors
    assert torch.equal(images, again.train.dataset.tensors[0])
    assert (len(first.train), len(first.test)) == (1024, 256)
    assert images.shape == (1024, 1, 20, 20)
    assert images.dtype is torch.uint8
    assert labels.bincount().tolist() == [147] * 2 + [146] * 5
    assert not torch.equal(first.test.tensors[0], images[:256])


def test_mock_test_images_are_recognized_by_class_means():
    """The mean image of each class recognizes the images of the made-up test part."""
    data = opened("mock", image_size=16, num_classes=10)
    (images, labels), (tests, answers) = data.train.dataset.tensors, data.test.tensors
    means = torch.stack([images[labels == c].float().mean(0).flatten() for c in range(10)])
    assert (torch.cdist(tests.float().flatten(1), means).argmin(1) == answers).float().mean() > 0.95


def test_large_mock_images_share_a_pool_and_test_known_classes():
    """Large made-up images share a pool, and only classes of the training part are tested."""
    data = opened("mock", image_size=224, num_classes=1001, num_sample_per_epoch=1_281_167)
    images, labels = data.train.dataset.tensors
    assert images.numel() <= 2**26
    assert len(data.train) == 1_281_167
    assert len(Loader(data.train, batch_size=256)) == 5005
    assert labels.max() < 1001
    assert set(data.test.tensors[1].tolist()) <= set(labels.tolist())
    assert loader_options(Request({}, "classify_images"), data, 1)["workers"] == 0


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_made_up_images_never_leave_the_gpu():
    data = opened("mock", image_size=32, num_classes=10, num_sample_per_epoch=3000)
    here = [t.cpu() for t in data.train.dataset.tensors]
    numbers = Loader((torch.arange(3000),), batch_size=64, seed=1)
    for (images, labels), (rows,) in zip(
        Loader(data.train, batch_size=64, seed=1, device=echelon.device()), numbers, strict=True
    ):
        assert images.is_cuda
        which = torch.from_numpy(data.train.rows(rows.numpy()))
        assert torch.equal(images.cpu(), here[0][which])
        assert torch.equal(labels.cpu(), here[1][which])
        assert data.arrive((images,))[0].is_contiguous(memory_format=torch.channels_last)


# ---- digits ----


#: of the images and the labels of scikit-learn's load_digits(), as bytes
SCIKIT_LEARNS = [
    "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3",
    "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0",
]


def known_digits():
    with np.load(BUNDLED / "digits.npz", allow_pickle=False) as stored:
        found = stored["images"], stored["labels"]
    assert [array.dtype for array in found] == [np.uint8] * 2
    assert [hashlib.sha256(array.tobytes()).hexdigest() for array in found] == SCIKIT_LEARNS
    return found


def test_digits_are_those_of_scikit_learn_in_a_fixed_order():
    pixels, classes = known_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(pixels, dtype=torch.float32)[order, None] / 16
    wanted = torch.tensor(classes, dtype=torch.int64)[order]
    data = opened("digits", channels=1)
    (images, labels), (tests, answers) = data.train.tensors, data.test.tensors
    assert (len(labels), len(answers)) == (1500, 297)
    assert torch.equal(torch.cat([labels, answers]), wanted)
    arrived = data.arrive((torch.cat([images, tests]),))[0]
    assert (arrived - expected).abs().max() <= 0.5 / 255 + 1e-6
    assert data.facts == {"num_classes": 10}
    assert registry.dataset("digits").defaults["preprocessing_name"] == "lenet"


def test_digits_get_the_size_and_channels_of_the_model():
    images, _ = opened("digits", image_size=28, channels=3).train.tensors
    assert images.shape == (1500, 3, 28, 28)
    assert torch.equal(images[:, 0], images[:, 2])


# ---- mnist ----


def idx(array, shape=None):
    shape = array.shape if shape is None else shape
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + array.tobytes()


def write_mnist(folder, kind, count, pack=lambda data: data, ending="", seed=0):
    images, labels = noise(count, 8, 8, seed=seed), np.arange(count, dtype=np.uint8) % 10
    (folder / f"{kind}-images-idx3-ubyte{ending}").write_bytes(pack(idx(images)))
    (folder / f"{kind}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    return images, labels


@pytest.mark.parametrize(("pack", "ending"), [(bytes, ""), (gzip.compress, ".gz")])
def test_mnist_is_read_back(tmp_path, pack, ending):
    images, labels = write_mnist(tmp_path, "train", 30, pack, ending)
    tests, answers = write_mnist(tmp_path, "t10k", 12, pack, ending, seed=1)
    data = opened("mnist", tmp_path, channels=1)
    assert np.array_equal(data.train.tensors[0].numpy()[:, 0], images)
    assert np.array_equal(data.train.tensors[1].numpy(), labels)
    assert np.array_equal(data.test.tensors[0].numpy()[:, 0], tests)
    assert np.array_equal(data.test.tensors[1].numpy(), answers)
    assert data.facts == {"num_classes": 10}


def test_mnist_without_a_test_file_tests_on_the_last_fifth(tmp_path):
    """Without a test file the last fifth is for tests, and the description says so."""
    images, _ = write_mnist(tmp_path, "mnist-10k", 50)
    write_mnist(tmp_path, "other", 20)
    data = opened("mnist", tmp_path, channels=1, file_pattern="mnist-10k-*")
    assert np.array_equal(data.test.tensors[0].numpy()[:, 0], images[40:])
    assert len(data.train) == 40
    assert "the last fifth is for tests" in data.about
    assert "choose with --file_pattern" in refused("mnist", tmp_path)


def test_the_10k_images_of_the_real_mnist():
    folder = Path(os.environ.get("ECHELON_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (folder / "mnist-10k-images-idx3-ubyte.gz").exists():
        pytest.skip("the data is not here")
    data = opened("mnist", folder, channels=1, image_size=28)
    assert (len(data.train), len(data.test)) == (8000, 2000)
    assert torch.cat([data.train.tensors[1], data.test.tensors[1]]).bincount().tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip


def test_mnist_that_is_not_whole_is_named(tmp_path):
    write_mnist(tmp_path, "train", 10)
    whole = (tmp_path / "train-images-idx3-ubyte").read_bytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(whole[:-1])
    assert "has 639 bytes of values where 640 belong; fetch it again" in refused("mnist", tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"<html>not found</html>")
    assert "is no IDX file" in refused("mnist", tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole)[:-20])
    assert "is cut off or damaged" in refused("mnist", tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole))
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert "train-labels-idx1-ubyte is missing" in refused("mnist", tmp_path)


# ---- cifar10 ----

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def cifar_parts():
    for seed, name in enumerate(BATCHES):
        yield name, noise(6, 3072, seed=seed), [seed, 9, 2, 3, 4, 0]


def test_both_versions_of_cifar10_are_read_back(tmp_path):
    binary, pickled = tmp_path / "b" / "cifar-10-batches-bin", tmp_path / "p"
    binary.mkdir(parents=True)
    pickled.mkdir()
    for name, pixels, labels in cifar_parts():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], 1)
        (binary / f"{name}.bin").write_bytes(rows.tobytes())
        (pickled / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels, b"batch_label": b"x"}, 2))
    expected = np.concatenate([pixels for _, pixels, _ in list(cifar_parts())[:5]]).reshape(-1, 3, 32, 32)
    for folder in (tmp_path / "b", pickled):
        data = opened("cifar10", folder, image_size=32)
        assert np.array_equal(data.train.tensors[0].numpy(), expected)
        assert data.train.tensors[1].tolist() == [n for _, _, labels in list(cifar_parts())[:5] for n in labels]
        assert data.test.tensors[1].tolist() == [5, 9, 2, 3, 4, 0]
        assert data.facts == {"num_classes": 10}


def test_a_pickle_as_python_2_wrote_it_is_read(tmp_path):
    """The original files: protocol 2, texts as bytes, numpy's old module name."""
    pixels = noise(1, 3072)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01M\x00\x0c\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    values = b"\x89T" + struct.pack("<I", 3072) + pixels.tobytes() + b"tb"
    stored = b"\x80\x02}(U\x04data" + array + dtype + values + b"U\x06labels]K\x07au."
    for name in BATCHES:
        (tmp_path / name).write_bytes(stored)
    data = opened("cifar10", tmp_path, image_size=32)
    assert np.array_equal(data.train.tensors[0].numpy()[4], pixels.reshape(3, 32, 32))
    assert data.train.tensors[1].tolist() == [7] * 5


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("content", [Harmful(), {b"data": Harmful()}, [1], {b"data": np.zeros((1, 3072))}])
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    for name in BATCHES:
        (tmp_path / name).write_bytes(pickle.dumps(content, 2))
    assert "binary version" in refused("cifar10", tmp_path, image_size=32)
    assert not (tmp_path / "harmed").exists()


def test_a_cifar10_that_is_not_whole_is_named(tmp_path):
    for name, pixels, labels in cifar_parts():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], 1)
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    (tmp_path / "data_batch_2.bin").write_bytes(bytes(5000))
    assert "data_batch_2.bin has 5,000 bytes" in refused("cifar10", tmp_path, image_size=32)
    (tmp_path / "data_batch_2.bin").unlink()
    assert "lacks data_batch_2.bin; fetch" in refused("cifar10", tmp_path, image_size=32)
    for name in BATCHES:
        (tmp_path / f"{name}.bin").unlink(missing_ok=True)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"x")
    assert "unpack" in refused("cifar10", tmp_path)


def test_random_crops_of_images_in_memory_are_made_by_workers(tmp_path):
    """Random crops of images in memory are made one by one, and by workers."""
    for name, pixels, labels in cifar_parts():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], 1)
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    data = opened("cifar10", tmp_path, image_size=32, preprocessing_name="cifarnet")
    assert loader_options(Request({}, "classify_images"), data, 1)["workers"] >= 1
    images, labels = next(iter(Loader(data.train, batch_size=30)))
    assert images.shape == (30, 3, 32, 32)
    assert labels.sum() == data.train._labels.sum()


# ---- folders ----


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_classes(folder, counts, seed=0):
    """Pictures by class and number."""
    made = {}
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            seed += 1
            made[name, number] = noise(8, 8, 3, seed=seed)
            (folder / name / f"{number:03}.png").write_bytes(png(made[name, number]))
    return made


def pixels_of(part):
    return [(image.permute(1, 2, 0).numpy().tobytes(), label) for image, label in (part[i] for i in range(len(part)))]


def test_image_folder_is_read_with_each_tenth_image_for_tests(tmp_path):
    """A folder for each class is read back, with each tenth image of it for tests."""
    made = write_classes(tmp_path, {"tulip": 12, "rose": 21})
    data = opened("image_folder", tmp_path)
    numbered = {"rose": 0, "tulip": 1}
    whole = [(made[key].tobytes(), numbered[key[0]]) for key in sorted(made)]
    held_back = [9, 19, 21 + 9]
    assert pixels_of(data.test) == [whole[i] for i in held_back]
    assert pixels_of(data.train) == [one for i, one in enumerate(whole) if i not in held_back]
    assert data.facts == {"num_classes": 2}


def test_flowers_are_found_in_archive_with_train_and_val_folders(tmp_path):
    """Folders train and val are used as they are, and flowers are found in the folder of their archive."""
    made = write_classes(tmp_path / "flower_photos" / "train", {"b": 2, "a": 1})
    tests = write_classes(tmp_path / "flower_photos" / "val", {"b": 1}, seed=50)
    data = opened("flowers", tmp_path)
    in_order = ((("a", 0), 0), (("b", 0), 1), (("b", 1), 1))
    assert pixels_of(data.train) == [(made[key].tobytes(), label) for key, label in in_order]
    assert pixels_of(data.test) == [(tests["b", 0].tobytes(), 1)]


def test_image_batches_are_channels_last_with_the_right_labels(tmp_path):
    made = write_classes(tmp_path, {"a": 3, "b": 4})
    data = opened("imagenet", tmp_path)
    images, labels = next(iter(Loader(data.train, batch_size=7, shuffle=False, **data.loader)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(images[4].permute(1, 2, 0).numpy(), made["b", 1])
    assert labels.tolist() == [0] * 3 + [1] * 4


def test_folders_that_cannot_be_used_are_named(tmp_path):
    assert "say where it is with --dataset_dir" in refused("image_folder", None)
    assert f"there is no folder {tmp_path}/no" in refused("image_folder", tmp_path / "no")
    assert "is empty" in refused("flowers", tmp_path)
    (tmp_path / "loose.jpg").write_bytes(b"x")
    assert "has no folders" in refused("imagenet", tmp_path)
    assert "is a file" in refused("imagenet", tmp_path / "loose.jpg")
    write_classes(tmp_path, {"a": 2, "b": 0})
    assert f"class folder {tmp_path}/b has no pictures; fill it or remove it" in refused("image_folder", tmp_path)
    (tmp_path / "b" / "1.png").write_bytes(png(noise(8, 8, 3))[:90])
    assert f"{tmp_path}/b/1.png is cut off or damaged" in refused("image_folder", tmp_path)
    (tmp_path / "b" / "2.jpg.part").write_bytes(b"x")
    assert "2.jpg.part was not fetched to its end" in refused("image_folder", tmp_path)


def test_a_class_that_only_the_tests_have_is_refused(tmp_path):
    write_classes(tmp_path / "train", {"a": 1})
    write_classes(tmp_path / "val", {"a": 1, "c": 1})
    assert "val/c is a class that train/ does not have" in refused("imagenet", tmp_path)


# ---- kept in memory ----


def test_cached_images_are_kept_as_read_and_crops_stay_random(tmp_path):
    write_classes(tmp_path, {"a": 9, "b": 9})
    data = opened("image_folder", tmp_path, datasets_use_caching=True, image_size=8, preprocessing_name="cifarnet")
    plain = opened("image_folder", tmp_path, image_size=8, preprocessing_name="cifarnet")
    kept, read = (Loader(d.train, batch_size=6, workers=2, seed=1, **d.loader) for d in (data, plain))
    first, second = [torch.cat([images for images, _ in read]) for _ in range(2)]
    assert torch.equal(torch.cat([images for images, _ in kept]), first)
    for path in tmp_path.glob("*/*.png"):
        path.unlink()
    assert torch.equal(torch.cat([images for images, _ in kept]), second)
    assert not list(Path(SHARED).glob(f"echelon-*-{os.getpid()}-*"))


def _reads_after_removal(folder):
    """Rank 0 reads the whole; then the files go, and both read."""
    echelon.init()
    data = opened("image_folder", folder, datasets_use_caching=True)
    if echelon.is_first_worker():
        pixels_of(data.train)
        for path in Path(folder).glob("*/*.png"):
            path.unlink()
    echelon.barrier()
    return pixels_of(data.train)


def test_the_ranks_of_a_host_share_what_is_kept(tmp_path):
    made = write_classes(tmp_path, {"a": 3, "b": 2})
    both = run(_reads_after_removal, str(tmp_path), ranks=2)
    assert both[0] == both[1] == [(made[key].tobytes(), int(key[0] == "b")) for key in sorted(made)]


def test_cache_larger_than_memory_is_refused_before_reading(tmp_path):
    """A cache that needs more memory than the machine has is refused before anything is read."""
    write_classes(tmp_path, {"a": 1, "b": 1})
    os.truncate(tmp_path / "a" / "000.png", 2**42)  # longer by a hole
    assert "needs 4096.0 GiB of shared memory" in refused("image_folder", tmp_path, datasets_use_caching=True)


# ---- tars ----


def write_tar(path, samples):
    with tarfile.open(path, "w") as tar:
        for key, pixels, label in samples:
            for name, data in ((f"{key}.png", png(pixels)), (f"{key}.cls", str(label).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def samples(count, seed=0):
    return [(f"k{n:03}", noise(8, 8, 3, seed=seed + n), n % 3) for n in range(count)]


def test_tars_are_read_back_by_seeking(tmp_path):
    write_tar(tmp_path / "train-0.tar", samples(5))
    write_tar(tmp_path / "train-1.tar", samples(4, 100))
    write_tar(tmp_path / "val-0.tar", samples(2, 200))
    data = opened("tar_shards", tmp_path)
    assert pixels_of(data.train) == [(p.tobytes(), label) for _, p, label in (*samples(5), *samples(4, 100))]
    assert pixels_of(data.test) == [(p.tobytes(), label) for _, p, label in samples(2, 200)]
    assert data.facts == {"num_classes": 3}
    only = opened("tar_shards", tmp_path, file_pattern="train-1.tar", datasets_use_caching=True)
    assert len(only.train) == 4


def test_tars_that_cannot_be_used_are_named(tmp_path):
    assert "is empty" in refused("tar_shards", tmp_path)
    path = tmp_path / "a.tar"
    write_tar(path, samples(3))
    whole = path.read_bytes()
    ends = [512 * 2, 512 + 100, len(whole) // 3 // 512 * 512, 512 * 12, 700, 300]
    for end in ends:  # inside of a member, between two, inside of a header
        path.write_bytes(whole[:end])
        assert refused("tar_shards", tmp_path).startswith(f"{path} is "), end
    path.write_bytes(whole)
    assert "no file that fits 'b*'" in refused("tar_shards", tmp_path, file_pattern="b*")
    write_tar(path, [("x", noise(8, 8, 3), "cat")])
    assert "x.cls holds 'cat', and a label is a number" in refused("tar_shards", tmp_path)
