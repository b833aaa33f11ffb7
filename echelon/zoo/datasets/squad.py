"""The data set ``squad``: questions whose answer is a span of a text, from the JSON files of SQuAD 1.1 and 2.0.

The reference is Rajpurkar et al. 2016.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.base.errors import DataError, UsageError
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.row_sizes import row_length
from echelon.zoo.datasets.tokens.token_files import find_part, folder, need_part, read_json
from echelon.zoo.datasets.tokens.token_rows import LabelledRows, TokenRows
from echelon.zoo.datasets.tokens.vocabulary import SETTINGS, WordPiece, vocabulary_for
from echelon.zoo.entry import Data, Dataset, Request, Setting

WHAT = "train-*.json (and dev-*.json) of SQuAD"


class SquadQuestion(NamedTuple):
    """A question; ``begin`` and ``stop`` are the character range of the answer in the context, 0 and 0 without one."""

    text: str
    begin: int
    stop: int


class SquadParagraph(NamedTuple):
    context: str
    questions: list[SquadQuestion]


def open_squad(request: Request) -> Data:
    train = _read(_train_files(request))
    test = _read(find_part(request, ["dev-*.json", "dev*.json"], WHAT) if folder(request, WHAT).is_dir() else [])
    texts = [text for one in train for text in (one.context, *(question.text for question in one.questions))]
    vocabulary = vocabulary_for(request, texts)
    rows = ContextWindows(vocabulary, request).of(train)
    questions = sum(len(one.questions) for one in train)
    return Data(
        train=rows,
        test=ContextWindows(vocabulary, request).of(test) if test else None,
        facts={"vocab_size": vocabulary.size},
        about=f"{len(rows)} windows of {questions} questions about {len(train)} paragraphs",
    )


class ContextWindows:
    """Cuts long contexts into overlapping windows; the target of a window without the answer is [CLS]: (0, 0)."""

    def __init__(self, vocabulary: WordPiece, request: Request) -> None:
        self._vocabulary, self._length = vocabulary, row_length(request)
        self._stride = int(request.get("doc_stride", 128))
        self._question = min(int(request.get("max_query_length", 64)), (self._length - 3) // 2)
        if self._stride < 1 or self._question < 1:
            raise UsageError("--doc_stride and --max_query_length must be 1 or more")
        self._tokens: list[int] = []
        self._spans: list[tuple[int, int, int, int]] = []
        self._targets: list[tuple[int, int]] = []

    def of(self, paragraphs: list[SquadParagraph]) -> LabelledRows:
        for paragraph in paragraphs:
            self._add(paragraph)
        tokens, spans = np.array(self._tokens, np.int32), np.array(self._spans, np.int64).reshape(-1, 4)
        rows = TokenRows(tokens, spans, self._length, self._vocabulary.signs)
        return LabelledRows(rows, np.array(self._targets, np.int64).reshape(-1, 2))

    def _add(self, paragraph: SquadParagraph) -> None:
        tokens, places = self._vocabulary.encode_with_places(paragraph.context)
        context = len(self._tokens)
        self._tokens += tokens
        for question in paragraph.questions:
            question_tokens = self._vocabulary.encode_with_places(question.text)[0][: self._question]
            begin = len(self._tokens)
            self._tokens += question_tokens
            room = self._length - 3 - len(question_tokens)
            answer = _answer(question, places)
            for at in window_starts(len(tokens), room, self._stride):
                size = min(room, len(tokens) - at)
                self._spans.append((begin, len(question_tokens), context + at, size))
                self._targets.append(_inside(answer, at, size, len(question_tokens) + 2))


def window_starts(length: int, room: int, stride: int) -> list[int]:
    """Return the starts of windows of ``room`` tokens that together cover all ``length`` tokens."""
    starts = [0]
    while starts[-1] + room < length:
        starts.append(starts[-1] + min(stride, room))
    return starts


def _answer(question: SquadQuestion, places: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first and last token of the answer in the context, or None if there is no answer."""
    held = [at for at, (begin, stop) in enumerate(places) if stop > question.begin and begin < question.stop]
    return (held[0], held[-1]) if held else None


def _inside(answer: tuple[int, int] | None, at: int, size: int, before: int) -> tuple[int, int]:
    if answer is None or answer[0] < at or answer[1] >= at + size:
        return 0, 0
    return answer[0] - at + before, answer[1] - at + before


def _train_files(request: Request) -> list[Path]:
    path = folder(request, WHAT)
    given = request.get("file_pattern")
    return [path] if path.is_file() else need_part(request, [given] if given else ["train-*.json", "train*.json"], WHAT)


def _read(paths: list[Path]) -> list[SquadParagraph]:
    paragraphs: list[SquadParagraph] = []
    for path in paths:
        found = read_json(path)
        try:
            paragraphs += [_paragraph(one) for article in found["data"] for one in article["paragraphs"]]
        except (KeyError, TypeError, IndexError) as error:
            raise DataError(f"{path} is no SQuAD file: it has no {error} where there should be one") from None
        if not any(one.questions for one in paragraphs):
            raise DataError(f"{path} has no questions in it; download it again")
    return paragraphs


def _paragraph(found: dict[str, Any]) -> SquadParagraph:
    context, questions = found["context"], []
    for one in found["qas"]:
        if one.get("is_impossible"):
            questions.append(SquadQuestion(one["question"], 0, 0))
            continue
        answer = one["answers"][0]
        begin, stop = answer["answer_start"], answer["answer_start"] + len(answer["text"])
        if context[begin:stop] == answer["text"]:  # a few of the published positions are wrong
            questions.append(SquadQuestion(one["question"], begin, stop))
    return SquadParagraph(context, questions)


registry.add(
    Dataset(
        name="squad",
        open=open_squad,
        tasks=("answer_span",),
        about="SQuAD 1.1 or 2.0: questions whose answer is a piece of a text",
        settings=(
            Setting(name="doc_stride", default=128, meaning="tokens between the windows of a long text"),
            Setting(name="max_query_length", default=64, meaning="tokens of a question; what is longer is cut"),
            *SETTINGS,
        ),
    )
)
