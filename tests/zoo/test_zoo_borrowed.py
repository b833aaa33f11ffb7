"""Models of other libraries: one line where the library is missing, and its model where it is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from echelon.base.errors import UsageError
from echelon.zoo import registry
from echelon.zoo.entry import Request
from echelon.zoo.library_models import PACKAGES, borrow

CASES = {"timm": "resnet50", "hf": "bert"}


def line_of(library: str, name: str) -> str:
    with pytest.raises(UsageError) as refused:
        borrow(library, name)
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("library", PACKAGES)
def test_a_missing_library_is_named_with_what_installs_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PACKAGES[library]
    if importlib.util.find_spec(package) is not None:  # absent all the same, by Python's own way to say so
        monkeypatch.setitem(sys.modules, package, None)
    expected = f"{library}:{CASES[library]} needs the library {package}, which is not installed; pip install {package}"
    assert line_of(library, CASES[library]) == expected


def test_the_registry_finds_borrowed_models_by_their_prefix() -> None:
    with pytest.raises(UsageError, match=r"'keras:resnet50': there is no library 'keras'; .* timm:NAME or hf:NAME"):
        registry.model("keras:resnet50")


def test_a_library_that_breaks_on_import_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('made for another torch\\nand more')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert "cannot be imported here (made for another torch); reinstall it" in line_of("timm", "resnet50")


def test_a_library_that_lacks_a_part_names_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("import a_part_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert line_of("timm", "resnet50").endswith("which lacks 'a_part_nobody_has'; pip install a_part_nobody_has")


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_timm_models_have_the_size_and_classes_asked_for() -> None:
    model = borrow("timm", "resnet18")
    values = {setting.name: setting.default for setting in model.settings}
    assert values == {"image_size": 224, "channels": 3}
    network = model.build(Request({**values, "num_classes": 7}, "classify_images")).eval()
    # 11,689,512 with 1000 classes, as published; 512 weights and a bias a class
    assert sum(p.numel() for p in network.parameters()) == 11_689_512 - 993 * 513
    assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    assert "the nearest are timm:resnet50" in line_of("timm", "resnett50")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_borrowed_language_model_does_not_see_the_future() -> None:
    for name, sizes in {"gpt2": "n_layer=1,n_embd=32,n_head=4", "bert": "num_hidden_layers=1"}.items():
        model = borrow("hf", name)
        values = {setting.name: setting.default for setting in model.settings}
        network = model.build(Request({**values, "vocab_size": 50, "config_changes": sizes}, "language_model")).eval()
        tokens = torch.arange(2, 14).view(2, 6)
        changed = torch.cat([tokens[:, :-1], tokens[:, -1:] + 20], 1)
        before, after = network(tokens), network(changed)
        assert before.shape == (2, 6, 50)
        torch.testing.assert_close(before[:, :-1], after[:, :-1])
        assert not torch.allclose(before[:, -1], after[:, -1])
