"""Data sets of text: what a row holds, decoded, is what the files say; and what is wrong with a file is one line."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.base.errors import EchelonError
from echelon.data import Loader
from echelon.zoo import registry
from echelon.zoo.datasets.glue import TASKS, open_glue
from echelon.zoo.datasets.masked_lm import open_masked
from echelon.zoo.datasets.pairs import open_pairs
from echelon.zoo.datasets.squad import open_squad, window_starts
from echelon.zoo.datasets.text import open_text
from echelon.zoo.datasets.tokens.vocabulary import SPECIAL, read_vocabulary, train_vocabulary
from echelon.zoo.entry import Request
from echelon.zoo.tasks import IGNORED

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"?.,'"]


def request(folder, task="language_model", **values):
    return Request({"dataset_dir": str(folder), "max_seq_length": 32, "dataset_name": "it", "seed": 0, **values}, task)


@pytest.fixture
def vocabulary(tmp_path):
    """Every letter is a token, so that rows can be read."""
    path = tmp_path / "vocabulary" / "vocab.txt"
    path.parent.mkdir()
    path.write_text("\n".join(VOCABULARY) + "\n")
    return {"model_dir": str(path.parent), "vocab_file_name": "vocab.txt"}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    return path


def read(tokens):
    """Text of tokens, words parted by spaces."""
    words = [VOCABULARY[token] for token in tokens]
    return "".join(word[2:] if word.startswith("##") else f" {word}" for word in words).strip()


def everything(data):
    """All rows in the data's own order, as one batch."""
    return next(iter(Loader(data, batch_size=10_000, shuffle=False)))


def shakespeare():
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("ECHELON_TEST_DATA", beside)) / "tinyshakespeare.txt"


needs_shakespeare = pytest.mark.skipif(
    not shakespeare().is_file(), reason="no tinyshakespeare.txt in ../shared/data or $ECHELON_TEST_DATA"
)

# -- language model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
@pytest.mark.parametrize("length", [7, 10, 333])
def test_windows_hold_the_text_exactly(folder, tokenizer, length):
    text = "".join(f"Zeile {number} ä€\n" for number in range(30))
    (folder / "a.txt").write_text(text[:100], encoding="utf-8")
    (folder / "b.txt").write_text(text[100:], encoding="utf-8")
    data = open_text(request(folder, tokenizer=tokenizer, max_seq_length=length))
    units = list(text) if tokenizer == "characters" else list(text.encode())
    known = sorted(set(units)) if tokenizer == "characters" else list(range(256))
    assert data.facts == {"vocab_size": len(known)}
    cut = len(units) - round(len(units) / 10)
    for part, expected in ((data.train, units[:cut]), (data.test, units[cut:])):
        seen, following = part
        counted = following != IGNORED
        assert [known[token] for token in seen[counted].tolist()] == expected[:-1]
        assert [known[token] for token in following[counted].tolist()] == expected[1:]
        assert seen.shape[1] == length
        assert (~counted).sum() < length


@needs_shakespeare
def test_shakespeare_has_65_characters_and_tests_the_last_tenth():
    data = open_text(request(shakespeare(), max_seq_length=256))
    assert data.facts == {"vocab_size": 65}
    text = shakespeare().read_text()
    known = sorted(set(text))
    counted = data.train[1] != IGNORED
    assert "".join(known[token] for token in data.train[0][counted].tolist()) == text[: 1115394 - 111539][:-1]
    assert (data.test[1] != IGNORED).sum() == 111539 - 1


# -- masked words --------------------------------------------------------------------------------------------------


def numbered(documents, lines):
    """Sentence (d, l) is the words 'd l' as letters, so that a row tells which sentences it has."""
    return "\n\n".join(
        "\n".join(f"d{document}e{line}f x y z" for line in range(lines)) for document in range(documents)
    )


