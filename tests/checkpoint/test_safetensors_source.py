"""Regions of the safetensors files of a model: the values asked for, no other bytes, and no belief in damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echelon.base.errors import CheckpointError, Damaged
from echelon.checkpoint.safetensors_source import SafetensorsSource
from echelon.distributed.tensor_region import TensorRegion, narrow

WEIGHTS = {
    "wide": torch.arange(64 * 3000.0).reshape(64, 3000),
    "experts": torch.arange(4 * 6 * 10).reshape(4, 6, 10).to(torch.bfloat16),
    "scale": torch.tensor(3.0, dtype=torch.float16),
    "empty": torch.zeros(0, 4),
}


def _one_file(folder: Path) -> Path:
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


def _two_files(folder: Path) -> Path:
    parts = [["wide"], ["experts", "scale", "empty"]]
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, names in zip(files, parts, strict=True):
        save_file({name: WEIGHTS[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("write", [_one_file, _two_files])
def test_regions_are_those_of_the_tensors(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    source = SafetensorsSource(write(tmp_path))
    assert set(source.names()) == set(WEIGHTS)
    assert source.nbytes == sum(value.nbytes for value in WEIGHTS.values())
    draws = torch.Generator().manual_seed(0)
    for name, whole in WEIGHTS.items():
        assert (source.shape(name), source.dtype(name)) == (tuple(whole.shape), whole.dtype)
        for _ in range(12):
            begins = [int(torch.randint(0, max(size, 1), (), generator=draws)) for size in whole.shape]
            sizes = [
                int(torch.randint(0, size - begin + 1, (), generator=draws)) if size else 0
                for begin, size in zip(begins, whole.shape, strict=True)
            ]
            region = TensorRegion(name, whole.dtype, tuple(whole.shape), tuple(begins), tuple(sizes))
            assert torch.equal(source.read(name, region), narrow(whole, begins, sizes))


def test_only_bytes_of_the_region_are_read(tmp_path: Path) -> None:
    source = SafetensorsSource(_one_file(tmp_path))
    rows = TensorRegion("wide", torch.float32, (64, 3000), (10, 0), (3, 3000))
    columns = rows._replace(offsets=(0, 1500), sizes=(64, 1500))
    for region in (rows, columns):
        before = source.bytes_read
        source.read("wide", region)
        assert source.bytes_read - before == region.nbytes


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 8)


def _long_header(file: Path) -> None:
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def _garbage(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 40)


def _edit(file: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (_truncate, "is truncated: .* bytes instead of"),
        (_lengthen, "8 bytes at its end belong to no tensor"),
        (_long_header, "no safetensors file: its header cannot be read"),
        (_garbage, "no safetensors file: its header cannot be read"),
        (lambda file: file.write_bytes(b""), "no safetensors file"),
        (lambda file: _edit(file, lambda head: head["wide"].update(shape=[64, 2**61])), "which is not its size"),
        (lambda file: _edit(file, lambda head: head["wide"].update(data_offsets=[-8, 4])), "header cannot be read"),
        (lambda file: _edit(file, lambda head: head["wide"].update(dtype="F4")), "dtype F4, which cannot be read"),
        (lambda file: _edit(file, lambda head: head.pop("scale")), "overlap or have gaps|belong to no tensor"),
        (lambda file: _edit(file, lambda head: head.update(scale=[1])), "header cannot be read"),
        (lambda file: file.unlink(), "holds neither model.safetensors nor"),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), "pickled weights only"),
    ],
)
def test_damaged_file_is_refused_in_a_line(tmp_path: Path, spoil: Callable[[Path], object], line: str) -> None:
    spoil(_one_file(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError, match=line) as refused:
        SafetensorsSource(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    index = _two_files(tmp_path) / "model.safetensors.index.json"
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"experts": WEIGHTS["experts"]}, second)
    with pytest.raises(Damaged, match="does not hold 'empty'"):
        SafetensorsSource(tmp_path)
    second.unlink()
    with pytest.raises(Damaged, match=r"1 of the 2 files .* missing: model-00002-of-00002.safetensors; copy"):
        SafetensorsSource(tmp_path)
    plain = json.loads(index.read_text())
    for hostile in ("../../etc/passwd", "", 3):
        index.write_text(json.dumps({"weight_map": plain["weight_map"] | {"wide": hostile}}))
        with pytest.raises(Damaged, match="is no index"):
            SafetensorsSource(tmp_path)
    index.unlink()
    with pytest.raises(Damaged, match=r"model.safetensors.index.json is missing"):
        SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory; give the directory"):
        SafetensorsSource(tmp_path / "elsewhere")


def test_file_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    source = SafetensorsSource(_one_file(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    whole = WEIGHTS["wide"]
    with pytest.raises(Damaged, match="became shorter while it was read"):
        source.read("wide", TensorRegion("wide", whole.dtype, (64, 3000), (0, 0), (64, 3000)))
