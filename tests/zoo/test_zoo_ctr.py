"""Models of clicks, words and many classes, and the data sets that feed them."""

from __future__ import annotations

import gzip
import itertools
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from serving import served
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon.base.errors import DataError, EchelonError, UsageError
from echelon.nn import SparseEmbedding
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.zoo import registry
from echelon.zoo.datasets import ctr, word_pairs
from echelon.zoo.datasets.made_up import synthetic_clicks as made_up
from echelon.zoo.entry import Data, Dataset, Request
from echelon.zoo.models import classification, deepfm, dlrm, toy, wide_deep, word2vec
from echelon.zoo.tasks import TASKS
from echelon.zoo.train.parameters import PARAMETERS

assert all((ctr, word_pairs, classification, deepfm, dlrm, toy, wide_deep, word2vec))  # they add their entries

MODELS = ("wide_deep", "deepfm", "dlrm", "word2vec", "large_scale_classification", "toy", "toy_linear")
NOTHING = Dataset(name="nothing", open=lambda request: Data(train=None), tasks=(), about="")


def asked(model: str, dataset: Dataset = NOTHING, task: str | None = None, **given: Any) -> Request:
    """Return the settings that the command would resolve: the defaults of all, and those given on top."""
    entry = registry._models[model]
    values: dict[str, Any] = {each.name: each.default for each in (*PARAMETERS, *dataset.settings, *entry.settings)}
    values |= {**entry.defaults, **dataset.defaults, "model_name": model, "dataset_name": dataset.name, **given}
    return Request(values, task or entry.tasks["pretrain"][0])


def build(request: Request) -> nn.Module:
    return registry._models[request["model_name"]].build(request)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def dense(*widths: int) -> int:
    """Weights and biases of linear layers, one after the other."""
    return sum(before * after + after for before, after in itertools.pairwise(widths))


def optimizer(model: nn.Module, request: Request) -> torch.optim.Optimizer:
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[request["optimizer"]]
    return kind(model.parameters(), lr=request["learning_rate"])


def engine_of(model: nn.Module, request: Request, **strategy: Any) -> Any:
    return echelon.distribute(
        model,
        loss=TASKS[request.task].loss,
        optimizer=optimizer(model, request),
        strategy=echelon.Strategy(**strategy),
        log=QUIET,
    )


# ---- models


