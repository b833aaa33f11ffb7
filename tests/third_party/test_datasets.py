"""Hugging Face data sets in engine.loader and engine.evaluate: the batches of one process, on any number of ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from typing import Any

import datasets
import datasets.distributed
import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import run
from torch import nn
from torch.utils.data import DataLoader, random_split

import echelon
from echelon.base.errors import EchelonError
from echelon.data import Loader

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(60))]


def rows(count: int = 45, ragged: bool = False) -> datasets.Dataset:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(count, 6, generator=g)
    columns: dict[str, Any] = {"x": x.tolist(), "y": torch.randint(3, (count,), generator=g).tolist()}
    if ragged:
        columns["x"] = [row[: 2 + n % 4] for n, row in enumerate(columns["x"])]
    return datasets.Dataset.from_dict(columns)


KINDS: dict[str, Any] = {
    "plain": rows,
    "torch": lambda: rows().with_format("torch"),
    "numpy": lambda: rows().with_format("numpy"),
    "transform": lambda: rows().with_transform(noisy),
    "stream": lambda: rows().to_iterable_dataset(),
    "stream of tensors": lambda: rows().to_iterable_dataset().with_format("torch"),
    "subset": lambda: random_split(rows(50), [45, 5], torch.Generator().manual_seed(1))[0],  # type: ignore[arg-type]
}


def noisy(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {**batch, "x": [torch.tensor(x) + torch.randn(6) for x in batch["x"]]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_ranks_takes_the_same_steps(kind: str) -> None:
    found = []
    for world_size in (1, 2, 3):
        loaders = [
            Loader(KINDS[kind](), batch_size=6 // world_size, rank=r, world_size=world_size, uneven="drop")
            for r in range(world_size)
        ]
        steps = zip(*loaders, strict=True)
        found.append([{key: torch.cat([share[key] for share in step]) for key in ("x", "y")} for step in steps])
    assert [len(steps) for steps in found] == [7, 7, 7]
    for steps in found:
        for step, alone in zip(steps, found[0], strict=True):
            assert step["x"].shape == (6, 6)
            assert torch.equal(step["x"], alone["x"])
            assert torch.equal(step["y"], alone["y"])


def test_rows_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = datasets.Dataset.__getitems__

    def counted(self: Any, keys: list[int]) -> list[Any]:
        calls.append(len(keys))
        return plain(self, keys)  # type: ignore[no-any-return]

    monkeypatch.setattr(datasets.Dataset, "__getitems__", counted)
    list(Loader(rows(), batch_size=15))
    assert calls == [15, 15, 15]


def stream(count: int = 900, shards: int = 5) -> datasets.IterableDataset:
    data = datasets.Dataset.from_dict({"n": list(range(count))}).to_iterable_dataset(num_shards=shards)
    return data.map(doubled).filter(lambda row: row["n"] % 7 != 3)


def doubled(row: dict[str, int]) -> dict[str, int]:
    reads.append(row["n"])
    return {**row, "twice": 2 * row["n"]}


reads: list[int] = []


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["mapped", "torch", "batched", "interleaved"])
def test_a_stream_is_continued_twice_from_its_state(kind: str, shuffle: bool) -> None:
    made = {
        "mapped": stream,
        "torch": lambda: stream().with_format("torch"),
        "batched": lambda: stream().map(lambda rows: {"twice": rows["twice"]}, batched=True, batch_size=32),
        "interleaved": lambda: datasets.interleave_datasets([stream(), stream(1500)]),
    }[kind]
    options: dict[str, Any] = {"batch_size": 8, "shuffle": shuffle, "shuffle_buffer": 30}
    whole = Loader(made(), **options)
    expected = [[batch["n"].tolist() for batch in whole] for _ in range(2)]
    assert expected[0] != expected[1] or not shuffle
    loader = Loader(made(), **options)
    at = 0
    for steps in (70, 15):
        iterator = iter(loader)
        assert [next(iterator)["n"].tolist() for _ in range(steps)] == expected[0][at : at + steps]
        at += steps
        state = json.loads(json.dumps(loader.state_dict()))
        loader = Loader(made(), **options)
        loader.load_state_dict(state)
        reads.clear()
    assert state["anchor"][0] >= 256
    assert [batch["n"].tolist() for batch in loader] == expected[0][at:]
    if kind == "mapped":
        assert min(reads) >= 256
    assert [batch["n"].tolist() for batch in loader] == expected[1]


def test_a_stream_with_a_shuffle_buffer_of_its_own_loses_nothing() -> None:
    made = lambda: stream().shuffle(seed=1, buffer_size=100)  # noqa: E731
    expected = [batch["n"].tolist() for batch in Loader(made(), batch_size=8)]
    loader = Loader(made(), batch_size=8)
    iterator = iter(loader)
    for _ in range(60):
        next(iterator)
    state = loader.state_dict()
    assert "anchor" not in state
    again = Loader(made(), batch_size=8)
    again.load_state_dict(state)
    assert [batch["n"].tolist() for batch in again] == expected[60:]


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_divided_without_loss_or_doubling(workers: int) -> None:
    loaders = [
        Loader(stream(shards=4), batch_size=8, rank=rank, world_size=2, workers=workers, uneven="join")
        for rank in range(2)
    ]
    found = [n for loader in loaders for batch in loader for n in batch["n"].tolist()]
    wanted = [n for n in range(900) if n % 7 != 3]
    repeated = len(found) - len(wanted)
    assert repeated in (0, 8)  # a rank without samples repeats its last batch, with weight 0
    assert sorted(set(found)) == wanted


DIVIDED: dict[str, Any] = {
    "mapped": lambda: stream(2400, 6),
    "torch": lambda: stream(2400, 6).with_format("torch"),
    "batched": lambda: stream(2400, 6).map(lambda rows: {"twice": rows["twice"]}, batched=True, batch_size=32),
    "interleaved": lambda: datasets.interleave_datasets([stream(2400, 6), stream(3000, 6)]),
    "own buffer": lambda: stream(2400, 6).shuffle(seed=1, buffer_size=20),
}


def divided(kind: str, steps: int, state: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, Any], int]:
    """Return this rank's rows of some steps, the loader's state after them, and the rows that were read for them."""
    reads.clear()
    with contextlib.redirect_stdout(io.StringIO()):
        echelon.init(device="cpu", seed=1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = echelon.distribute(model, loss=F.mse_loss, optimizer=optimizer, log=echelon.Log(lines=False))
        loader = engine.loader(DIVIDED[kind](), global_batch=24, divide=True, uneven="join", shuffle_buffer=60)
        if state is not None:
            loader.load_state_dict(state)
        found = [batch["n"].tolist() for batch in itertools.islice(loader, steps)]
        kept: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
        engine.close()
    return found, kept, len(reads)


def joined(ranks: list[Any]) -> list[list[int]]:
    return [sorted(n for share in step for n in share) for step in zip(*(rank[0] for rank in ranks), strict=True)]


@pytest.mark.parametrize("kind", DIVIDED)
def test_divided_shards_resume_on_another_number_of_ranks(kind: str) -> None:
    alone = run(divided, kind, 80, None, ranks=1)
    expected = joined(alone)
    begun = run(divided, kind, 60, None, ranks=2)
    assert joined(begun) == expected[:60]
    assert all(rank[1] == begun[0][1] for rank in begun)
    assert ("anchor" in begun[0][1]) == (kind != "own buffer")
    for ranks in (1, 3):
        again = run(divided, kind, 20, begun[0][1], ranks=ranks)
        assert joined(again) == expected[60:]
        if kind == "mapped":
            assert sum(rank[2] for rank in again) < 0.7 * alone[0][2]
            assert max(rank[2] for rank in again) < 1.2 * sum(rank[2] for rank in again) / ranks


def trained(kind: str) -> tuple[list[float], list[float], str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        echelon.init(device="cpu", seed=1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        wrapped = Named(model)
        engine = echelon.distribute(
            wrapped,
            loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
            optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1),
            log=echelon.Log(lines=False),
        )
        data = KINDS[kind]()
        wanted = echelon.steps(data, global_batch=6, uneven="join", epochs=2) if "stream" not in kind else None
        loader = engine.loader(data, global_batch=6, uneven="join")
        losses = [float(engine.step(batch)) for _ in loader.epochs(2) for batch in loader]
        assert wanted in (None, len(losses))
        found = [engine.evaluate(data)["loss"], engine.evaluate(data, batch_size=4)["loss"]]
        if "stream" not in kind:
            torchs = DataLoader(data, batch_size=5, collate_fn=stacked, shuffle=True)
            found.append(engine.evaluate(torchs)["loss"])
        engine.close()
    return losses, found, said.getvalue()


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def stacked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize("kind", ["plain", "torch", "stream"])
def test_training_and_evaluation_are_one_processes(kind: str) -> None:
    losses, results, _ = run(trained, kind, ranks=1)[0]
    assert results == pytest.approx([results[0]] * len(results), rel=1e-5)
    for mine, judged, _ in run(trained, kind, ranks=2):
        assert mine == pytest.approx(losses, rel=1e-5)
        assert judged == pytest.approx(results, rel=1e-5)


def tokenizer(folder: Any) -> Any:
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return transformers.BertTokenizer(str(folder / "vocab.txt"))


def test_collators_of_transformers(tmp_path: Any) -> None:
    words = tokenizer(tmp_path)
    texts = datasets.Dataset.from_dict({"text": [" ".join(["word1"] * (1 + n % 5)) for n in range(20)]})
    tokens = texts.map(lambda row: words(row["text"]), remove_columns=["text"])
    padded = Loader(tokens, batch_size=4, collate=transformers.DataCollatorWithPadding(words), shuffle=False)
    assert [tuple(batch["input_ids"].shape) for batch in padded] == [(4, 6), (4, 7), (4, 7), (4, 7), (4, 7)]
    masked = Loader(tokens, batch_size=4, collate=transformers.DataCollatorForLanguageModeling(words), workers=1)
    for batch in masked:
        assert batch["labels"].shape == batch["input_ids"].shape
    again = Loader(tokens, batch_size=4, collate=transformers.DataCollatorForLanguageModeling(words))
    first, second = next(iter(masked)), [next(iter(again)), next(iter(again))][1]
    assert torch.equal(first["labels"], second["labels"])
    lengths = [len(row) for row in tokens["input_ids"]]
    bucketed = Loader(tokens, batch_size=4, lengths=lengths, pad_value={"attention_mask": 0})
    assert all(batch["input_ids"].dim() == 2 for batch in bucketed)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: rows(ragged=True), "column 'x' has rows of"),
        (lambda: datasets.Dataset.from_dict({"x": [None] * 9}), "cannot become part of a batch"),
        (lambda: datasets.Dataset.from_dict({"x": [["a", "b"]] * 9}), "column 'x' cannot become a tensor"),
        (lambda: rows(ragged=True).to_iterable_dataset(), "column 'x' has rows of"),
        (lambda: datasets.DatasetDict({"train": rows(), "test": rows()}), "holds the data sets 'train', 'test'; pass"),
        (
            lambda: datasets.distributed.split_dataset_by_node(rows().to_iterable_dataset(), rank=0, world_size=2),
            "was split with split_dataset_by_node()",
        ),
    ],
)
def test_mistakes_are_one_line(make: Any, line: str) -> None:
    with pytest.raises(EchelonError) as caught:
        list(Loader(make(), batch_size=4, rank=0, world_size=2))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def late_split() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        echelon.init(device="cpu", seed=1)
        model = Named(nn.Linear(6, 3))
        engine = echelon.distribute(
            model,
            loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            log=echelon.Log(lines=False),
        )
        for batch in engine.loader(rows().train_test_split(0.5)["train"], batch_size=4):
            engine.step(batch)
        engine.close()
    return said.getvalue()


def test_other_rows_on_another_rank_are_a_warning() -> None:
    assert run(late_split, ranks=2)[0].count("rank 1 was given another data set than rank 0") == 1
