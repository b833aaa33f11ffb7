"""Corpora mixed by weight: the order of a plain reference, on any ranks, resumed anywhere, counted in the record."""

import functools
import json
import tracemalloc
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn

import echelon
from echelon.base.errors import EchelonError
from echelon.data import Loader, Mixture, TokenFiles
from echelon.data.mixed_order import BLOCK, UNIT, whole_weights
from echelon.data.seeding import SeedPurpose, mix, numpy_stream
from echelon.nn import Packed
from echelon.zoo.datasets.token_corpus import open_tokens
from echelon.zoo.entry import Request
from echelon.zoo.train.input import train_part

SIZES = {"web": 1900, "code": 260, "books": 41}
WEIGHTS = [5.0, 2.5, 0.125]


def corpora(sizes=SIZES):
    return {
        name: [1_000_000 * number + row for row in range(size)] for number, (name, size) in enumerate(sizes.items())
    }


@functools.cache
def permuted(key, number, size):
    return numpy_stream(key, SeedPurpose.ORDER, number).permutation(size).tolist()


def reference(sizes, weights, size, seed, epoch, shuffle):
    """Merge all samples of all corpora by their times, cut at whole blocks of time, shuffle each block."""
    whole = whole_weights(weights)
    places = [
        (Fraction((number + 1) * UNIT, weight), corpus) for corpus, weight in enumerate(whole) for number in range(size)
    ]
    merged = sorted(places)[:size]
    given = [epoch * sum(corpus == each for _, corpus in merged) for each in range(len(sizes))]
    result = []
    for block in range(-(-size // BLOCK) + 1):
        inside = [corpus for time, corpus in merged if block * BLOCK < time <= (block + 1) * BLOCK]
        if shuffle:
            order = numpy_stream(seed, SeedPurpose.MIXTURE, epoch, block).permutation(len(inside))
            inside = [inside[at] for at in order]
        for corpus in inside:
            number, row = divmod(given[corpus], sizes[corpus])
            if shuffle:
                key = mix(seed, SeedPurpose.MIXTURE, corpus)
                row = permuted(key, number, sizes[corpus])[row]
            result.append(1_000_000 * corpus + int(row))
            given[corpus] += 1
    return result


def flat(lists):
    return [*chain.from_iterable(lists)]


def read(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("exhausted", "samples"), [("stop", None), ("repeat", None), ("repeat", 2500)])
def test_the_order_is_that_of_a_plain_merge(shuffle, exhausted, samples):
    mixture = Mixture(corpora(), WEIGHTS, exhausted=exhausted, samples=samples)
    loader = Loader(mixture, batch_size=50, seed=7, shuffle=shuffle, uneven="join")
    for epoch in range(3):
        found = flat(read(loader))
        assert found == reference(list(SIZES.values()), WEIGHTS, len(mixture), 7, epoch, shuffle)
        assert sum(loader.corpus_samples.values()) == (epoch + 1) * len(mixture)
        if not shuffle and epoch == 0:
            assert [mixture[at] for at in (0, 1, -1)] == [found[0], found[1], found[-1]]


def test_epochs_end_where_exhausted_says():
    stopped, repeated = (Mixture(corpora(), WEIGHTS, exhausted=way) for way in ("stop", "repeat"))
    counts = lambda mixture: mixture.epoch_order(seed=0, epoch=0, shuffle=True).counts(len(mixture))  # noqa: E731
    assert counts(stopped)[1] == SIZES["code"]
    assert all(count <= size for count, size in zip(counts(stopped), SIZES.values(), strict=True))
    assert counts(repeated)[0] == SIZES["web"]
    assert all(count >= size for count, size in zip(counts(repeated), SIZES.values(), strict=True))
    assert "ends where code is used up" in str(stopped)
    assert "reads code 3.6 times" in str(repeated)
    whole = Mixture(corpora())
    assert sorted(flat(read(Loader(whole, batch_size=10, uneven="join")))) == sorted(flat(corpora().values()))


def test_no_sample_comes_twice_before_all_have_come():
    loader = Loader(Mixture(corpora(), WEIGHTS), batch_size=20, uneven="join")
    seen = flat(flat(read(loader)) for _ in range(5))
    for number, size in enumerate(SIZES.values()):
        rows = [each for each in seen if each // 1_000_000 == number]
        for begin in range(0, len(rows) - size + 1, size):
            assert len(set(rows[begin : begin + size])) == size


def test_any_ranks_share_the_order_and_resume_in_it():
    options = {"uneven": "join", "seed": 3}
    alone = read(Loader(Mixture(corpora(), WEIGHTS), batch_size=12, **options))
    loaders = [Loader(Mixture(corpora(), WEIGHTS), batch_size=6, rank=r, world_size=2, **options) for r in range(2)]
    iterators = [iter(loader) for loader in loaders]
    begun = [flat(next(iterator).tolist() for iterator in iterators) for _ in range(61)]
    assert len(alone) - 4 > 61
    assert begun == alone[:61]
    state = json.loads(json.dumps(loaders[0].state_dict()))
    for ranks in (1, 3, 4):
        again = [
            Loader(Mixture(corpora(), WEIGHTS), batch_size=12 // ranks, rank=r, world_size=ranks, **options)
            for r in range(ranks)
        ]
        for loader in again:
            loader.load_state_dict(state)
        assert again[0].corpus_samples == loaders[1].corpus_samples
        steps = [flat(share.tolist() for share in step) for step in zip(*again, strict=True)]
        assert steps[:-1] == alone[61:-1]


def test_a_huge_mixture_takes_no_memory():
    names = [f"corpus {number}" for number in range(40)]
    mixture = Mixture({name: range(10**9 + 7) for name in names}, [1 + number for number in range(40)])
    assert len(mixture) > 10**10
    loader = Loader(mixture, batch_size=64)
    state = loader.state_dict()
    tracemalloc.start()
    loader.load_state_dict({**state, "samples": 64 * 10**8, "position": 10**8})
    assert len(next(iter(loader))) == 64
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()
    counts, total = loader.corpus_samples, 64 * (10**8 + 1)
    assert sum(counts.values()) == total
    for number, name in enumerate(names):
        assert counts[name] == pytest.approx(total * (1 + number) / 820, abs=BLOCK)


class Squares(list):
    """Samples that are also read as whole batches."""

    def batch(self, indices, seeds):
        return {"x": torch.tensor([self[at] for at in indices]), "seed": torch.from_numpy(seeds.astype(np.int64))}


def test_parts_that_make_batches_are_read_so():
    made = {name: Squares(rows) for name, rows in corpora().items()}
    plain = read(Loader(Mixture(corpora(), WEIGHTS), batch_size=16))
    batched = list(Loader(Mixture(made, WEIGHTS), batch_size=16))
    assert [batch["x"].tolist() for batch in batched] == plain
    columns = Mixture({name: (torch.tensor(rows),) for name, rows in corpora().items()}, WEIGHTS)
    assert [rows.tolist() for (rows,) in Loader(columns, batch_size=16)] == plain
    mixed = Mixture([Squares(range(9)), list(range(9))])
    assert sorted(flat(read(Loader(mixed, batch_size=6)))) == sorted([*range(9), *range(9)])


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Mixture(corpora(), [1, 2]), "weights= has 2 numbers for 3 corpora"),
        (lambda: Mixture(corpora(), [1, 2, 0]), "the weight of books is 0"),
        (lambda: Mixture(corpora(), {"web": 1, "cod": 2, "books": 1}), "'cod', which is no corpus of this mixture"),
        (lambda: Mixture(corpora(), {"web": 1, "code": 2}), "weights= has none for 'books'"),
        (lambda: Mixture({**corpora(), "none": []}), "none is empty"),
        (lambda: Mixture({}), "no corpora"),
        (lambda: Mixture([iter([1])]), "0 is a list_iterator, which has no index; a stream"),
        (lambda: Mixture(["corpus.tokens"]), "which has no index; give a data set"),
        (lambda: Mixture(corpora(), WEIGHTS, samples=5000), "code is used up after 795 samples of the mixture"),
        (lambda: Mixture(corpora(), exhausted="wrap"), "exhausted='wrap': expected 'stop' or 'repeat'"),
        (lambda: Loader(Mixture(corpora()), batch_size=4, sampler=range(9)), "both choose the order"),
    ],
)
def test_a_mistake_is_one_line(make, line):
    with pytest.raises(EchelonError) as caught:
        make()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_weights_in_the_middle_of_an_epoch_are_refused():
    loader = Loader(Mixture(corpora(), WEIGHTS, samples=400), batch_size=4)
    next(iter(loader))
    again = Loader(Mixture(corpora(), [1, 1, 1], samples=100), batch_size=4, changed_data="accept")
    with pytest.raises(EchelonError, match=r"in the middle of epoch 0|the data has changed"):
        Loader(Mixture(corpora(), [4, 1, 0.5], samples=400), batch_size=4).load_state_dict(loader.state_dict())
    again.load_state_dict({**loader.state_dict(), "samples": 0, "position": 0})
    assert len(read(again)) == 25


@pytest.fixture
def folder(tmp_path):
    """Two corpora of tokens, in the format of Megatron-LM and in ours."""
    draw = np.random.default_rng(5)
    for name, documents in (("web", 60), ("code", 25)):
        sizes = draw.integers(3, 40, documents)
        data, starts = draw.integers(64, size=sizes.sum()).astype("<u2"), np.cumsum([0, *sizes])[:-1].astype("<i8")
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tokens").write_bytes(data.tobytes())
        (tmp_path / name / "a.documents").write_bytes(starts.tobytes())
        shard = {"name": "a", "tokens": len(data), "documents": documents, "crc32": 0}
        head = {"format": "echelon tokens", "version": 1, "vocabulary": 64, "end": None, "tokenizer": ""}
        (tmp_path / name / "tokens.json").write_text(json.dumps({**head, "shards": [shard]}))
    return tmp_path


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens):
        if isinstance(tokens, Packed):
            return self.head(self.words(tokens.values) + 0.1 * tokens.places()[:, None].float())
        return self.head(self.words(tokens)).flatten(0, 1)