@pytest.mark.parametrize("name", MODELS)
def test_defaults_are_those_of_parameters_that_exist(name: str) -> None:
    entry = registry._models[name]
    known = {each.name for each in (*PARAMETERS, *entry.settings)}
    assert {*entry.defaults, *entry.counted, *entry.tiny} <= known
    assert size(build(asked(name, **entry.tiny))) > 0


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("wide_deep", {}, dense(26 * 16 + 13, 256, 128, 1)),
        ("wide_deep", {"slots": 8, "numbers": 0, "hidden": ""}, dense(8 * 16, 1)),
        ("deepfm", {}, 13 + 13 * 10 + dense(39 * 10, 400, 400, 400, 1)),
        ("dlrm", {}, dense(13, 512, 256, 64, 16) + dense(16 + 27 * 26 // 2, 512, 256, 1)),
        (
            "dlrm",
            registry._models["dlrm"].counted,
            dense(13, 512, 256, 128) + dense(128 + 27 * 26 // 2, 1024, 1024, 512, 256, 1),
        ),
        ("word2vec", {}, 1),
        ("large_scale_classification", {"num_classes": 7}, 2 * 512 * 512 + 4 * 512 + dense(512, 7)),
        ("toy", {}, dense(16, 64, 64, 64, 64, 64, 10)),
        ("toy_linear", {}, dense(16, 1)),
    ],
)
def test_dense_parameters_equal_the_formula(name: str, given: dict[str, Any], expected: int) -> None:
    entry = registry._models[name]
    assert size(build(asked(name, **given))) == expected
    if entry.parameters is not None and given == entry.counted:
        assert entry.parameters == expected


def dlrm_by_hand(model: Any, ids: Tensor, numbers: Tensor) -> np.ndarray:
    """Sample by sample, pair by pair."""

    def layers(net: Any, x: np.ndarray) -> np.ndarray:
        for layer in [part for part in net if isinstance(part, nn.Linear)]:
            x = np.maximum(layer.weight.detach().numpy() @ x + layer.bias.detach().numpy(), 0)
        return x

    found = []
    rows = model.vectors(ids).detach().numpy()
    for row, number in zip(rows, numbers.numpy(), strict=True):
        bottom = layers(model.bottom, number)
        fields = [bottom, *row]
        pairs = [fields[i] @ fields[j] for i in range(len(fields)) for j in range(i)]
        top = layers(model.top, np.concatenate([bottom, pairs]))
        found.append((model.head.weight.detach().numpy() @ top + model.head.bias.detach().numpy()).item())
    return np.array(found)


def deepfm_by_hand(model: Any, ids: Tensor, numbers: Tensor) -> np.ndarray:
    deep = model.head(model.layers(fields := deepfm_fields(model, ids, numbers))).squeeze(1)
    fields = fields.view(len(ids), -1, model.second.dim)
    count = fields.shape[1]
    pairs = sum((fields[:, i] * fields[:, j]).sum(1) for i in range(count) for j in range(i))
    return (model.first(ids)[:, 0] + numbers @ model.number_weights + pairs + deep).detach().numpy()


def deepfm_fields(model: Any, ids: Tensor, numbers: Tensor) -> Tensor:
    scaled = torch.stack([number[:, None] * model.number_vectors for number in numbers])
    return torch.cat([model.second(ids), scaled], 1).flatten(1)


def wide_deep_by_hand(model: Any, ids: Tensor, numbers: Tensor) -> np.ndarray:
    deep = torch.cat([*(model.deep(ids[:, slot]) for slot in range(ids.shape[1])), numbers], 1)
    wide = sum(model.wide(ids[:, slot : slot + 1]) for slot in range(ids.shape[1]))
    return (model.head(model.layers(deep)) + wide).detach().numpy()[:, 0]


@pytest.mark.parametrize("name", ["wide_deep", "deepfm", "dlrm"])
def test_a_trained_model_computes_what_its_paper_says(name: str) -> None:
    request = asked(name, slots=3, numbers=2, num_sample_per_epoch=64, dropout=0.0, **registry._models[name].tiny)
    data = made_up.clicks(request)
    torch.manual_seed(0)
    model = build(request)
    with closing(engine_of(model, request)) as engine:
        for batch in engine.loader(data.train, batch_size=16):
            engine.step(*batch)
        model.eval()
        ids, numbers, labels = data.test[:]
        by_hand = {"dlrm": dlrm_by_hand, "deepfm": deepfm_by_hand, "wide_deep": wide_deep_by_hand}[name]
        with torch.no_grad():
            logits = model(ids, numbers)
        np.testing.assert_allclose(logits.numpy(), by_hand(model, ids, numbers), atol=1e-5)
        assert logits.shape == labels.shape
        assert float(logits.std()) > 0


def test_rule_and_rate_of_the_tables_are_settings() -> None:
    model: Any = build(asked("word2vec", embedding_optimizer="adam", embedding_learning_rate=0.3, embedding_dim=3))
    assert [(type(m.spec.rule).__name__, m.lr, m.dim) for m in model.modules() if isinstance(m, SparseEmbedding)] == [
        ("Adam", 0.3, 3)
    ] * 2


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("dlrm", {"numbers": 0}, "dlrm needs at least one column of numbers, and numbers is 0"),
        ("wide_deep", {"slots": 0}, "wide_deep needs at least one column of ids"),
        ("wide_deep", {"hidden": "64,x"}, "--hidden '64,x': expected the sizes of layers, such as '256,128'"),
        ("deepfm", {"embedding_learning_rate": 0.0}, "--embedding_learning_rate 0.0: must be above 0"),
    ],
)
def test_settings_that_cannot_be(name: str, given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        build(asked(name, **given))
    assert "\n" not in str(error.value)


# ---- made-up data can be learned


@pytest.mark.parametrize(
    ("name", "make", "given"),
    [
        ("wide_deep", made_up.clicks, {"num_sample_per_epoch": 10_000, "hidden": "32"}),
        ("word2vec", made_up.word_pairs, {"num_sample_per_epoch": 10_000, "embedding_dim": 16}),
        ("toy", made_up.features, {"num_sample_per_epoch": 2000}),
        ("toy_linear", made_up.values, {"num_sample_per_epoch": 2000}),
        (
            "large_scale_classification",
            made_up.features,
            {"num_sample_per_epoch": 2000, "num_classes": 400, "hidden": 64},
        ),
    ],
)
def test_a_model_learns_what_is_made_up_for_it(name: str, make: Any, given: dict[str, Any]) -> None:
    request = asked(name, **given)
    data, again = make(request), make(request)
    assert all(torch.equal(a, b) for a, b in zip(data.train.tensors, again.train.tensors, strict=True))
    assert not torch.equal(data.train.tensors[0][:50], data.test.tensors[0][:50])
    assert len(data.train) == given["num_sample_per_epoch"]
    torch.manual_seed(0)
    model = build(request)
    metrics = TASKS[request.task].metrics
    with closing(engine_of(model, request)) as engine:
        before = engine.evaluate(data.test, batch_size=512, metrics=metrics)
        for batch in engine.loader(data.train, batch_size=min(request["batch_size"], 128)):
            engine.step(*batch)
        after = engine.evaluate(data.test, batch_size=512, metrics=metrics)
    assert after["loss"] < 0.9 * before["loss"]
    if request.task == "click":
        assert before["auc"] < 0.6
        assert after["auc"] > 0.75
    elif request.task != "regress":
        assert after["accuracy"] > before["accuracy"]


# ---- many classes, split over ranks


def classified(advised: bool) -> list[float]:
    echelon.init(seed=0)
    request = asked("large_scale_classification", num_classes=50, feature_size=8, hidden=16, num_sample_per_epoch=96)
    model = build(request)
    if advised:
        echelon.annotate(model, dict(registry._models["large_scale_classification"].split))
    engine = engine_of(model, request)
    losses = [float(engine.step(*batch)) for batch in engine.loader(made_up.features(request).train, global_batch=24)]
    return [*losses, *engine.evaluate(made_up.features(request).test, batch_size=5, metrics=["accuracy"]).values()]


def test_the_advised_split_gives_the_losses_of_one_process() -> None:
    (alone,) = run(classified, False, ranks=1)
    for losses in run(classified, True, ranks=2):
        assert losses == pytest.approx(alone, rel=1e-4, abs=1e-5)


# ---- files


def criteo_line(row: int) -> str:
    return "\t".join([str(row % 2), *(str(row + n) for n in range(13)), *(f"{row % 5:x}{n:x}" for n in range(26))])


def opened(name: str, model: str = "wide_deep", **given: Any) -> Data:
    dataset = registry._datasets[name]
    return dataset.open(asked(model, dataset, **given))


def test_criteo_plain_and_gzip_with_a_day_for_the_test(tmp_path: Path) -> None:
    for day in range(3):
        text = "".join(criteo_line(row) + "\n" for row in range(10 * (day + 1)))
        if day:
            (tmp_path / f"day_{day}").write_text(text)
        else:
            (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(text.encode()))
    data = opened("criteo", dataset_dir=str(tmp_path), test_pattern="day_2*")
    assert (len(data.train), len(data.test)) == (30, 30)
    assert data.facts == {"slots": 26, "numbers": 13}
    assert data.about.startswith("30 rows, 30 for the test, with 26 columns of ids and 13 of numbers")


def test_csv_and_parquet_give_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [(("yes", "no")[n % 2], n * 1.5, ("Rome", "Oslo", "?")[n % 3]) for n in range(12)]
    lines = ["bought;price;city", *(f"{a};{b};{c}" for a, b, c in rows)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    columns = dict(zip(("bought", "price", "city"), map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    given = {
        "dataset_dir": str(tmp_path),
        "label_column": "bought",
        "positive_label": "yes",
        "numeric_columns": "price",
        "categorical_columns": "city",
        "number_transform": "none",
    }
    parts = [opened("csv", delimiter=";", **given), opened("parquet", **given)]
    for data in parts:
        assert data.facts == {"slots": 1, "numbers": 1}
        (batch,) = list(echelon.data.Loader(data.train, batch_size=12, shuffle=False))
        ids, numbers, labels = batch
        assert numbers[:, 0].tolist() == [row[1] for row in rows]
        assert labels.tolist() == [float(row[0] == "yes") for row in rows]
        assert len(set(ids[:, 0].tolist())) == 3
    assert parts[0].test is None


def test_mistakes_with_files_are_one_line(tmp_path: Path) -> None:
    empty, good = tmp_path / "empty", tmp_path / "good"
    empty.mkdir()
    good.mkdir()
    (good / "a.csv").write_text("label,price,city\n1,2,Rome\n3,4,Oslo\n")
    (good / "train.txt").write_text("1\t2\t3\n")
    (good / "words.txt").write_text("too few words\n")
    known = {"dataset_dir": str(good), "categorical_columns": "city"}
    for name, given, line in [
        ("criteo", {}, "needs --dataset_dir"),
        ("criteo", {"dataset_dir": str(tmp_path / "none")}, "does not exist"),
        ("criteo", {"dataset_dir": str(empty)}, "is empty"),
        ("criteo", {"dataset_dir": str(good)}, "row 1: Expected 40 columns, got 3"),
        ("criteo", {"dataset_dir": str(good), "test_pattern": "x*"}, "matches --test_pattern 'x\\*'"),
        ("criteo", {"dataset_dir": str(good), "test_pattern": "tr*"}, "are for the test"),
        ("csv", {"dataset_dir": str(good)}, "--categorical_columns and --numeric_columns"),
        ("csv", {**known, "numeric_columns": "prize"}, "has no column 'prize'; did you mean 'price'"),
        ("csv", known, "the label column has 3, and clicks are 0 or 1"),
        ("csv", {**known, "numeric_columns": "city", "categorical_columns": ""}, "row 2: .*Rome"),
        ("csv", {**known, "file_pattern": "*.tsv"}, "matches '\\*.tsv'"),
        ("parquet", known, "matches '\\*.parquet'"),
        ("adult", {"dataset_dir": str(good)}, "has no adult-train.csv.gz"),
        ("word_pairs", {"dataset_dir": str(good), "file_pattern": "words.txt"}, "have 3 words"),
        ("word_pairs", {"dataset_dir": str(good), "window": 0}, "--window 0: must be 1 or more"),
    ]:
        with pytest.raises(EchelonError, match=line) as error:
            opened(name, "word2vec" if name == "word_pairs" else "wide_deep", **given)
        assert isinstance(error.value, DataError | UsageError)
        assert "\n" not in str(error.value)


# ---- pairs of words


def test_word_pairs_are_neighbours_and_negatives_by_frequency(tmp_path: Path) -> None:
    """Pairs are neighbouring words, and the other words are drawn by their frequency."""
    words = [f"w{number}" for number in range(300)]
    (tmp_path / "a.txt").write_text(" ".join(words) + " " + "often " * 3000)
    given = {"dataset_dir": str(tmp_path), "window": 3, "min_count": 1, "subsample": 0.0}
    data = opened("word_pairs", "word2vec", **given)
    place = {stable_hash(word): at for at, word in enumerate(words)}
    seeds = np.arange(1200, dtype=np.uint64) * np.uint64(2**40 + 7)
    center, others, labels = data.train.batch(np.arange(1200), seeds)
    assert len(data.train) == (3300 - 3300 // 20) * 4
    assert labels.tolist() == [[1.0] + [0.0] * 5] * 1200
    steps = [
        place.get(other, 300) - place[word] for word, other in zip(center.tolist(), others[:, 0].tolist(), strict=True)
    ]
    inside = [step for word, step in zip(center.tolist(), steps, strict=True) if 3 <= place[word] < 297]
    assert {*inside} == {-3, -2, -1, 1, 2, 3}
    share = [inside.count(d) + inside.count(-d) for d in (1, 2, 3)]
    assert np.array(share) / sum(share) == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=0.05)
    often = (others[:, 1:] == stable_hash("often")).float().mean().item()
    assert often == pytest.approx(3000**0.75 / (3000**0.75 + 300), abs=0.02)
    again = data.train.batch(np.arange(1200), seeds)
    assert all(torch.equal(a, b) for a, b in zip((center, others, labels), again, strict=True))


# ---- learning on real data


def adult_folder() -> Path | None:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("ECHELON_TEST_DATA", beside))
    return folder if len([*folder.glob("adult-*.csv.gz")]) == 2 else None


def adult_auc(epochs: int, **strategy: Any) -> float:
    echelon.init(seed=0)
    dataset = registry._datasets["adult"]
    request = asked("wide_deep", dataset, dataset_dir=str(adult_folder()))
    data = dataset.open(request)
    request = Request({**request.values, **data.facts}, request.task)
    model = build(request)
    engine = engine_of(model, request, **strategy)
    loader = engine.loader(data.train, global_batch=request["batch_size"])
    for _ in loader.epochs(epochs):
        for batch in loader:
            engine.step(*batch)
    engine.synchronize()
    found = engine.evaluate(data.test, batch_size=4096, metrics=TASKS["click"].metrics)["auc"]
    engine.close()
    return float(found)


@pytest.mark.skipif(adult_folder() is None, reason="no Adult data in ../shared/data or $ECHELON_TEST_DATA")
def test_wide_deep_on_adult_alone_and_with_server_and_workers() -> None:
    """One of the eight epochs that the data set asks for is enough to pass 0.90."""
    (alone,) = run(adult_auc, 1, ranks=1)
    assert alone >= 0.90
    for found in served(adult_auc, 1, servers=1, workers=2, ps="sync"):
        assert found == pytest.approx(alone, abs=0.003)
