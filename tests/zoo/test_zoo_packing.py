"""The zoo's text models on packed rows: the loss and the gradients of padded ones, and of each document alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon.base.errors import UsageError
from echelon.data import Loader, pack_collate
from echelon.nn import mean_over_samples
from echelon.zoo import registry
from echelon.zoo.datasets.text import open_text
from echelon.zoo.datasets.tokens.documents import PackedDocuments
from echelon.zoo.datasets.tokens.masking import MaskedRows
from echelon.zoo.datasets.tokens.packing import PackedRows, packing
from echelon.zoo.datasets.tokens.token_rows import LabelledRows, SpecialTokens, TokenRows
from echelon.zoo.entry import Data, Request
from echelon.zoo.tasks import IGNORED, TASKS, masked_accuracy, tokens

ROWS, LENGTH = 24, 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(name: str, task: str, **values: Any) -> Request:
    entry = registry.model(name)
    known = {each.name: each.default for each in entry.settings}
    return Request({**known, **entry.tiny, "dropout": 0.0, "attention_dropout": 0.0, "num_classes": 5, **values}, task)


def made(name: str, task: str) -> nn.Module:
    torch.manual_seed(0)
    return registry.model(name).build(request(name, task))


def rows() -> TokenRows:
    """Make rows of 3 to 16 tokens, some without a second text."""
    draw = np.random.RandomState(0)
    spans = [draw.randint(0, 400, ROWS), draw.randint(1, 7, ROWS), draw.randint(0, 400, ROWS), draw.randint(0, 7, ROWS)]
    return TokenRows(draw.randint(5, 128, 500).astype(np.int32), np.stack(spans, 1), LENGTH, SpecialTokens(0, 2, 3, 4))


def masked() -> MaskedRows:
    follows = np.random.RandomState(1).randint(0, 2, ROWS)
    return MaskedRows(rows(), follows, most=3, others=np.arange(5, 128))


def labelled() -> LabelledRows:
    return LabelledRows(rows(), np.random.RandomState(1).randint(0, 5, ROWS))


def judged(model: nn.Module, loss: Any, batch: Any) -> tuple[Tensor, list[Tensor]]:
    *inputs, target = batch
    value = loss(model(*inputs), target)
    return value, list(torch.autograd.grad(value, list(model.parameters()), allow_unused=True))


def assert_same(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.allclose(a[0], b[0], atol=1e-6)
    for one, other in zip(a[1], b[1], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(("task", "data"), [("masked_lm", masked), ("classify_text", labelled)])
def test_packed_rows_give_loss_and_gradients_of_padded_ones(task: str, data: Any) -> None:
    model, loss = made("bert_tiny", task), TASKS[task].loss
    for padded, packed in zip(
        Loader(data(), batch_size=10), Loader(PackedRows(data(), 32), batch_size=10), strict=True
    ):
        assert packed[0].values.numel() < padded[0].numel()
        assert_same(judged(model, loss, packed), judged(model, loss, padded))


def test_logits_of_masked_words_give_the_loss_of_all_logits() -> None:
    """Logits of masked words only give the loss of all logits with ignored labels."""
    model = made("bert_tiny", "masked_lm")
    words, segments, mask, positions, (labels, _) = next(iter(Loader(masked(), batch_size=10)))
    every = torch.full_like(words, IGNORED).scatter(1, positions, labels)  # what is no word points at [CLS]
    assert (every != IGNORED).sum() == (labels != IGNORED).sum()
    weights = list(model.parameters())
    losses = [
        tokens(model.guess(model.encode(words, segments, mask)), every),
        tokens(model(words, segments, mask, positions)[0], labels),
    ]
    gradients = [torch.autograd.grad(value, weights, allow_unused=True) for value in losses]
    assert_same((losses[0], list(gradients[0])), (losses[1], list(gradients[1])))


def test_masked_accuracy_is_that_of_padded_rows() -> None:
    model = made("bert_tiny", "masked_lm").eval()
    model.guess.words.bias.data[5:40] = 5.0  # so that some are right
    padded, packed = (next(iter(Loader(data, batch_size=24))) for data in (masked(), PackedRows(masked())))
    found = [masked_accuracy(model(*batch[:-1]), batch[-1]).mean() for batch in (padded, packed)]
    assert torch.allclose(*found)


def test_gpt_reads_each_packed_document_as_if_it_were_alone() -> None:
    model = made("gpt_tiny", "language_model")
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(64, (n + 1,), generator=g) for n in (5, 16, 1, 9)]
    packed = pack_collate([(text[:-1], text[1:]) for text in texts], 32, (0, IGNORED))
    alone = torch.stack([tokens(model(text[None, :-1]), text[None, 1:]) for text in texts]).mean()
    gradients = list(torch.autograd.grad(alone, list(model.parameters())))
    assert_same(judged(model, tokens, packed), (alone, gradients))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
def test_layers_compile_at_most_twice_for_any_number_of_lengths() -> None:
    """Layers compile in one piece and twice at most, for any number of lengths."""
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    model, loss, lengths = made("bert_tiny", "masked_lm"), TASKS["masked_lm"].loss, set()
    for layer in model.layers:
        layer.compile(backend=counting, fullgraph=True)
    batches = [*Loader(PackedRows(masked(), 4), batch_size=7), *Loader(PackedRows(masked(), 4), batch_size=7, seed=1)]
    for batch in (each for each in batches if each[0].samples == 7):
        lengths.add(len(batch[0].values))
        judged(model, loss, batch)
    assert len(lengths) >= 3
    assert len(graphs) == 2


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_documents_are_read_each_for_itself_and_every_token_once(tmp_path: Path, tokenizer: str) -> None:
    documents = ["to be\nor not", "x", "é", "that is the question", "whether"]
    (tmp_path / "a.txt").write_text("\n\n".join(documents) + "\n")
    values = {"dataset_dir": str(tmp_path), "tokenizer": tokenizer, "test_part": 0.2, "max_seq_length": 8, "pack": True}
    data = packing(open_text(Request(values, "language_model")), Request(values, "language_model"), torch.device("cpu"))
    assert isinstance(data.train, PackedDocuments)
    shown, following = data.train.batch(np.arange(len(data.train)), np.zeros(0, np.uint64))
    codes = [list(each.encode()) if tokenizer == "bytes" else [ord(sign) for sign in each] for each in documents]
    known = list(range(256)) if tokenizer == "bytes" else sorted({*chain(*codes)})
    expected = [[known.index(code) for code in each] for each in codes[:4]]
    pieces = [each[at : at + 9] for each in expected for at in range(0, len(each) - 1, 8)]
    assert [text.tolist() for text in shown.unpack()] == [piece[:-1] for piece in pieces]
    assert [text.tolist() for text in following.unpack()] == [piece[1:] for piece in pieces]
    assert (following.values[sum(len(piece) - 1 for piece in pieces) :] == IGNORED).all()
    assert [text.tolist() for text in data.train[1]] == [pieces[1][:-1], pieces[1][1:]]
    assert len(data.test) == 1


# ---- on two ranks ----


def train_split() -> list[float]:
    """Heads and words cut in two where there are two ranks; both work on the same packed batch."""
    model = made("bert_tiny", "masked_lm")
    if echelon.world_size() == 2:
        echelon.annotate(model, registry.model("bert_tiny").split)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = echelon.distribute(model, loss=TASKS["masked_lm"].loss, optimizer=optimizer, log=QUIET)
    loader = engine.loader(PackedRows(masked(), 32), batch_size=6)
    return [float(engine.step(*batch)) for batch in loader]


def test_split_heads_of_packed_rows_equal_one_process() -> None:
    """Packed rows with split heads give the losses of one process."""
    (one,), two = run(train_split, ranks=1), run(train_split, ranks=2)
    for losses in two:
        assert losses == pytest.approx(one, abs=1e-5)


# ---- when it is done ----


def test_packed_where_asked_for_or_where_it_pays_on_a_gpu() -> None:
    cpu, gpu, data = torch.device("cpu"), torch.device("cuda"), Data(train=masked(), test=masked(), about="24 rows")
    asked = request("bert_tiny", "masked_lm")
    assert packing(data, asked, cpu) is data
    assert packing(data, request("bert_tiny", "masked_lm", pack=False), gpu) is data
    on_gpu, told = packing(data, asked, gpu), packing(data, request("bert_tiny", "masked_lm", pack=True), cpu)
    for packed in (on_gpu, told):
        assert isinstance(packed.train, PackedRows)
        assert isinstance(packed.test, PackedRows)
        assert "packed without padding: 9 of 16 tokens on average" in packed.about
    full = TokenRows(rows().tokens, np.tile([0, 7, 7, 6], (ROWS, 1)), LENGTH, rows().signs)
    unpadded = Data(train=MaskedRows(full, np.zeros(ROWS, np.int64), most=3, others=np.arange(5, 128)))
    assert packing(unpadded, asked, gpu) is unpadded
    assert packing(data, asked, gpu, planned=True) is data
    with pytest.raises(UsageError, match="--pack true: a packed row is not cut for --stages; leave it out"):
        packing(data, request("bert_tiny", "masked_lm", pack=True, stages=2), cpu)
    with pytest.raises(UsageError, match="--pack true: padding takes part in the choice of an answer's span"):
        packing(Data(train=labelled()), request("bert_tiny", "answer_span", pack=True), cpu)


def test_a_mean_over_samples_compiles_in_one_piece() -> None:
    batch = next(iter(Loader(PackedRows(masked()), batch_size=5)))[-1][0]
    each = torch.rand(len(batch.values))
    compiled = torch.compile(mean_over_samples, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(each, batch), mean_over_samples(each, batch))
