"""Token files with documents, in models of transformers: attention and labels stay inside documents, on any layout."""

from __future__ import annotations

import contextlib
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from beside import ROWS, Case, check
from harness import run
from torch import Tensor, nn

import echelon
from echelon.base.errors import EchelonError
from echelon.data import Loader, Mixture, TokenFiles

LENGTH = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of short documents, several in a row."""
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(3)
    sizes = draw.integers(1, 9, 120)
    starts = np.cumsum([0, *sizes])
    (folder / "a.tokens").write_bytes(draw.integers(3, tiny.WORDS, starts[-1]).astype("<u2").tobytes())
    (folder / "a.documents").write_bytes(starts[:-1].astype("<i8").tobytes())
    shard = {"name": "a", "tokens": int(starts[-1]), "documents": len(sizes), "crc32": 0}
    head = {"format": "echelon tokens", "version": 1, "vocabulary": tiny.WORDS, "end": None, "tokenizer": ""}
    (folder / "tokens.json").write_text(json.dumps({**head, "shards": [shard]}))
    return folder


def llama() -> nn.Module:
    return tiny.llama(use_cache=False)


def by_document(model: nn.Module, rows: TokenFiles, batch: dict[str, Tensor]) -> Tensor:
    """The mean over tokens of the losses of pieces of documents, each computed alone."""
    total, count = torch.zeros(()), 0
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for begin, end in pairwise(begins):
            if end - begin > 1:
                piece = ids[None, begin:end]
                total = total + model(input_ids=piece, labels=piece).loss * (end - begin - 1)
                count += end - begin - 1
    assert count < batch["labels"][:, 1:].numel()
    return total / count


def test_rows_of_documents_are_documents_alone(corpus: Path) -> None:
    rows = TokenFiles(corpus, LENGTH, documents=True, named=True)
    plain = TokenFiles(corpus, LENGTH, named=True)
    torch.manual_seed(0)
    model = llama()
    batch, flat = next(iter(Loader(rows, batch_size=9))), next(iter(Loader(plain, batch_size=9)))
    assert torch.equal(batch["input_ids"], flat["input_ids"])
    assert torch.equal(flat["labels"], flat["input_ids"])
    expected = by_document(model, rows, batch)
    found = model(**batch).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert abs(model(**flat).loss - expected) > 1e-4


def documents(step: int) -> dict[str, Tensor]:
    """Rows of documents of 1 to 5 words, fewer of them in later rows."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(3, tiny.WORDS, (ROWS, LENGTH), generator=g)
    begins = torch.rand(ROWS, LENGTH, generator=g) < torch.linspace(0.6, 0.1, ROWS)[:, None]
    begins[:, 0] = True
    at = torch.arange(LENGTH).expand(ROWS, -1)
    return {
        "input_ids": ids,
        "labels": ids.where(~begins, -100),
        "position_ids": at - at.where(begins, 0).cummax(1).values,
    }


def test_layouts_equal_one_process() -> None:
    marks = tiny.in_stages("model.layers")
    cases = [
        Case(llama, documents),
        Case(llama, documents, {}, {"shard": 3}),
        Case(llama, documents, {}, {"split": 2}),
        Case(llama, documents, marks),
    ]
    check(cases, ranks=2)


def trained(model: Any, corpus: Path, strategy: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        echelon.init(device="cpu", seed=1)
        torch.manual_seed(0)
        model = model()
        engine = echelon.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.3), log=echelon.Log(lines=False), strategy=strategy
        )
        try:
            rows = TokenFiles(corpus, LENGTH, documents=True, named=True, part=(0, 0.8))
            held_out = TokenFiles(corpus, LENGTH, documents=True, named=True, part=(0.8, 1))
            loader = engine.loader(Mixture([rows, held_out], [3, 1], exhausted="repeat"), global_batch=6, uneven="join")
            losses = [float(engine.step(**batch)) for batch in loader]
            return losses, engine.evaluate(held_out)["loss"]
        except EchelonError as error:
            return str(error)
        finally:
            engine.close()


@pytest.mark.parametrize(
    "strategy", [None, echelon.Strategy(shard=3), echelon.Strategy(split=2), echelon.Strategy(stages=2)]
)
def test_token_files_train_alike_on_two_ranks(corpus: Path, strategy: Any) -> None:
    losses, judged = run(trained, llama, corpus, None, ranks=1)[0]
    assert len(losses) > 4
    for mine, its in run(trained, llama, corpus, strategy, ranks=2):
        assert mine == pytest.approx(losses, rel=1e-5)
        assert its == pytest.approx(judged, rel=1e-5)


def opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=tiny.WORDS, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
            word_embed_proj_dim=16, max_position_embeddings=32, use_cache=False, dropout=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (tiny.llama, "LlamaForCausalLM keeps a cache of keys, with which its attention crosses documents; set model.c"),
        (opt, "attention of OPTForCausalLM crosses documents, since it does not find them by position_ids; train with"),
    ],
)
def test_a_model_that_cannot_is_one_line(corpus: Path, model: Any, line: str) -> None:
    for found in run(trained, model, corpus, None, ranks=2):
        assert line in found
        assert "\n" not in found