@pytest.mark.parametrize(("documents", "lines"), [(40, 60), (300, 2), (1, 200)])
def test_a_second_text_follows_exactly_where_it_is_said_to(folder, vocabulary, documents, lines):
    (folder / "a.txt").write_text(numbered(documents, lines))
    data = open_masked(request(folder, "masked_lm", max_seq_length=64, test_part=0.0, **vocabulary))
    rows, follows = data.train.rows, data.train.follows
    begin, size, second, second_size = rows.spans.T
    assert ((begin + size == second) == (follows == 1))[second_size > 0].all()
    assert (size > 0).all()
    assert (size + second_size <= 61).all()
    assert abs(follows.mean() - 0.5) < 4 * np.sqrt(0.25 / len(follows))
    text = read(rows.tokens.tolist())
    assert text.split() == numbered(documents, lines).split()
    full = (size + second_size == 61).mean()
    assert full > 0.75  # short documents are joined: little is padding


def test_all_text_is_in_a_row_and_the_last_documents_are_tests(folder, vocabulary):
    (folder / "a.txt").write_text(numbered(20, 30))
    data = open_masked(request(folder, "masked_lm", test_part=0.25, **vocabulary))
    for part, documents in ((data.train, range(15)), (data.test, range(15, 20))):
        sentences = read(part.rows.tokens.tolist()).split()[::4]
        assert sentences == [f"d{document}e{line}f" for document in documents for line in range(30)]
        covered = np.zeros(len(part.rows.tokens) + 1, int)
        for begin, size, second, second_size in part.rows.spans.tolist():
            covered[begin : begin + size] += 1
            covered[second : second + second_size] += 1
        assert (covered[:-1] > 0).mean() > 0.9  # only what is cut off too long pieces is missing


def test_masked_batches_have_the_layout_of_the_task(folder, vocabulary):
    (folder / "a.txt").write_text(numbered(20, 30))
    data = open_masked(request(folder, "masked_lm", max_predictions_per_seq=4, **vocabulary))
    assert data.facts == {"vocab_size": len(VOCABULARY)}
    tokens, segments, mask, positions, (labels, follows) = next(iter(Loader(data.train, batch_size=6)))
    assert tokens.shape == segments.shape == mask.shape == (6, 32)
    assert positions.shape == labels.shape == (6, 4)
    assert follows.shape == (6,)
    assert {part.dtype for part in (tokens, segments, mask, positions, labels, follows)} == {torch.int64}


TRAIN = """
import hashlib, sys
from echelon.zoo.datasets.tokens.vocabulary import train_vocabulary
lines = open(sys.argv[1], encoding="utf-8").read().split("\\n")
print(hashlib.sha256("\\n".join(train_vocabulary(lines, 400, True)).encode()).hexdigest())
"""


def test_a_vocabulary_of_our_own_is_the_same_in_every_process(tmp_path):
    words = ["speak", "spoken", "peace", "people", "king", "kingdom", "Rome", "Roman", "älter", "don't"]
    draw = np.random.RandomState(0)
    text = "\n".join(" ".join(draw.choice(words, 8)) + "".join(draw.choice(list("abcxyz"), 6)) for _ in range(300))
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    found = train_vocabulary(text.split("\n"), 400, True)
    there = subprocess.run([sys.executable, "-c", TRAIN, path], capture_output=True, text=True, check=True)
    assert there.stdout.split() == [hashlib.sha256("\n".join(found).encode()).hexdigest()]
    assert found[:5] == list(SPECIAL)
    assert len(found) == len(set(found)) <= 400
    assert {"speak", "people", "rome"} <= set(found)


@needs_shakespeare
def test_shakespeare_with_words_of_its_own():
    data = open_masked(request(shakespeare(), "masked_lm", max_seq_length=128))
    assert data.facts == {"vocab_size": 2000}
    assert 3000 < len(data.train) < 3600
    assert 250 < len(data.test) < 330
    unknown = (data.train.rows.tokens == 1).mean()
    assert unknown < 0.001


# -- questions -----------------------------------------------------------------------------------------------------

