"""Fleet's ResNet-50: its yaml, its folder over http, its strategy and its loop, on two processes and on one."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run, script

import echelon
from echelon.base.errors import DataError, UsageError
from echelon.data import Downloader
from echelon.data.download.downloader import unpack
from echelon.data.download.spec import make_spec

unpacks = pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="unpacking needs Python 3.11.4")

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "fleet_resnet50.py"
IMAGES, CLASSES = 24, 3


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def write_fleets_folder(folder: Path) -> None:
    """Write a data set as Fleet's page describes it: two archives of pictures, lists, and a yaml beside them."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"train": [], "val": []}
    for part in ("a", "b"):
        with tarfile.open(folder / f"{part}.tar", "w") as archive:
            for number in range(IMAGES // 2):
                phase = "val" if number < 2 else "train"
                picture = io.BytesIO()
                image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(picture, "PNG")
                member = tarfile.TarInfo(f"{phase}/{part}{number}.png")
                member.size = picture.tell()
                picture.seek(0)
                archive.addfile(member, picture)
                lines[phase].append(f"{part}{number}.png {number % CLASSES}")
    for phase, names in lines.items():
        (folder / f"{phase}.txt").write_text("\n".join(names) + "\n")
    (folder / "meta.txt").write_text("train.txt\nval.txt\n")
    sums = [f"{name} {hashlib.md5((folder / name).read_bytes()).hexdigest()}\n" for name in ("a.tar", "b.tar")]
    (folder / "filelist.txt").write_text("".join(sums))


@pytest.fixture(scope="module")
def fleets_yaml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the yaml."""
    root = tmp_path_factory.mktemp("bos")
    (root / "small").mkdir()
    write_fleets_folder(root / "small")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (root / "small_imagenet.yaml").write_text(f"bos_path: {url}/small\n")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"{url}/small_imagenet.yaml"
    server.shutdown()
    server.server_close()


def port(directory: str, fs_yaml: str) -> list[float]:
    """Run the example; returns its costs."""
    tiny = "--image-size 32 --width 2 --batch-size 5 --steps 2 --workers 0"
    out = script(str(EXAMPLE), [*tiny.split(), "--local-path", directory, "--fs-yaml", fs_yaml])
    rank = echelon.worker_index()
    found = re.findall(r"^worker_index: (\d+), step(\d+) cost = ([\d.]+), speed: [\d.]+$", out, re.MULTILINE)
    assert [(int(worker), int(step)) for worker, step, _ in found] == [(rank, step) for step in range(2)]
    return [float(cost) for *_, cost in found]


@unpacks
def test_example_trains_on_two_processes(fleets_yaml: str, tmp_path: Path) -> None:
    """That two processes give what one gives is seen by test_zoo_application.py, in 32 bits."""
    first, second = run(port, str(tmp_path), fleets_yaml, ranks=2)
    assert first == second  # the cost is of the global batch
    assert first[0] == pytest.approx(np.log(CLASSES), abs=0.8)  # of weights that know nothing
    assert (tmp_path / "train" / "b9.png").is_file()


@unpacks
def test_archives_are_unpacked_once_and_never_outside(fleets_yaml: str, tmp_path: Path) -> None:
    names = [path.name for path in Downloader(fleets_yaml, tmp_path, quiet=True).fetch()]
    assert names == ["a.tar", "b.tar", "train.txt", "val.txt"]
    (tmp_path / "train" / "a9.png").unlink()
    Downloader(fleets_yaml, tmp_path, quiet=True).fetch()
    assert not (tmp_path / "train" / "a9.png").exists()  # that is the user's affair: this archive was unpacked
    source = tmp_path / "source"
    source.mkdir()
    for name, line in [("../out", "cannot be unpacked"), (".echelon/verified.jsonl", "are kept count of")]:
        with tarfile.open(source / "bad.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo(name))
        given = {"base": str(source), "files": ["bad.tar"], "unpack": True}
        with pytest.raises(DataError, match=line):
            Downloader(given, tmp_path / f"to{len(name)}", quiet=True).fetch()
        assert not (tmp_path / "out").exists()


@unpacks
def test_archives_with_the_same_folders_are_unpacked_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders take long to make here, so that without turns all archives would find each one missing."""
    names = [f"{number}.tar" for number in range(4)]
    (tmp_path / ".echelon").mkdir()
    for name in names:
        with tarfile.open(tmp_path / name, "w") as archive:
            archive.addfile(tarfile.TarInfo(f"folder/{name}.txt"))
    make = os.makedirs

    def make_slowly(*args: Any, **named: Any) -> None:
        time.sleep(0.1)
        make(*args, **named)

    monkeypatch.setattr(os, "makedirs", make_slowly)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(functools.partial(unpack, tmp_path), names))
    assert len(list(tmp_path.glob("folder/*.txt"))) == 4


HDFS = {"fs.default.name": "hdfs://name:9000/", "data_path": "/data/imagenet"}


def test_fleets_keys_become_ours_or_one_line() -> None:
    spec = make_spec({"bos_path": "https://host/small", "parallel": 3})
    assert (spec.base, spec.list, spec.meta) == ("https://host/small", "filelist.txt", "meta.txt")
    assert (spec.unpack, spec.parallel) == (True, 3)
    assert make_spec(HDFS).base == "hdfs://name:9000/data/imagenet"
    for given, line in [
        ({**HDFS, "hadoop.job.ugi": "me,secret", "hadoop_home": "/opt"}, "set HADOOP_USER_NAME and HADOOP_HOME in the"),
        ({"fs_name": "hdfs://name:9000"}, "needs data_path beside it"),
        ({"bos_path": "https://host", "base": "x"}, "both 'base' and 'bos_path'; keep one"),
    ]:
        with pytest.raises(UsageError, match=line) as raised:
            make_spec(given)
        assert "secret" not in str(raised.value)


def test_archive_is_refused_where_python_cannot_confine_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".echelon").mkdir()
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(DataError, match=r"a\.tar is not unpacked: Python .* use Python 3\.11\.4 or later"):
        unpack(tmp_path, "a.tar")
