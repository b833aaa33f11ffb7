"""Masked words against the rules of the paper, and batches that do not depend on how many ranks there are."""

import numpy as np
import pytest
import torch

from echelon.base.errors import EchelonError
from echelon.data import Loader, Repeated
from echelon.data.seeding import chain, chain_each
from echelon.zoo.datasets.made_up import synthetic_text as made_up
from echelon.zoo.datasets.tokens.masking import mask_words
from echelon.zoo.datasets.tokens.token_rows import SpecialTokens, TokenRows
from echelon.zoo.entry import Request
from echelon.zoo.tasks import IGNORED

SIGNS = SpecialTokens(pad=0, begin=2, end=3, mask=4)
WORDS = np.arange(5, 1005)
ROWS, LENGTH, MOST = 2000, 128, 20


def request(task, **values):
    return Request({"max_seq_length": 32, "vocab_size": 120, "num_classes": 5, "max_target_length": 16, **values}, task)


def random_rows():
    draw = np.random.RandomState(0)
    first, second = draw.randint(1, 60, ROWS), draw.randint(0, 60, ROWS)
    tokens = draw.randint(5, 1005, 20_000).astype(np.int32)
    spans = np.stack([draw.randint(0, 19_000, ROWS), first, draw.randint(0, 19_000, ROWS), second], 1)
    return TokenRows(tokens, spans, LENGTH, SIGNS)


def masked(rows, seed=0):
    made = rows.make(np.arange(ROWS))
    seeds = chain_each(seed, np.arange(ROWS))
    return made, mask_words(made, seeds, most=MOST, mask=SIGNS.mask, others=WORDS)


def test_a_row_is_what_a_plain_loop_makes_of_its_two_texts():
    rows = random_rows()
    made = rows.make(np.arange(ROWS))
    for number, (first, first_size, second, second_size) in enumerate(rows.spans.tolist()):
        expected = [2, *rows.tokens[first : first + first_size].tolist(), 3]
        segments = [0] * len(expected)
        if second_size:
            expected += [*rows.tokens[second : second + second_size].tolist(), 3]
            segments += [1] * (second_size + 1)
        padding = [0] * (LENGTH - len(expected))
        assert made.tokens[number].tolist() == expected + padding
        assert made.segments[number].tolist() == segments + padding
        assert made.mask[number].tolist() == [1] * len(expected) + padding


def test_masking_asks_for_15_percent_of_words_and_no_signs():
    made, got = masked(random_rows())
    asked = got.labels != IGNORED
    words = made.ordinary.sum(1)
    assert asked.sum(1).tolist() == [min(MOST, max(1, int(0.15 * count + 0.5))) for count in words.tolist()]
    assert np.take_along_axis(made.ordinary, got.positions, 1)[asked].all()
    assert (got.positions[~asked] == 0).all()
    for row, counts in zip(got.positions, asked, strict=True):
        assert (np.diff(row[counts]) > 0).all()  # in order, none twice
    assert (np.take_along_axis(made.tokens, got.positions, 1)[asked] == got.labels[asked]).all()


def test_80_10_10_and_nothing_else_is_changed():
    made, got = masked(random_rows())
    asked = got.labels != IGNORED
    shown = np.take_along_axis(got.tokens, got.positions, 1)[asked]
    was, count = got.labels[asked], asked.sum()
    hidden, same = (shown == SIGNS.mask).mean(), (shown == was).mean()
    other = 1 - hidden - same
    for part, expected in ((hidden, 0.8), (same, 0.1 + 0.1 / 1000), (other, 0.1 - 0.1 / 1000)):
        assert abs(part - expected) < 4 * np.sqrt(expected * (1 - expected) / count)
    assert set(shown.tolist()) <= {SIGNS.mask, *WORDS.tolist()}
    untouched = np.ones_like(made.tokens, bool)
    np.put_along_axis(untouched, np.where(asked, got.positions, 0), False, 1)
    assert (got.tokens[untouched] == made.tokens[untouched]).all()
    assert (got.tokens[:, 0] == SIGNS.begin).all()


def test_more_places_than_words_are_filled_up():
    rows = TokenRows(np.arange(5, 15, dtype=np.int32), np.array([[0, 6, 0, 0]]), 8, SIGNS)
    got = mask_words(rows.make(np.array([0])), np.array([1], np.uint64), most=12, mask=4, others=WORDS)
    assert got.labels[0, 0] == 5 + got.positions[0, 0] - 1
    assert got.labels[0, 1:].tolist() == [IGNORED] * 11
    assert got.positions[0, 1:].tolist() == [0] * 11


def test_every_word_is_as_likely_as_another():
    rows = TokenRows(np.arange(5, 105, dtype=np.int32), np.array([[0, 100, 0, 0]] * 4000), 102, SIGNS)
    seeds = chain_each(3, np.arange(4000))
    got = mask_words(rows.make(np.arange(4000)), seeds, most=15, mask=4, others=WORDS)
    times = np.bincount(got.positions.ravel(), minlength=102)[1:101]
    assert abs(times - 600).max() < 5 * np.sqrt(4000 * 0.15 * 0.85)


def test_seeds_of_whole_arrays_are_those_of_single_numbers():
    states, parts = np.array([0, 7, 2**64 - 1], np.uint64), np.array([0, 1, 10**9])
    assert chain_each(5, parts).tolist() == [chain(5, part) for part in parts.tolist()]
    table = chain_each(states[:, None], parts[None])
    assert table.tolist() == [[chain(state, part) for part in parts.tolist()] for state in states.tolist()]