def loss(logits, targets):
    return F.cross_entropy(logits, targets.values if isinstance(targets, Packed) else targets.flatten())


def trained(folder, log, documents):
    echelon.init(device="cpu", seed=0)
    model = Bag()
    engine = echelon.distribute(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        log=echelon.Log(lines=False, every=1, dir=str(log)),
    )
    rows = [TokenFiles(folder / name, 16, documents=documents) for name in ("web", "code")]
    loader = engine.loader(Mixture(rows, [3, 1], exhausted="repeat"), global_batch=12, uneven="join")
    losses = [float(engine.step(*batch)) for _ in loader.epochs(2) for batch in loader]
    weights = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return losses, weights


@pytest.mark.parametrize("documents", [False, True])
def test_token_files_train_alike_on_any_ranks(folder, documents):
    losses, weights = run(trained, folder, folder / "log1", documents, ranks=1)[0]
    assert len(losses) > 8
    for ranks in (2, 4):
        for mine, its in run(trained, folder, folder / f"log{ranks}", documents, ranks=ranks):
            assert mine == pytest.approx(losses, rel=1e-5)
            for one, other in zip(its, weights, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    records = [
        [json.loads(line) for line in (folder / f"log{ranks}" / "metrics.jsonl").read_text().splitlines()]
        for ranks in (1, 2, 4)
    ]
    counts = [[record["corpora"] for record in each if "loss" in record] for each in records]
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0][0].values()) == 12
    assert counts[0][-1]["web"] == pytest.approx(3 * counts[0][-1]["code"], abs=8)