CONTEXT = "The abbey of cluny was founded in 910 by william of aquitaine. It stood on the river grosne, near macon."


def squad(questions, context=CONTEXT):
    return json.dumps(
        {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}]}
    )


def asked(question, answer):
    return {"id": "1", "question": question, "answers": [{"text": answer, "answer_start": CONTEXT.index(answer)}]}


ANSWERS = ["910", "william of aquitaine", "The abbey of cluny", "macon", "river grosne"]


def test_every_answer_is_read_back_from_a_window_that_has_it(folder, vocabulary):
    questions = [asked(f"what is number {number}?", answer) for number, answer in enumerate(ANSWERS)]
    questions.append({"id": "2", "question": "who knows?", "answers": [], "is_impossible": True})
    (folder / "train-v2.0.json").write_text(squad(questions))
    (folder / "dev-v2.0.json").write_text(squad(questions[:1]))
    data = open_squad(request(folder, "answer_span", max_seq_length=64, doc_stride=12, **vocabulary))
    tokens, segments, _, target = everything(data.train)
    found = {}
    for row, segment, (first, last) in zip(tokens, segments, target.tolist(), strict=True):
        question = read(row[1 : row.tolist().index(3)].tolist())
        if (first, last) != (0, 0):
            assert segment[first : last + 1].all()
            found.setdefault(question, set()).add(read(row[first : last + 1].tolist()))
    assert found == {f"what is number {number} ?": {answer.lower()} for number, answer in enumerate(ANSWERS)}
    assert sum("who knows" in read(row.tolist()) for row in tokens) > 1  # in windows, all of them without an answer
    assert len(data.test) == sum("number 0" in read(row.tolist()) for row in tokens)


@pytest.mark.parametrize(
    ("length", "room", "stride"), [(100, 30, 12), (100, 30, 128), (30, 30, 5), (31, 30, 5), (0, 9, 3)]
)
def test_windows_leave_nothing_out(length, room, stride):
    starts = window_starts(length, room, stride)
    held = {at for start in starts for at in range(start, min(start + room, length))}
    assert held == set(range(length))
    assert all(start < max(length, 1) for start in starts)


# -- labels --------------------------------------------------------------------------------------------------------

GLUE = {
    "cola": ("src\t1\t\tgood text\nsrc\t0\t*\tbad text\n", ["good text", "bad text"], [1, 0]),
    "sst2": ("sentence\tlabel\ngood text\t1\nbad text\t0\n", ["good text", "bad text"], [1, 0]),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t8\t9\ta b\tc d\n", ["a b [SEP] c d"], [1]),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\ta\tb\t0\nbroken\n", ["a [SEP] b"], [0]),
    "mnli": ("index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n1\tc\td\tentailment\n", None, [2, 1]),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n", ["a [SEP] b"], [1]),
    "qnli": ("index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n", ["a [SEP] b"], [0]),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", ["a [SEP] b"], [1]),
}


@pytest.mark.parametrize("task", TASKS)
def test_glue_tasks_are_read_by_their_own_columns(folder, vocabulary, task):
    table, texts, labels = GLUE[task]
    (folder / "train.tsv").write_text(table)
    (folder / ("dev_matched.tsv" if task == "mnli" else "dev.tsv")).write_text(table)
    data = open_glue(request(folder, "classify_text", glue_task=task, **vocabulary))
    for part in (data.train, data.test):
        tokens, segments, mask, got = everything(part)
        assert got.tolist() == labels
        shown = [read(row[seen == 1].tolist()) for row, seen in zip(tokens, mask, strict=True)]
        if texts:
            assert shown == [f"[CLS] {text} [SEP]" for text in texts]
        assert bool(segments.any()) == (TASKS[task].second is not None)
    assert data.facts["num_classes"] == len(TASKS[task].labels)


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_json_of_any_columns_with_labels_that_are_found_or_given(folder, vocabulary, name):
    rows = [{"words": "a b", "kind": label} for label in (10, 9, 2, 10)]
    text = json.dumps(rows) if name == "train.json" else "\n".join(map(json.dumps, rows))
    (folder / name).write_text(text)
    columns = {"text_column": "words", "label_column": "kind", **vocabulary}
    found = open_glue(request(folder, "classify_text", **columns))
    assert everything(found.train)[3].tolist() == [2, 1, 0, 2]
    assert found.facts["num_classes"] == 3
    assert found.test is None
    given = open_glue(request(folder, "classify_text", labels="10, 2,9,7", **columns))
    assert everything(given.train)[3].tolist() == [0, 2, 1, 0]
    assert given.facts["num_classes"] == 4


