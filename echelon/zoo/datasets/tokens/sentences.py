"""Pairs of pieces of text for BERT's second task: does the second follow the first?"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from echelon.data.seeding import python_stream
from echelon.zoo.datasets.tokens.token_rows import Numbers
from echelon.zoo.datasets.tokens.vocabulary import TokenizedTexts


class SentenceSpan(NamedTuple):
    """A sentence, or a part of a long one: its tokens in the whole text."""

    begin: int
    stop: int


class SentencePairs(NamedTuple):
    """spans [n, 4] as ``Rows`` has them; follows [n]: 1 where the second text is what comes after the first."""

    spans: Numbers
    follows: Numbers


def documents_of(text: str) -> list[list[str]]:
    """Lines, by the blank lines between them."""
    documents: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    return [document for document in documents if document]


def pieces_of(sentences: TokenizedTexts, documents: list[int], room: int) -> list[list[SentenceSpan]]:
    """The pieces of each chapter. ``documents``: how many sentences each has; ``room``: tokens of a row.

    A piece is at most half a row, so that a full row always has two. Documents are joined until they fill eight rows:
    else most rows of speeches and messages would be padding.
    """
    chapters: list[list[SentenceSpan]] = [[]]
    sentence, most = 0, max(1, room // 2)
    for count in documents:
        if chapters[-1] and chapters[-1][-1].stop - chapters[-1][0].begin >= 8 * room:
            chapters.append([])
        begin, stop = int(sentences.begins[sentence]), int(sentences.begins[sentence + count])
        edges = {*sentences.begins[sentence : sentence + count + 1].tolist()}
        chapters[-1] += _cut(sorted(edges), most) if stop > begin else []
        sentence += count
    return [chapter for chapter in chapters if chapter]


def _cut(edges: list[int], most: int) -> list[SentenceSpan]:
    pieces = []
    for begin, stop in pairwise(edges):
        pieces += [SentenceSpan(at, min(at + most, stop)) for at in range(begin, stop, most)]
    return pieces


class SentencePairBuilder:
    """Goes through chapters and fills rows with pieces. One half of the rows has a second text from elsewhere."""

    def __init__(self, chapters: list[list[SentenceSpan]], room: int, seed: int) -> None:
        self._chapters, self._room = chapters, room
        self._draw = python_stream(seed, len(chapters), room)
        self._all = [(number, at) for number, chapter in enumerate(chapters) for at in range(len(chapter))]

    def pairs(self) -> SentencePairs:
        spans, follows = [], []
        for number, chapter in enumerate(self._chapters):
            at = 0
            while at < len(chapter):
                span, follow, at = self._pair(number, at)
                spans.append(span)
                follows.append(follow)
        return SentencePairs(np.array(spans, np.int64).reshape(-1, 4), np.array(follows, np.int64))

    def _pair(self, number: int, at: int) -> tuple[tuple[int, int, int, int], int, int]:
        """The row that begins at this piece, whether its second text follows, and the piece that the next begins at."""
        chapter = self._chapters[number]
        stop = self._filled(chapter, at, self._room)
        middle = at + 1 + (self._draw.randrange(stop - at - 1) if stop - at > 1 else 0)
        first = SentenceSpan(chapter[at].begin, chapter[middle - 1].stop)
        stays = stop > middle and self._draw.random() < 0.5
        if not stays and (elsewhere := self._elsewhere(number, at, stop, self._room - _size(first))):
            return self._trimmed(first, elsewhere), 0, middle
        if stop > middle:
            return self._trimmed(first, SentenceSpan(chapter[middle].begin, chapter[stop - 1].stop)), 1, stop
        return self._trimmed(first, SentenceSpan(first.stop, first.stop)), 0, stop

    def _filled(self, chapter: list[SentenceSpan], at: int, room: int) -> int:
        """The first piece that is not needed to fill ``room`` from ``at`` on."""
        stop = at + 1
        while stop < len(chapter) and chapter[stop - 1].stop - chapter[at].begin < room:
            stop += 1
        return stop

    def _elsewhere(self, number: int, at: int, stop: int, room: int) -> SentenceSpan | None:
        """Text of another chapter; of this one, where there is no other. None: all there is lies in the row."""
        for _ in range(20):
            other, begin = self._all[self._draw.randrange(len(self._all))]
            away = other != number or (len(self._chapters) == 1 and not at <= begin <= stop)
            if away:
                chapter = self._chapters[other]
                return SentenceSpan(chapter[begin].begin, chapter[self._filled(chapter, begin, room) - 1].stop)
        return None

    def _trimmed(self, first: SentenceSpan, second: SentenceSpan) -> tuple[int, int, int, int]:
        """To the room there is, the longer one first; they are cut where they do not meet."""
        room = self._room
        second_size = min(_size(second), max(room - _size(first), room // 2))
        first_size = min(_size(first), room - second_size)
        return first.stop - first_size, first_size, second.begin, second_size


def _size(piece: SentenceSpan) -> int:
    return piece.stop - piece.begin