def flat(batch):
    return [part for item in batch for part in (item if isinstance(item, tuple | list) else [item])]


@pytest.mark.parametrize("samples", [40, 45])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Repeated(data, 52)], ids=["plain", "repeated"])
def test_masks_are_equal_for_two_ranks_and_differ_by_epoch(samples, wrap):
    """Two ranks see the masks that one rank sees, and every epoch has other masks."""
    data = wrap(made_up.masked_lm(request("masked_lm", num_sample_per_epoch=samples)).train)
    alone = Loader(data, batch_size=8, seed=3, uneven="join")
    pair = [Loader(data, batch_size=4, rank=rank, world_size=2, seed=3, uneven="join") for rank in (0, 1)]
    seen = []
    for _ in range(2):
        whole = [flat(batch) for batch in alone]
        halves = [[flat(batch) for batch in loader] for loader in pair]
        for one, left, right in zip(whole, *halves, strict=True):
            for column, *parts in zip(one, left, right, strict=True):
                assert torch.equal(column, torch.cat(parts))
        seen.append(torch.cat([batch[3] for batch in whole]))
    assert not torch.equal(*seen)


def test_masked_batches_are_equal_by_workers_and_fit_by_sample():
    """Worker processes give the same batches, and single samples collate to the same shapes."""
    data = made_up.masked_lm(request("masked_lm", num_sample_per_epoch=24)).train
    here, there = (list(Loader(data, batch_size=8, workers=workers)) for workers in (0, 1))
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(*columns) for columns in zip(flat(one), flat(other), strict=True))
    by_sample = next(iter(Loader(data, batch_size=8, collate=torch.utils.data.default_collate)))
    assert [part.shape for part in flat(by_sample)] == [part.shape for part in flat(here[0])]


# -- made-up text --------------------------------------------------------------------------------------------------


def whole(data):
    batch = next(iter(Loader(data, batch_size=512, shuffle=False)))
    return flat(batch)


def test_made_up_second_texts_follow_where_they_are_said_to():
    data = made_up.masked_lm(request("masked_lm", num_sample_per_epoch=512)).train
    made, words = data.rows.make(np.arange(512)), 115 // 4
    topics = np.where(made.ordinary, (made.tokens - 5) // words, -1)
    for row, segments, follows in zip(topics, made.segments, data.follows, strict=True):
        first, second = ({*row[(segments == part) & (row >= 0)].tolist()} for part in (0, 1))
        assert len(first) == len(second) == 1
        assert (first == second) == bool(follows)
    assert 0.4 < data.follows.mean() < 0.6


def test_made_up_classes_are_told_by_two_words():
    tokens, _, mask, labels = whole(made_up.classify_text(request("classify_text", num_sample_per_epoch=512)).train)
    signal = 120 - 6  # three and three words
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert {word for word in row if word >= signal} == {signal + label // 3, signal + 3 + label % 3}
    assert mask.all()
    assert set(labels.tolist()) == set(range(5))


def test_made_up_answers_lie_between_two_words():
    tokens, segments, _, target = whole(made_up.answer_span(request("answer_span", num_sample_per_epoch=512)).train)
    assert (tokens.gather(1, target) == torch.tensor([118, 119])).all()
    assert ((tokens == 118) | (tokens == 119)).sum(1).tolist() == [2] * 512
    assert segments.gather(1, target).all()


def test_made_up_words_follow_one_rule():
    for part in ("train", "test"):
        tokens, following = whole(getattr(made_up.language_model(request("language_model")), part))
        assert torch.equal(tokens[:, 1:], following[:, :-1])
        rule = {}
        for word in range(120):
            after = following[tokens == word]
            rule[word] = int(after.mode().values)
        right = torch.tensor([rule[word] for word in tokens.flatten().tolist()]) == following.flatten()
        assert 0.88 < right.float().mean() < 0.93
        assert len(set(rule.values())) == 120


def test_made_up_translations_stand_for_their_source():
    source, mask, before, target = whole(made_up.translate(request("translate", num_sample_per_epoch=256)).train)
    assert source.shape == mask.shape == (256, 32)
    assert before.shape == target.shape == (256, 16)
    words = 115 // 2
    for row, seen, moved, wanted in zip(source, mask, before, target, strict=True):
        text = row[seen == 1].tolist()
        assert text[-1] == 1
        assert wanted[wanted != IGNORED].tolist() == [word + words for word in text[:-1]] + [1]
        assert moved.tolist()[: len(text)] == [0, *wanted.tolist()[: len(text) - 1]]


def test_made_up_text_is_decided_by_the_seed():
    one, again, other = (made_up.language_model(request("language_model", seed=seed)).train for seed in (0, 0, 1))
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"max_seq_length": 4}, "--max_seq_length 4 leaves no room for text; give 8 or more"),
        ({"max_predictions_per_seq": 0}, "--max_predictions_per_seq 0: a row needs one masked word at least"),
        ({"vocab_size": 9}, "--vocab_size 9 is too small for made-up text; give 13 or more"),
    ],
)
def test_sizes_that_leave_no_room_are_one_line(values, line):
    with pytest.raises(EchelonError) as raised:
        made_up.masked_lm(request("masked_lm", **values))
    assert str(raised.value) == line
