"""The API reference: every public name has a place there, documents each parameter, and shows an example that runs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

import echelon

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
docstrings = importlib.import_module("docstrings")

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
MODULES = ("data", "nn", "optim", "plan", "planner", "zoo")
ENTRY = re.compile(r"^::: (\S+)\n(?:    options:\n((?:      .*\n)*))?", re.MULTILINE)


def entries() -> dict[str, list[str]]:
    """Return the members that are shown of each name on the pages, by name."""
    found = {}
    for match in (match for page in PAGES for match in ENTRY.finditer(page.read_text() + "\n")):
        members = re.search(r"members: \[(.*)\]", match[2] or "")
        found[match[1].replace(".base.errors.", ".errors.")] = members[1].split(", ") if members else []
    return found


def resolve(name: str) -> Any:
    found: Any = importlib.import_module("echelon")
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def documented() -> Iterator[tuple[str, Any]]:
    """Yield every object on the pages, and its members."""
    for name, members in entries().items():
        yield name, resolve(name)
        for member in members:
            yield f"{name}.{member}", inspect.getattr_static(resolve(name), member)


def parameters(found: Any) -> list[str]:
    found = getattr(found, "__func__", found)
    is_plain = found is echelon.Engine or not callable(found) or _is_error(found)
    names = [] if is_plain else list(inspect.signature(found).parameters)
    return [name for name in names if name not in ("self", "cls")]


def _is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def test_every_public_name_has_its_place() -> None:
    public = {f"echelon.{name}" for name in importlib.import_module("echelon.api.public").__all__}
    for module in MODULES:
        names = importlib.import_module(f"echelon.{module}").__all__
        public |= {f"echelon.{module}.{name}" for name in names if not hasattr(echelon, name)}
    errors = (
        name
        for name, each in vars(importlib.import_module("echelon.errors")).items()
        if _is_error(each) and name != "EchelonError"
    )
    public |= {f"echelon.errors.{name}" for name in errors}
    assert set(entries()) == public


def test_every_parameter_is_documented() -> None:
    missing = []
    for name, found in documented():
        text = inspect.getdoc(found) or ""
        assert text, f"{name} has no docstring"
        described = docstrings.parameters(text, parameters(found))
        missing += [f"{name}({parameter})" for parameter in parameters(found) if parameter not in described]
    assert missing == []


def test_pages_show_all_public_members_of_an_engine() -> None:
    assert set(entries()["echelon.Engine"]) == {name for name in dir(echelon.Engine) if not name.startswith("_")}


class Blocks(nn.Module):
    """A model with the names that the examples of marks use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}) for _ in range(24))
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.encoder(x)
        for layer in self.layers:
            x = x + layer["down"](F.relu(layer["up"](x)))
        return self.head(self.layer_norm(x))


class Recommender(nn.Module):
    """A model with a sparse table, for the examples of serving."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.head = echelon.nn.SparseEmbedding(4), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.ids(ids).flatten(1))


def recommender() -> dict[str, Any]:
    """Return an engine of the model, with its data."""
    model, data = Recommender(), (torch.arange(128).view(64, 2), torch.randint(3, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, optimizer, loss=F.cross_entropy, log=echelon.Log(console=False))
    return {"engine": engine, "loader": engine.loader(data, global_batch=32), "ids": data[0]}


def prepare(source: str) -> dict[str, Any]:
    """Return the names that an example uses without making them."""
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"echelon": echelon, "torch": torch, "nn": nn, "F": F, "self": nn.Module()}
    names |= {"model": model, "optimizer": optimizer, "loss": F.cross_entropy, "x": x, "y": y, "dataset": (x, y)}
    names |= {"Encoder": lambda begin, end: nn.Linear(8, 8), "prepare": lambda: (x, y)}
    names |= {"iter_samples": list(x), "images": x, "texts": x}
    makers: dict[str, Callable[[], Any]] = {
        "engine": lambda: echelon.distribute(model, optimizer, loss=F.cross_entropy, log=echelon.Log(console=False)),
        "loader": lambda: names["engine"].loader((x, y), global_batch=32),
        "profile": lambda: echelon.planner.profile(Blocks(), (x, y), loss=F.cross_entropy),
    }
    if "servable" in source.lower():
        return names | recommender() | {"Recommender": Recommender}
    for name, make in makers.items():
        if re.search(rf"\b(?<!\.){name}\b(?! =)", source) or (name == "engine" and "loader" in source):
            names[name] = make()
    return names


def write_tokens() -> None:
    words = {"[UNK]": 0, "</s>": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save("tokenizer.json")
    Path("corpus.txt").write_text("a word " * 2000)
    echelon.data.tokenize_corpus(["corpus.txt"], "tokenizer.json", "corpus.tokens")


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name with parameters has an example; all run here, in one process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clicks.csv").write_text("label,age,user,item\n1,30,a,b\n")
    (tmp_path / "strategy.yaml").write_text("shard: 2\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("one\n")
    recommender()["engine"].save("ckpt", wait=True)
    echelon.export_servable("ckpt", "servable")
    write_tokens()
    missing, failed = [], []
    for name, found in documented():
        blocks = docstrings.examples(inspect.getdoc(found) or "")
        if parameters(found) and not blocks:
            missing.append(name)
        for source in blocks:
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    exec(compile(source, f"<example of {name}>", "exec"), prepare(source))
                except Exception as error:
                    failed.append(f"{name}: {error!r}")
                finally:
                    echelon.set_default(None)
    assert missing == []
    assert not failed, "\n".join(failed)
