"""The data set ``tokens``: tokenized corpora in mapped files, for causal language models of any size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from echelon.base.errors import UsageError
from echelon.data import Mixture
from echelon.data.mixture import joined
from echelon.data.tokens import TokenFiles
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.documents import PackedDocuments
from echelon.zoo.datasets.tokens.token_files import folder
from echelon.zoo.entry import Data, Dataset, Request, Setting


class _Corpus(NamedTuple):
    """One corpus: all its rows, the part to train on, and the part held out."""

    rows: TokenFiles
    train: Any
    test: Any


def open_tokens(request: Request) -> Data:
    """Open token files; the last rows of each corpus, or with ``pack`` the last documents, are the test."""
    path = folder(request, "token files, as 'echelon tokenize' writes them")
    length, mixture = int(request.get("max_seq_length", 128)), request.get("mixture")
    if mixture is None:
        if request.get("exhausted") is not None:
            raise UsageError(f"--exhausted {request['exhausted']} is for corpora mixed with --mixture; leave it out")
        rows, train, test = _corpus(path, request)
        corpora, about = [rows], f"from {len(rows.store):,} tokens in {path}"
    else:
        weights = _weights(mixture)
        found = {name: _corpus(path / name, request) for name in weights}
        corpora = [one.rows for one in found.values()]
        exhausted = request.get("exhausted", "stop")
        train = Mixture({name: one.train for name, one in found.items()}, weights, exhausted=exhausted)
        test = joined([one.test for one in found.values() if one.test is not None and len(one.test)])
        about = f"mixed of {len(found)} corpora in {path}: {train}"
    vocabularies = [rows.vocabulary for rows in corpora if rows.vocabulary is not None]
    return Data(
        train=train,
        test=test if test is not None and len(test) else None,
        facts={"vocab_size": max(vocabularies)} if len(vocabularies) == len(corpora) else {},
        about=f"{len(train):,} samples of up to {length} tokens, {about}",
    )


def _weights(given: str) -> dict[str, float]:
    """Return the weight of each corpus from NAME=WEIGHT,NAME=WEIGHT."""
    found: dict[str, float] = {}
    for part in given.split(","):
        name, equals, weight = part.strip().rpartition("=")
        try:
            found[os.path.normpath(name)] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise UsageError(
                f"--mixture {given}: '{part.strip()}' is no NAME=WEIGHT; give the directories in --dataset_dir and "
                "their weights, such as web.tokens=7,code.tokens=3"
            )
    return found


def _corpus(path: Path, request: Request) -> _Corpus:
    rows = TokenFiles(path, int(request.get("max_seq_length", 128)))
    part = _documents if request.get("pack") else _rows
    return _Corpus(rows, *part(rows, float(request.get("test_part", 0.01))))


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
        settings=(
            Setting(name="test_part", default=0.01, meaning="the end of the corpus, to evaluate"),
            Setting(
                name="mixture",
                default=None,
                kind=str | None,
                meaning="corpora in --dataset_dir with their weights: web.tokens=7,code.tokens=3",
            ),
            Setting(
                name="exhausted",
                default=None,
                kind=Literal["stop", "repeat"] | None,
                meaning="where the first corpus of a mixture is used up, the epoch ends (stop, default) or it begins "
                "again (repeat)",
            ),
        ),
    )
)
