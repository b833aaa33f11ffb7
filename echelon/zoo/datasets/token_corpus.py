"""The data set ``tokens``: a tokenized corpus in mapped files, for causal language models of any size."""

from __future__ import annotations

from typing import Any

from echelon.data.tokens import TokenFiles
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.documents import PackedDocuments
from echelon.zoo.datasets.tokens.token_files import folder
from echelon.zoo.entry import Data, Dataset, Request, Setting


def open_tokens(request: Request) -> Data:
    """Open a directory of token files; the last rows, or with ``pack`` the last documents, are the test."""
    path = folder(request, "token files, as 'echelon tokenize' writes them")
    length, held_out = int(request.get("max_seq_length", 128)), float(request.get("test_part", 0.01))
    rows = TokenFiles(path, length)
    train, test = _documents(rows, held_out) if request.get("pack") else _rows(rows, held_out)
    return Data(
        train=train,
        test=test if test is not None and len(test) else None,
        facts={} if rows.vocabulary is None else {"vocab_size": rows.vocabulary},
        about=f"{len(train):,} samples of up to {length} tokens, from {len(rows.store):,} tokens in {path}",
    )


def _rows(rows: TokenFiles, held_out: float) -> tuple[Any, Any]:
    tests = round(len(rows) * held_out)
    if not tests:
        return rows, None
    cut = 1 - tests / len(rows)
    return TokenFiles(rows.path, rows.length, part=(0, cut)), TokenFiles(rows.path, rows.length, part=(cut, 1))


def _documents(rows: TokenFiles, held_out: float) -> tuple[Any, Any]:
    starts = rows.store.documents
    cut = len(starts) - 1 - round((len(starts) - 1) * held_out)
    train, test = (PackedDocuments(rows.store, part, rows.length) for part in (starts[: cut + 1], starts[cut:]))
    return train, test


registry.add(
    Dataset(
        name="tokens",
        open=open_tokens,
        tasks=("language_model",),
        about="a corpus tokenized by 'echelon tokenize' (or of Megatron-LM), mapped from disk, to say what comes next",
        settings=(Setting(name="test_part", default=0.01, meaning="the end of the corpus, to evaluate"),),
    )
)
