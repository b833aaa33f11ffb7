"""Token files: what is stored is what the tokenizer gives, and rows are those of the whole corpus, on any ranks."""

import gzip
import json
import os
import pickle
import re
import struct
import time
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from harness import context, run
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn

import echelon
from echelon.base.errors import EchelonError
from echelon.data import Loader, TokenFiles, tokenize_corpus
from echelon.data.tokens import TokenizeOptions
from echelon.data.tokens import corpus as corpus_reading
from echelon.nn import Packed
from echelon.zoo.datasets.token_corpus import open_tokens
from echelon.zoo.entry import Request

END = "</s>"
LETTERS = 'abcdefghijklmnopqrstuvwxyzäé{}": \n\r.'


def save_tokenizer(path, extra=0):
    """Every character is a token; ``extra`` more words make the vocabulary larger."""
    words = [END, "<unk>", *LETTERS, *(f"word{number}" for number in range(extra))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.save(str(path))
    return made


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(corpus_reading, "LEAST_PART", 37)
    monkeypatch.setattr(corpus_reading, "MOST_PART", 37)


def texts(count=23):
    return [f"text {'abcdefg'[n % 7] * (1 + n * 5 % 31)}é." for n in range(count)]


def write(folder, kind):
    """Write the texts as one kind of corpus; return the options and the documents that it holds."""
    given, path = texts(), folder / f"corpus.{'jsonl' if 'jsonl' in kind else 'txt'}"
    if "jsonl" in kind:
        data = "".join(json.dumps({"id": n, "body": text}) + "\n" for n, text in enumerate(given)) + "\n"
        result = TokenizeOptions(field="body", procs=2), given
    elif "blank" in kind:
        data = "\n" + "\n\n \n".join(f"{text}\nmore" for text in given)
        result = (
            TokenizeOptions(documents="blank", procs=2),
            [f"{t}\nmore\n" for t in given[:-1]] + [given[-1] + "\nmore"],
        )
    elif "line" in kind:
        data = "\n".join([*given[:5], "", *given[5:]])
        result = TokenizeOptions(documents="line", procs=2), given
    else:
        data = "\n".join(given)
        result = TokenizeOptions(procs=2), [data]
    if "gzip" in kind:
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(data.encode()))
    else:
        path.write_bytes(data.encode())
    return result


def stored(files):
    """All tokens, and where documents begin."""
    return files.store.read(0, len(files.store)), files.store.documents


def expected(tokenizer, documents):
    ids = [[*tokenizer.encode(text).ids, 0] for text in documents]
    return np.concatenate(ids), np.cumsum([0, *map(len, ids)])


@pytest.mark.parametrize("kind", ["jsonl", "jsonl gzip", "blank", "line", "line gzip", "file"])
def test_tokens_are_those_of_each_document(tmp_path, tokenizer, small_parts, monkeypatch, kind):
    monkeypatch.setattr(corpus_reading, "PIECE_BYTES", 50)
    folder = tmp_path / "corpus"
    folder.mkdir()
    options, documents = write(folder, kind)
    head = tokenize_corpus([folder], tmp_path / "tokenizer.json", tmp_path / "out", options)
    files = TokenFiles(tmp_path / "out", 5)
    tokens, starts = stored(files)
    wanted, begins = expected(tokenizer, documents)
    assert tokens.tolist() == wanted.tolist()
    assert starts.tolist() == begins.tolist()
    assert (head.tokens, head.documents, head.end) == (len(wanted), len(documents), 0)
    assert len(head.shards) > 10 or kind == "file" or "gzip" in kind
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "tokenizer.json"]
    files.check()


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    made = save_tokenizer(tmp_path / "tokenizer.json", extra=70_000)
    (tmp_path / "a.txt").write_text("abc")
    tokenize_corpus(
        [tmp_path / "a.txt"], tmp_path / "tokenizer.json", tmp_path / "out", TokenizeOptions(end="word69999")
    )
    assert (tmp_path / "out" / "00000.tokens").stat().st_size == 16
    assert stored(TokenFiles(tmp_path / "out", 2))[0].tolist() == [*made.encode("abc").ids, made.get_vocab_size() - 1]


def killed_after(shards, folder):
    """Tokenize until some shards are complete, and die as by kill -9; a part of the next shard is left."""
    seen = []

    def say(line):
        seen.append(line)
        if len(seen) == shards:
            (folder / "out.partial" / "00009.tokens").write_bytes(b"torn")
            os._exit(9)

    corpus_reading.LEAST_PART = corpus_reading.MOST_PART = 37
    tokenize_corpus([folder / "corpus.txt"], folder / "tokenizer.json", folder / "out", LINES, say)