@pytest.mark.parametrize("pack", [False, True])
def test_the_zoo_mixes_corpora_of_a_folder(folder, pack):
    values = {
        "dataset_dir": str(folder),
        "max_seq_length": 16,
        "test_part": 0.2,
        "pack": pack,
        "mixture": "web=3,code=1",
    }
    data = open_tokens(Request(values, "language_model"))
    assert data.facts == {"vocab_size": 64}
    assert data.train.names == ["web", "code"]
    assert data.train.weights == [0.75, 0.25]
    assert 0 < len(data.test) < 0.5 * len(data.train)
    batches = list(Loader(data.train, batch_size=8))
    assert all(type(inputs) is (Packed if pack else torch.Tensor) for inputs, _ in batches)
    assert len(train_part(Request({**values, "num_sample_per_epoch": 20}, "language_model"), data)) == 20


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"mixture": "web"}, "'web' is no NAME=WEIGHT"),
        ({"mixture": "web=1,wob=2"}, "wob holds no token files"),
        ({"mixture": "web=x"}, "'web=x' is no NAME=WEIGHT"),
        ({"exhausted": "repeat"}, "--exhausted repeat is for corpora mixed with --mixture"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(folder, values, line):
    with pytest.raises(EchelonError) as caught:
        open_tokens(Request({"dataset_dir": str(folder), "max_seq_length": 16, **values}, "language_model"))
    assert line in str(caught.value)