def test_texts_that_are_too_long_are_cut_the_longer_first(folder, vocabulary):
    (folder / "train.tsv").write_text(f"text\tother\tlabel\n{'a' * 50}\t{'b' * 9}\t0\n{'a' * 9}\t{'b' * 50}\t1\n")
    data = open_glue(request(folder, "classify_text", second_text_column="other", **vocabulary))
    rows = [read(row.tolist()) for row in everything(data.train)[0]]
    assert rows == [f"[CLS] {'a' * 20} [SEP] {'b' * 9} [SEP]", f"[CLS] {'a' * 9} [SEP] {'b' * 20} [SEP]"]


# -- pairs ---------------------------------------------------------------------------------------------------------


def test_pairs_end_are_moved_by_one_and_padded(folder, vocabulary):
    (folder / "train.tsv").write_text(f"ab c\tx\n{'d' * 40}\t{'e' * 40}\n")
    (folder / "dev.tsv").write_text("a\tb\n")
    data = open_pairs(request(folder, "translate", max_seq_length=10, max_target_length=8, **vocabulary))
    source, mask, before, target = everything(data.train)
    assert [read(row[seen == 1].tolist()) for row, seen in zip(source, mask, strict=True)] == [
        "ab c [SEP]",
        f"{'d' * 9} [SEP]",
    ]
    assert [read(row[row != IGNORED].tolist()) for row in target] == ["x [SEP]", f"{'e' * 7} [SEP]"]
    shifted = torch.where(target == IGNORED, 0, target)[:, :-1]
    assert torch.equal(before, torch.cat([torch.zeros(2, 1, dtype=torch.int64), shifted], 1))
    assert source.shape == (2, 10)
    assert before.shape == (2, 8)
    assert len(data.test[0]) == 1


# -- ranks ---------------------------------------------------------------------------------------------------------


