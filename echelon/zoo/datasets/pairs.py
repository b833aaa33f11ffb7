"""The data set ``pairs``: texts with translations or other target texts, one ``source, tab, target`` per line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.row_sizes import row_length
from echelon.zoo.datasets.tokens.token_files import find, read_table
from echelon.zoo.datasets.tokens.token_rows import Numbers
from echelon.zoo.datasets.tokens.vocabulary import SETTINGS, TokenizedTexts, WordPiece, vocabulary_for
from echelon.zoo.entry import Data, Dataset, Request, Setting
from echelon.zoo.tasks import IGNORED

Pair = tuple[str, str]


def open_pairs(request: Request) -> Data:
    """Open tab-separated files; those named dev* or test* are the test part, or else the last pairs are."""
    paths = find(request, "*.tsv", "tab-separated files: source, tab, target")
    held_out = [path for path in paths if path.name.startswith(("dev", "test")) and len(paths) > 1]
    train = _read([path for path in paths if path not in held_out])
    test = _read(held_out)
    if not held_out:
        cut = len(train) - round(len(train) * request.get("test_part", 0.1))
        train, test = train[:cut], train[cut:]
    if not train:
        raise DataError(f"{paths[0]} has no pairs to train on; check the file")
    vocabulary = vocabulary_for(request, [text for pair in train for text in pair])
    return Data(
        train=_rows(train, vocabulary, request),
        test=_rows(test, vocabulary, request) if test else None,
        facts={"vocab_size": vocabulary.size},
        about=f"{len(train)} pairs to train on and {len(test)} to test, {vocabulary.size} words",
    )


def _rows(pairs: list[Pair], vocabulary: WordPiece, request: Request) -> tuple[torch.Tensor, ...]:
    """Return source, its mask, shifted target and target.

    Texts end with [SEP] and are truncated to fit. The shifted target begins with [PAD], as in T5.
    """
    length = row_length(request)
    sources = _padded(vocabulary.encode(pair[0] for pair in pairs), length, vocabulary)
    targets = _padded(
        vocabulary.encode(pair[1] for pair in pairs), request.get("max_target_length", length), vocabulary
    )
    (source, seen), (target, counts) = sources, targets
    before = np.concatenate([np.full((len(pairs), 1), vocabulary.pad), target[:, :-1]], 1)
    columns = source, seen.astype(np.int64), before, np.where(counts, target, IGNORED)
    return tuple(torch.from_numpy(column) for column in columns)


def _padded(
    texts: TokenizedTexts, length: int, vocabulary: WordPiece
) -> tuple[Numbers, np.ndarray[tuple[int, int], np.dtype[np.bool_]]]:
    """Return the rows [n, length], and a mask that is True where they are not padding."""
    rows = np.full((len(texts), length), vocabulary.pad, np.int64)
    sizes = np.minimum(np.diff(texts.begins), length - 1)
    for row, begin, size in zip(rows, texts.begins, sizes, strict=False):
        row[:size], row[size] = texts.tokens[begin : begin + size], vocabulary.end
    return rows, np.arange(length)[None] <= sizes[:, None]


def _read(paths: list[Path]) -> list[Pair]:
    pairs = []
    for path in paths:
        for number, fields in read_table(path):
            if len(fields) != 2:
                raise DataError(f"{path}, line {number} has {len(fields)} columns; expected two: source, tab, target")
            pairs.append((fields[0], fields[1]))
    return pairs


registry.add(
    Dataset(
        name="pairs",
        open=open_pairs,
        tasks=("translate",),
        about="texts with their translation: source, tab, target",
        settings=(Setting(name="test_part", default=0.1, meaning="the last pairs, to evaluate"), *SETTINGS),
    )
)
