"""The data set ``text``: text files for causal language models."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.documents import PackedDocuments
from echelon.zoo.datasets.tokens.sentences import documents_of
from echelon.zoo.datasets.tokens.token_files import find, read_text
from echelon.zoo.datasets.tokens.vocabulary import SETTINGS, TokenizedTexts, vocabulary_for
from echelon.zoo.entry import Data, Dataset, Request, Setting
from echelon.zoo.tasks import IGNORED


def open_text(request: Request) -> Data:
    """Open the files, in the order of names, as one text whose last part is the test.

    With ``pack``, samples do not cross documents.
    """
    paths = find(request, "*.txt", "text files")
    if request.get("pack"):
        return _open_documents(request, paths)
    text = "".join(read_text(path) for path in paths)
    tokens, size = _encoded(request, text)
    cut = len(tokens) - round(len(tokens) * request.get("test_part", 0.1))
    length = int(request.get("max_seq_length", 128))
    if cut < 2:
        raise DataError(
            f"{paths[0]} has {len(tokens)} tokens of text, which is too little to train on; check the files"
        )
    train = windows(tokens[:cut], length)
    return Data(
        train=train,
        test=windows(tokens[cut:], length) if len(tokens) - cut > 1 else None,
        facts={"vocab_size": size},
        about=f"{len(train[0])} windows of {length} from {cut} tokens in {len(paths)} files, {size} different ones",
    )


def _open_documents(request: Request, paths: list[Path]) -> Data:
    """Open documents, which are separated by blank lines as for BERT; the last ones are the test."""
    found = ["\n".join(document) for path in paths for document in documents_of(read_text(path))]
    held_out = round(len(found) * request.get("test_part", 0.1))
    texts, size = _encoded_each(request, found)
    length, cut = int(request.get("max_seq_length", 128)), len(found) - held_out
    train, test = (
        PackedDocuments(texts.tokens, texts.begins[low : high + 1], length)
        for low, high in ((0, cut), (cut, len(found)))
    )
    if not len(train):
        raise DataError(f"{paths[0]} has {len(found)} documents, which leaves none to train on; add text")
    return Data(
        train=train,
        test=test if len(test) else None,
        facts={"vocab_size": size},
        about=f"{len(train)} pieces of {cut} documents in {len(paths)} files, {size} different tokens; packed without "
        f"padding: {train.mean_size:.0f} of {length} tokens on average",
    )


def _encoded_each(request: Request, texts: list[str]) -> tuple[TokenizedTexts, int]:
    if request.get("tokenizer", "characters") == "wordpiece":
        vocabulary = vocabulary_for(request, texts)
        return vocabulary.encode(texts), vocabulary.size
    tokens, size = _encoded(request, "".join(texts))
    by_bytes = request.get("tokenizer", "characters") == "bytes"
    lengths = [len(text.encode()) if by_bytes else len(text) for text in texts]
    return TokenizedTexts(tokens.astype(np.int32), np.array([0, *accumulate(lengths)], np.int64)), size


def windows(tokens: NDArray[np.int64], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of tokens and of the tokens that follow them; each token occurs once, and the end is padded."""
    count = -(-(len(tokens) - 1) // length)
    seen, following = np.zeros(count * length, np.int64), np.full(count * length, IGNORED)
    seen[: len(tokens) - 1], following[: len(tokens) - 1] = tokens[:-1], tokens[1:]
    return torch.from_numpy(seen).view(count, length), torch.from_numpy(following).view(count, length)


def _encoded(request: Request, text: str) -> tuple[NDArray[np.int64], int]:
    """Return the tokens and the size of the vocabulary."""
    tokenizer = request.get("tokenizer", "characters")
    if tokenizer == "bytes":
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64), 256
    if tokenizer == "characters":
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        known, tokens = np.unique(codes, return_inverse=True)
        return tokens.astype(np.int64), len(known)
    lines = [line for line in text.split("\n") if line.strip()]
    vocabulary = vocabulary_for(request, lines)
    return vocabulary.encode(lines).tokens.astype(np.int64), vocabulary.size


registry.add(
    Dataset(
        name="text",
        open=open_text,
        tasks=("language_model",),
        about="text files, to say what comes next",
        settings=(
            Setting(
                name="tokenizer",
                default="characters",
                meaning="what a token is: a character of those in the text, a byte, or a part of a word",
                kind=Literal["characters", "bytes", "wordpiece"],
            ),
            Setting(name="test_part", default=0.1, meaning="the end of the text, to evaluate"),
            *SETTINGS,
        ),
    )
)