LINES = TokenizeOptions(documents="line", procs=1)


def test_a_killed_call_is_continued(tmp_path, tokenizer, small_parts):
    _, documents = write(tmp_path, "line")
    process = context.Process(target=killed_after, args=(3, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not (tmp_path / "out").exists()
    before = {name: (tmp_path / "out.partial" / name).stat().st_mtime_ns for name in ("00000.tokens", "00002.tokens")}
    with pytest.raises(EchelonError, match="holds no token files"):
        TokenFiles(tmp_path / "out.partial", 5)
    said = []
    tokenize_corpus([tmp_path / "corpus.txt"], tmp_path / "tokenizer.json", tmp_path / "out", LINES, said.append)
    resumed = re.match(r"tokenize: resumed: (\d+) of (\d+) ", said[0])
    assert resumed is not None
    assert 3 <= int(resumed[1]) < int(resumed[2])  # other processes write on for a moment
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before}
    assert stored(TokenFiles(tmp_path / "out", 5))[0].tolist() == expected(tokenizer, documents)[0].tolist()


def test_another_input_begins_anew(tmp_path, tokenizer, small_parts):
    write(tmp_path, "line")
    process = context.Process(target=killed_after, args=(3, tmp_path))
    process.start()
    process.join()
    (tmp_path / "corpus.txt").write_text("other\ntexts\n")
    said = []
    tokenize_corpus([tmp_path / "corpus.txt"], tmp_path / "tokenizer.json", tmp_path / "out", LINES, said.append)
    assert not any("resumed" in line for line in said)
    assert stored(TokenFiles(tmp_path / "out", 5))[0].tolist() == expected(tokenizer, ["other", "texts"])[0].tolist()
    assert len(list((tmp_path / "out").iterdir())) == 4  # one shard, its documents, head and tokenizer


@pytest.fixture
def out(tmp_path, tokenizer, small_parts):
    write(tmp_path, "line")
    tokenize_corpus([tmp_path / "corpus.txt"], tmp_path / "tokenizer.json", tmp_path / "out", LINES)
    return tmp_path / "out"


@pytest.mark.parametrize("length", [1, 7, 64])
def test_rows_are_the_corpus_in_order(out, length):
    files = TokenFiles(out, length)
    tokens, _ = stored(files)
    rows = (len(tokens) - 1) // length
    assert len(files) == rows
    for inputs, targets in (files[range(rows)[-1]], files[0]):
        assert inputs.dtype == targets.dtype == torch.int64
    inputs, targets = pickle.loads(pickle.dumps(files)).batch(np.arange(rows)[::-1], np.zeros(rows, np.uint64))
    assert inputs.numpy()[::-1].ravel().tolist() == tokens[: rows * length].tolist()
    assert targets.numpy()[::-1].ravel().tolist() == tokens[1 : rows * length + 1].tolist()
    first, second = TokenFiles(out, length, part=(0, 0.8)), TokenFiles(out, length, part=(0.8, 1))
    assert len(first) + len(second) == rows
    assert torch.equal(second[0][0], files[len(first)][0])


@pytest.mark.parametrize("length", [7, 64])
def test_named_rows_have_positions_of_documents(out, length):
    rows, packed = TokenFiles(out, length, documents=True, named=True), TokenFiles(out, length, documents=True)
    at = np.array([2, 0, len(rows) - 1])
    fields, (inputs, _) = (files.batch(at, np.zeros(3, np.uint64)) for files in (rows, packed))
    assert {name: tuple(field.shape) for name, field in fields.items()} == dict.fromkeys(fields, (3, length))
    assert torch.equal(fields["input_ids"].flatten(), inputs.values)
    assert torch.equal(fields["position_ids"].flatten(), inputs.places())
    firsts = fields["position_ids"] == 0
    assert torch.equal(fields["labels"], fields["input_ids"].where(~firsts, -100))
    assert all(torch.equal(rows[2][name], field[0]) for name, field in fields.items())
    plain = TokenFiles(out, length, named=True)[1]
    assert plain.keys() == {"input_ids", "labels"}
    assert torch.equal(plain["input_ids"], plain["labels"])
    assert rows.has_positions
    assert not packed.has_positions


@pytest.mark.parametrize("length", [7, 64])
def test_packed_rows_are_cut_where_documents_end(out, length):
    files, plain = TokenFiles(out, length, documents=True), TokenFiles(out, length)
    starts = set(files.store.documents.tolist())
    rows = np.array([2, 0, len(files) - 1])
    inputs, targets = files.batch(rows, np.zeros(3, np.uint64))
    flat, following = (part.flatten().tolist() for part in plain.batch(rows, np.zeros(3, np.uint64)))
    places = [row * length + at for row in rows.tolist() for at in range(length)]
    begins = [at for at, place in enumerate(places) if place in starts or place % length == 0]
    assert inputs.values.tolist() == flat
    assert targets.values.tolist() == [
        -100 if place + 1 in starts else token for place, token in zip(places, following, strict=True)
    ]
    assert inputs.offsets.tolist()[: len(begins)] == targets.offsets.tolist()[: len(begins)] == begins
    assert int(inputs.lengths.sum()) == 3 * length


def test_the_order_and_the_resume_are_those_of_one_rank(out):
    alone = [inputs for inputs, _ in Loader(TokenFiles(out, 7), batch_size=6, uneven="drop")]
    for world in (2, 3):
        loaders = [
            Loader(TokenFiles(out, 7), batch_size=6 // world, rank=rank, world_size=world, uneven="drop")
            for rank in range(world)
        ]
        both = [torch.cat([inputs for inputs, _ in step]) for step in zip(*loaders, strict=True)]
        assert all(torch.equal(one, other) for one, other in zip(alone, both, strict=True))
    stopped = Loader(TokenFiles(out, 7), batch_size=6, uneven="drop", workers=1)
    for _ in range(2):  # twice in a row
        next(iter(stopped))
        state, stopped = stopped.state_dict(), Loader(TokenFiles(out, 7), batch_size=6, uneven="drop")
        stopped.load_state_dict(state)
    rest = [inputs for inputs, _ in stopped]
    assert all(torch.equal(one, other) for one, other in zip(alone[2:], rest, strict=True))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens: Packed):
        return self.head(self.words(tokens.values) + 0.1 * tokens.places()[:, None].float())


def trained(out):
    echelon.init(device="cpu", seed=0)
    model = Bag()
    engine = echelon.distribute(
        model,
        loss=lambda logits, targets: F.cross_entropy(logits, targets.values),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        log=echelon.Log(lines=False),
    )
    loader = engine.loader(TokenFiles(out, 16, documents=True, vocab_size=64), global_batch=6, uneven="join")
    losses = [float(engine.step(*batch)) for _ in loader.epochs(2) for batch in loader]
    weights = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return losses, weights


def test_packed_rows_on_two_ranks_train_like_one(out):
    losses, weights = run(trained, out, ranks=1)[0]
    assert len(losses) > 4
    for mine, its in run(trained, out, ranks=2):
        assert mine == pytest.approx(losses, rel=1e-5)
        for one, other in zip(its, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_corpus_of_holes_opens_at_once(tmp_path):
    """Files of 2 * 10 ** 9 tokens without blocks on the disk; nothing may read or copy them, or list their rows."""
    out, count = tmp_path / "out", 10**9
    out.mkdir()
    for name in ("a", "b"):
        (out / f"{name}.tokens").touch()
        os.truncate(out / f"{name}.tokens", 2 * count)
        (out / f"{name}.documents").write_bytes(bytes(8))
    shards = [{"name": name, "tokens": count, "documents": 1, "crc32": 0} for name in ("a", "b")]
    head = {"format": "echelon tokens", "version": 1, "vocabulary": 9, "end": None, "tokenizer": "", "shards": shards}
    (out / "tokens.json").write_text(json.dumps(head))
    files = TokenFiles(out, 8)
    loader = Loader(files, batch_size=4)
    loader.load_state_dict({**loader.state_dict(), "samples": 4 * 10**7, "position": 10**7})
    before = time.process_time()
    inputs, _ = next(iter(loader))
    assert inputs.shape == (4, 8)
    assert time.process_time() - before < 2  # an order in memory takes 20 s
    assert loader.describe(loader.latest).count(",") >= 3


def megatron(folder, documents, code=8, dtype="<u2"):
    """Write documents, lists of sequences, as Megatron-LM does."""
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    ends = np.cumsum([0, *map(len, documents)])
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sizes), len(ends))
    pointers = np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize
    index += np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes() + ends.astype("<i8").tobytes()
    (folder / "m.idx").write_bytes(index)
    (folder / "m.bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
@pytest.mark.parametrize("name", ["m", "m.bin", "m.idx"])
def test_files_of_megatron_are_read(tmp_path, code, dtype, name):
    megatron(tmp_path, [[[5, 6, 7], [8]], [[9, 10]], [[11, 12, 13, 14]]], code, dtype)
    files = TokenFiles(tmp_path / name, 3, documents=True)
    tokens, starts = stored(files)
    assert tokens.tolist() == list(range(5, 15))
    assert starts.tolist() == [0, 4, 6, 10]
    assert pickle.loads(pickle.dumps(files))[1][1].values.tolist() == [-100, 10, -100]


def cut(path):
    os.truncate(path, path.stat().st_size - 2)


MISTAKES = {
    "cut short": (lambda out: cut(out / "00003.tokens"), {}, "its head says"),
    "no shard": (lambda out: (out / "00003.tokens").unlink(), {}, "is missing; copy the whole directory again"),
    "no offsets": (lambda out: cut(out / "00003.documents"), {}, "its head says"),
    "no head": (lambda out: (out / "tokens.json").unlink(), {}, "write them with 'echelon tokenize CORPUS"),
    "torn head": (lambda out: cut(out / "tokens.json"), {}, "cannot be read"),
    "other head": (lambda out: (out / "tokens.json").write_text("{}"), {}, "is no head of token files"),
    "small model": (lambda out: None, {"vocab_size": 9}, "and the model knows 9; tokenize with the model's tokenizer"),
    "long rows": (lambda out: None, {"length": 10**6}, "which make no row of 1000000"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_reading_is_one_line(out, name):
    damage, options, line = MISTAKES[name]
    damage(out)
    with pytest.raises(EchelonError) as caught:
        TokenFiles(out, **{"length": 5} | options)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_byte_is_found_by_check(out):
    with (out / "00004.tokens").open("r+b") as file:
        file.write(b"\x07")
    with pytest.raises(EchelonError, match="00004: the files are damaged"):
        TokenFiles(out, 5).check()


WRITING = {
    "no field": ("a.jsonl", b'{"body": "x"}\n', {}, "has no text 'text'; it has body: name it with --field"),
    "no json": ("a.jsonl", b'{"text": "x"}\n{"te\n', {}, "the line at byte 14 is no JSON"),
    "other bytes": ("a.txt", b"abc\xff", {}, "is not UTF-8 text (byte 3); convert it"),
    "torn gzip": ("a.txt.gz", gzip.compress(b"abc" * 99)[:-9], {}, "is a damaged gzip file"),
    "no end": ("a.txt", b"abc", {"end": "<bye>"}, "--end <bye> is no token of this tokenizer"),
    "other suffix": ("a.pdf", b"abc", {}, "is none of .txt, .jsonl"),
    "nothing": ("a.txt", b"", {}, "has no text in 1 files"),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_mistake_in_writing_is_one_line(tmp_path, tokenizer, name):
    file, data, options, line = WRITING[name]
    (tmp_path / file).write_bytes(data)
    given = TokenizeOptions(procs=1, documents="line" if name == "no end" else "file", **options)
    with pytest.raises(EchelonError) as caught:
        tokenize_corpus([tmp_path / file], tmp_path / "tokenizer.json", tmp_path / "out", given)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_end_comes_from_the_tokenizers_directory(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_tokenizer(folder / "tokenizer.json")
    (tmp_path / "a.txt").write_text("abc")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "."}}))
    head = tokenize_corpus([tmp_path / "a.txt"], folder, tmp_path / "out", TokenizeOptions(procs=1))
    assert head.end == tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(".")
    without = tokenize_corpus([tmp_path / "a.txt"], folder, tmp_path / "none", TokenizeOptions(procs=1, end=""))
    assert (without.end, without.tokens) == (None, 3)


@pytest.mark.parametrize("pack", [False, True])
def test_the_zoo_holds_out_the_end_of_the_corpus(out, pack):
    values = {"dataset_dir": str(out), "max_seq_length": 16, "dataset_name": "tokens", "test_part": 0.2, "pack": pack}
    data = open_tokens(Request(values, "language_model"))
    assert data.facts == {"vocab_size": len(LETTERS) + 2}
    tokens, starts = stored(TokenFiles(out, 16))
    found = [
        [inputs.tolist() for inputs, _ in map(part.__getitem__, range(len(part)))] for part in (data.train, data.test)
    ]
    if pack:
        documents = [tokens[low : high - 1] for low, high in pairwise(starts)]
        wanted = [
            [list(d[at : at + 16]) for d in part for at in range(0, len(d), 16)]
            for part in (documents[:-5], documents[-5:])
        ]
        assert found == wanted
    else:
        assert [token for part in found for row in part for token in row] == tokens[: len(tokens) // 16 * 16].tolist()
        assert len(found[1]) == round(0.2 * (len(tokens) // 16))
