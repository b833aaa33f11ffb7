"""Make pairs of texts for BERT's next-sentence prediction."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from echelon.data.seeding import python_stream
from echelon.zoo.datasets.tokens.token_rows import Numbers
from echelon.zoo.datasets.tokens.vocabulary import TokenizedTexts


class SentenceSpan(NamedTuple):
    """A sentence, or a part of a long one, as a range of tokens in the whole text."""

    begin: int
    stop: int


class SentencePairs(NamedTuple):
    """Pairs of texts.

    spans:   [n, 4], in the format of ``TokenRows``
    follows: [n], 1 if the second text follows the first
    """

    spans: Numbers
    follows: Numbers


def documents_of(text: str) -> list[list[str]]:
    """Split a text into documents, which blank lines separate; a document is a list of lines."""
    documents: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    return [document for document in documents if document]


def pieces_of(sentences: TokenizedTexts, documents: list[int], room: int) -> list[list[SentenceSpan]]:
    """Return the pieces of each chapter.

    documents: number of sentences of each document
    room:      number of tokens of a row

    A piece is at most half a row, so a full row always has two. A chapter joins documents until they fill eight rows;
    otherwise most rows of speeches and messages would be padding.
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
    """Fills rows with the pieces of chapters; half of the rows have a random second text."""

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
        """Return the row that begins at this piece, 1 if its second text follows (else 0), and the next row's piece."""
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
        """Return the index after the last piece that is needed to fill ``room``, beginning at ``at``."""
        stop = at + 1
        while stop < len(chapter) and chapter[stop - 1].stop - chapter[at].begin < room:
            stop += 1
        return stop

    def _elsewhere(self, number: int, at: int, stop: int, room: int) -> SentenceSpan | None:
        """Return random text of another chapter, or None after 20 failed draws.

        If there is only one chapter, the text comes from another part of it.
        """
        for _ in range(20):
            other, begin = self._all[self._draw.randrange(len(self._all))]
            away = other != number or (len(self._chapters) == 1 and not at <= begin <= stop)
            if away:
                chapter = self._chapters[other]
                return SentenceSpan(chapter[begin].begin, chapter[self._filled(chapter, begin, room) - 1].stop)
        return None

    def _trimmed(self, first: SentenceSpan, second: SentenceSpan) -> tuple[int, int, int, int]:
        """Return the spans of both texts, truncated to a row, the longer one first; the outer ends are cut."""
        room = self._room
        second_size = min(_size(second), max(room - _size(first), room // 2))
        first_size = min(_size(first), room - second_size)
        return first.stop - first_size, first_size, second.begin, second_size


def _size(piece: SentenceSpan) -> int:
    return piece.stop - piece.begin
