"""Synthetic text that a model can learn: nine words of ten follow from the previous word by a fixed rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.base.errors import UsageError
from echelon.data.seeding import numpy_stream
from echelon.zoo.datasets.tokens.masking import MaskedRows
from echelon.zoo.datasets.tokens.row_sizes import row_length, row_sizes
from echelon.zoo.datasets.tokens.token_rows import LabelledRows, Numbers, SpecialTokens, TokenRows
from echelon.zoo.entry import Data, Request
from echelon.zoo.tasks import IGNORED

SAMPLES = 2048
SIGNS = SpecialTokens(pad=0, begin=2, end=3, mask=4)  #: the numbers in a vocabulary made by ``train_vocabulary``
FIRST_WORD = 5
MOST_WORDS = 256  #: number of words used, even if the model has more: few words are learned quickly
STRANGE = 0.1  #: fraction of words that do not follow the rule
TOPICS = 4
PAD, END = 0, 1  #: special tokens of translations, as in T5

Draw = np.random.RandomState


def masked_lm(request: Request) -> Data:
    """Return rows for BERT's pretraining; a text has one of four topics, each with its own words.

    A second text that follows the first has the same topic.
    """
    length, most = row_sizes(request)
    words = _words(request, FIRST_WORD) // TOPICS

    def make(draw: Draw, count: int) -> MaskedRows:
        room = length - 3
        first, follows = draw.randint(1, room, count), draw.randint(0, 2, count)
        topic = draw.randint(0, TOPICS, count)
        other = np.where(follows == 1, topic, (topic + draw.randint(1, TOPICS, count)) % TOPICS)
        in_second = np.arange(room)[None] >= first[:, None]
        topics = np.where(in_second, other[:, None], topic[:, None])
        text = FIRST_WORD + _chain(draw, count, room, words) + topics * words
        begin = np.arange(count) * room
        second = np.maximum(1, (room - first) // np.where(draw.rand(count) < 0.1, 2, 1))  # a few rows have padding
        spans = np.stack([begin, first, begin + first, second], 1)
        others = np.arange(FIRST_WORD, FIRST_WORD + words * TOPICS)
        return MaskedRows(_rows(text, spans, length), follows.astype(np.int64), most=most, others=others)

    return _data(request, make)


def classify_text(request: Request) -> Data:
    """Return labelled texts: two words that occur repeatedly determine the class, the other words are random."""
    length = row_length(request)
    classes = int(request["num_classes"])
    digits = int(np.ceil(np.sqrt(classes)))
    room, words = length - 2, _words(request, FIRST_WORD, 2 * digits + 2)
    signal = FIRST_WORD + words - 2 * digits

    def make(draw: Draw, count: int) -> LabelledRows:
        labels = draw.randint(0, classes, count).astype(np.int64)
        text = FIRST_WORD + draw.randint(0, words - 2 * digits, (count, room))
        chance = draw.rand(count, room)
        text = np.where(chance < 0.2, signal + (labels // digits)[:, None], text)
        text = np.where(chance > 0.8, signal + (digits + labels % digits)[:, None], text)
        text[:, 0], text[:, 1] = signal + labels // digits, signal + digits + labels % digits
        spans = np.stack([np.arange(count) * room, np.full(count, room), *np.zeros((2, count), np.int64)], 1)
        return LabelledRows(_rows(text, spans, length), labels)

    return _data(request, make)


def answer_span(request: Request) -> Data:
    """Return texts with answers: one word marks the begin of the answer and another its end, both inclusive."""
    length = row_length(request)
    room, words = length - 4, _words(request, FIRST_WORD, 4)
    opens, closes = FIRST_WORD + words - 2, FIRST_WORD + words - 1

    def make(draw: Draw, count: int) -> LabelledRows:
        text = FIRST_WORD + draw.randint(0, words - 2, (count, room + 1))
        first = draw.randint(1, room, count)
        last = np.minimum(first + draw.randint(1, 6, count), room)
        text[np.arange(count), first], text[np.arange(count), last] = opens, closes
        begin = np.arange(count) * (room + 1)  # the first word is the question
        spans = np.stack([begin, np.ones(count, np.int64), begin + 1, np.full(count, room)], 1)
        return LabelledRows(_rows(text, spans, length), np.stack([first, last], 1).astype(np.int64) + 2)

    return _data(request, make)


def language_model(request: Request) -> Data:
    """Return sequences in which nine words of ten are determined by the previous word."""
    length, words = int(request.get("max_seq_length", 128)), _words(request, 0)

    def make(draw: Draw, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.from_numpy(_chain(draw, count, length + 1, words))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return _data(request, make)


def translate(request: Request) -> Data:
    """Return translations: every word of the source is translated by one fixed word."""
    length, target_length = int(request.get("max_seq_length", 128)), request.get("max_target_length")
    target_length = length if target_length is None else int(target_length)
    words = _words(request, FIRST_WORD) // 2
    room = min(length, target_length) - 1

    def make(draw: Draw, count: int) -> tuple[torch.Tensor, ...]:
        source = FIRST_WORD + _chain(draw, count, room, words)
        sizes = draw.randint((room + 1) // 2, room + 1, count)
        return translation_rows(source, source + words, sizes, length, target_length)

    return _data(request, make)


def translation_rows(
    source: Numbers, target: Numbers, sizes: NDArray[Any], length: int, target_length: int
) -> tuple[torch.Tensor, ...]:
    """Return source, its mask, shifted target and target, each with an end token and padding.

    sizes: number of words of each text; source and target have equal sizes
    """
    count, room = source.shape
    inside, at_end = np.arange(room + 1)[None] < sizes[:, None], np.arange(room + 1)[None] == sizes[:, None]
    ended = [np.where(inside, np.pad(text, ((0, 0), (0, 1))), np.where(at_end, END, PAD)) for text in (source, target)]
    shown, wanted = np.full((count, length), PAD), np.full((count, target_length), IGNORED)
    shown[:, : room + 1] = ended[0]
    wanted[:, : room + 1] = np.where(inside | at_end, ended[1], IGNORED)
    mask = (np.arange(length)[None] <= sizes[:, None]).astype(np.int64)
    before = np.full((count, target_length), PAD)
    before[:, 1:] = np.where(wanted[:, :-1] == IGNORED, PAD, wanted[:, :-1])
    return tuple(torch.from_numpy(column) for column in (shown, mask, before, wanted))


def _data(request: Request, make: Callable[[Draw, int], Any]) -> Data:
    """Return a training part, and a test part with an eighth as many samples."""
    samples, seed = int(request.get("num_sample_per_epoch", SAMPLES)), int(request.get("seed", 0))
    tests = max(1, min(samples // 8, SAMPLES // 8))
    return Data(
        train=make(numpy_stream(seed, 1), samples),
        test=make(numpy_stream(seed, 2), tests),
        about=f"{samples:,} made-up sequences",
    )


def _rows(text: NDArray[Any], spans: NDArray[Any], length: int) -> TokenRows:
    return TokenRows(text.astype(np.int32).ravel(), spans.astype(np.int64), length, SIGNS)


def _words(request: Request, kept: int, least: int = 8) -> int:
    """Return the number of words used, beside the ``kept`` special ones.

    Raises UsageError if the vocabulary is too small.
    """
    size = int(request.get("vocab_size", FIRST_WORD + MOST_WORDS))
    if size < kept + least:
        raise UsageError(f"--vocab_size {size} is too small for made-up text; give {kept + least} or more")
    return min(size - kept, max(MOST_WORDS, least))


def _chain(draw: Draw, rows: int, length: int, words: int) -> Numbers:
    """Return rows of word numbers from 0; a word follows from the previous one, except for a random tenth."""
    ring = numpy_stream(words).permutation(words)  # the rule is the same for training and test, and for every seed
    follower = np.empty_like(ring)
    follower[ring] = np.roll(ring, -1)
    text = draw.randint(0, words, (rows, length)).astype(np.int64)
    strange = draw.rand(rows, length) < STRANGE
    for at in range(1, length):
        text[:, at] = np.where(strange[:, at], text[:, at], follower[text[:, at - 1]])
    return text