def test_two_ranks_read_together_what_one_reads(folder, vocabulary):
    (folder / "train.tsv").write_text("text\tlabel\n" + "".join(f"a{row} b\t{row % 2}\n" for row in range(20)))
    opened = [open_glue(request(folder, "classify_text", **vocabulary)).train for _ in range(3)]
    alone = Loader(opened[0], batch_size=4)
    pair = [Loader(opened[1 + rank], batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    for whole, left, right in zip(alone, *pair, strict=True):
        assert all(torch.equal(one, torch.cat(parts)) for one, *parts in zip(whole, left, right, strict=True))


# -- mistakes ------------------------------------------------------------------------------------------------------

MISTAKES = [
    (open_text, {}, {}, "is empty; give a folder with text files"),
    (open_text, {"a.csv": "x"}, {}, "matches '*.txt'; there is a.csv: set --file_pattern"),
    (open_text, {"a.txt": "some text"}, {"file_pattern": "b*"}, "matches 'b*'; there is a.txt"),
    (open_text, {"a.txt": ""}, {}, "has 0 tokens of text, which is too little to train on"),
    (open_text, {"a.txt": b"\xff\xfe\x00"}, {}, "a.txt is not UTF-8 text (byte 0)"),
    (open_text, {"a.txt": ""}, {"tokenizer": "wordpiece"}, "cannot be made from an empty text"),
    (open_masked, {"a.txt": "\n\n"}, {}, "has 0 documents, which leaves none to train on"),
    (open_squad, {"dev-v1.1.json": "{}"}, {}, "has no train-*.json or train*.json; there is dev-v1.1.json"),
    (open_squad, {"train-v1.1.json": squad([])[:60]}, {}, "train-v1.1.json breaks off at character"),
    (open_squad, {"train-v1.1.json": '{"x": 1}'}, {}, "is no SQuAD file: it has no 'data'"),
    (open_squad, {"train-v1.1.json": squad([])}, {}, "has no questions in it"),
    (open_glue, {"dev.tsv": "text\tlabel\n"}, {}, "has no train.tsv or train.jsonl or train.json; there is dev.tsv"),
    (open_glue, {"train.tsv": "a\tb\nx\t1\n"}, {}, "has no column 'text' among a, b; set --glue_task"),
    (open_glue, {"train.tsv": "text\tlabel\nx\t1\ny\n"}, {}, "train.tsv, line 3 has 1 of 2 columns"),
    (open_glue, {"train.tsv": "text\tlabel\n"}, {}, "has no rows in it"),
    (
        open_glue,
        {"train.tsv": "text\tlabel\nx\tyes\n"},
        {"labels": "no,maybe"},
        "label 'yes', which is none of no, maybe",
    ),
    (open_glue, {"train.tsv": "text\tlabel\nx\t1\n"}, {"labels": "1,1"}, "--labels 1,1 has one label twice"),
    (open_glue, {"train.jsonl": '{"text": "a", "label": 1}\n{"te'}, {}, "train.jsonl, line 2 is no JSON"),
    (open_pairs, {"a.tsv": "one\ttwo\nthree\n"}, {}, "a.tsv, line 2 has 1 columns; expected two"),
]


@pytest.mark.parametrize(("opening", "files", "values", "line"), MISTAKES)
def test_what_is_wrong_with_the_files_is_one_line(folder, opening, files, values, line):
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EchelonError) as raised:
        opening(request(folder, **values))
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_missing_or_not_given_is_one_line(tmp_path):
    with pytest.raises(EchelonError, match="gone does not exist; give a folder with text files"):
        open_text(request(tmp_path / "gone"))
    with pytest.raises(EchelonError, match="--dataset_name it needs --dataset_dir: a folder with text files"):
        open_text(Request({"dataset_dir": None, "dataset_name": "it"}, "language_model"))


def test_vocabulary_without_signs_or_file_is_refused_in_one_line(folder, tmp_path):
    (folder / "a.txt").write_text("text\n\ntext")
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\na\nb\n")
    with pytest.raises(EchelonError, match=r"vocab.txt has no \[SEP\], \[MASK\]; a WordPiece vocabulary has one word"):
        open_masked(request(folder, "masked_lm", vocab_file_name=str(path)))
    with pytest.raises(EchelonError, match=r"--vocab_file_name no\.txt: no file at no\.txt; give the vocab\.txt"):
        open_masked(request(folder, "masked_lm", vocab_file_name="no.txt"))


def test_capitals_count_where_the_vocabulary_has_them(folder, tmp_path):
    (folder / "a.txt").write_text("Ab\n\n" * 20)
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, "Ab", "ab"]))
    assert read_vocabulary(path) == [*SPECIAL, "Ab", "ab"]
    for lower_case, expected in ((None, 5), (False, 5), (True, 6)):
        data = open_masked(request(folder, "masked_lm", vocab_file_name=str(path), lower_case=lower_case))
        assert set(data.train.rows.tokens.tolist()) == {expected}


def test_the_data_sets_are_in_the_zoo_with_their_tasks():
    tasks = {name: registry.dataset(name).tasks for name in ("text", "masked_lm", "wiki", "squad", "glue", "pairs")}
    assert tasks == {
        "text": ("language_model",),
        "masked_lm": ("masked_lm",),
        "wiki": ("masked_lm",),
        "squad": ("answer_span",),
        "glue": ("classify_text",),
        "pairs": ("translate",),
    }
