"""Streams whose shards are divided over ranks: one order for any ranks, states exchanged, resumed on others."""

import json
from math import gcd

import pytest
import torch
from harness import run
from torch import nn
from torch.utils.data import IterableDataset

import echelon
from echelon.base.errors import EchelonError
from echelon.data import Loader
from echelon.data.cursor import Cursor
from echelon.data.divided_stream import DividedSource
from echelon.data.loader_options import LoaderOptions

SIZES = [210, 190, 205, 230, 201, 64, 199, 215]  # one shard is much shorter


class Shards(IterableDataset):
    """Numbers in shards, with a state, as streams of the library datasets have them."""

    def __init__(self, sizes=SIZES, only=None):
        self.sizes, self._only = sizes, list(range(len(sizes))) if only is None else only
        self._at, self._start, self._epoch, self.reads = 0, 0, 0, []

    @property
    def num_shards(self):
        return len(self._only)

    def shard(self, num_shards, index, contiguous=True):
        size, rest = divmod(len(self._only), num_shards)
        begin = index * size + min(index, rest)
        result = type(self)(self.sizes, self._only[begin : begin + size + (index < rest)])
        result._epoch, result.reads = self._epoch, self.reads
        return result

    def set_epoch(self, epoch):
        self._epoch = epoch

    def state_dict(self):
        return {"at": self._at, "nested": {"list": [1, None]}}

    def load_state_dict(self, state):
        self._start = state["at"]

    def __iter__(self):
        rows = [1000 * shard + row for shard in self._only for row in range(self.sizes[shard])]
        begin, self._start = self._start, 0
        for self._at in range(begin + 1, len(rows) + 1):
            self.reads.append(rows[self._at - 1])
            yield {"n": 100_000 * self._epoch + rows[self._at - 1], "noise": torch.rand(1)}


class Stateless(Shards):
    state_dict = load_state_dict = None


def rank_steps(ranks, steps, epoch=0, start=0, records=None, data=Shards, batch=24, **options):
    """Return the samples of all ranks in each step, by their places, and the sources' data."""
    found, used = [[] for _ in range(steps)], []
    for rank in range(ranks):
        used.append(data())
        given = LoaderOptions(batch_size=batch // ranks, rank=rank, world_size=ranks, divide=True, seed=5, **options)
        source = DividedSource(used[-1], given)
        source.bind = lambda items, epoch, share, taken: Items(items)
        requests = source.requests(Cursor(batch, epoch, 0, start, None if records is None else [records]))
        for step, request in zip(range(steps), requests, strict=False):
            answer = source.fetch(request)
            found[step] += [(item.position, item.sample["n"], item.sample["noise"].item()) for item in own(answer)]
    return [sorted(step) for step in found], used


class Items(list):
    def _replace(self, anchor):
        return self


def own(answer):
    return answer if isinstance(answer, Items) else answer.items[: answer.own]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_one_for_any_ranks(shuffle):
    options = {"uneven": "join", "shuffle": shuffle, "shuffle_buffer": 80}
    alone, _ = rank_steps(1, 82, epoch=1, **options)
    assert sorted(n for step in alone for _, n, _ in step) == sorted(
        100_000 + 1000 * shard + row for shard, size in enumerate(SIZES) for row in range(size)
    )
    for ranks in (2, 3, 4, 6, 8):
        divided, used = rank_steps(ranks, 82, epoch=1, **options)
        assert divided == alone
        each = len(SIZES) // gcd(len(SIZES), ranks)
        assert all(len({row // 1000 for row in data.reads if row % 1000 > 9}) == each for data in used)


def test_padding_fills_up_the_shares_of_all_ranks():
    options = {"uneven": "pad", "shuffle": False}
    answers = []
    for rank in range(4):
        source = DividedSource(
            Shards([1, 9, 9, 9]), LoaderOptions(batch_size=4, rank=rank, world_size=4, divide=True, **options)
        )
        request = next(source.requests(Cursor(16, samples=16, position=1)))
        answers.append(source.fetch(request))
    short = answers[0]
    assert (short.own, len(short.items)) == (0, 4)
    assert {item.sample["n"] for item in short.items} <= {0, 1000, 1001, 1002}
    assert [batch.batch["n"].tolist() for batch in answers[1:]] == [
        [1000 * at + row for row in range(4, 8)] for at in (1, 2, 3)
    ]


def test_unshuffled_shards_take_turns():
    found, _ = rank_steps(2, 2, shuffle=False)
    assert [n for _, n, _ in found[0]] == [1000 * shard + row for row in range(3) for shard in range(8)]


@pytest.mark.parametrize("data", [Shards, Stateless])
@pytest.mark.parametrize(("shuffle", "at"), [(True, 50), (False, 55), (True, 1)])
def test_a_resume_continues_on_other_ranks_from_states(data, shuffle, at):
    options = {"uneven": "join", "shuffle": shuffle, "shuffle_buffer": 80, "data": data}
    alone, _ = rank_steps(1, 82, **options)
    loader = Loader(data(), batch_size=24, divide=True, seed=5, **{k: v for k, v in options.items() if k != "data"})
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    records = None if "anchor" not in state else state["anchor"][0]
    assert (records is None) == (data is Stateless)
    for ranks in (1, 2, 3, 4):
        again, used = rank_steps(ranks, 82 - at, start=state["samples"], records=records, **options)
        assert again == alone[at:]
        if records is not None and at > 30:
            assert ranks == 3 or sum(len(one.reads) for one in used) < 0.8 * sum(SIZES)
            places = [row % 1000 for one in used for row in one.reads if row // 1000 != 5]  # 5 ended before
            assert all(place >= 60 or place < 10 for place in places)  # below 10: stand-ins


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, n, noise):
        return self.line(noise + (n[:, None] % 1000) / 1000)


def trained(folder, every=None, until=None, **options):
    echelon.init(device="cpu", seed=2)
    torch.manual_seed(1)
    model = Model()
    engine = echelon.distribute(
        model,
        loss=lambda output, batch: (output - 1).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        log=echelon.Log(lines=False),
        checkpoint=None if folder is None else echelon.Checkpoint(dir=str(folder), every=every),
    )
    data = Shards()
    loader = engine.loader(data, global_batch=24, divide=True, shuffle_buffer=80, **options)
    losses = []
    for _ in loader.epochs(2):
        for batch in loader:
            losses.append(float(engine.step(batch)))
            if until is not None and engine.steps == until:
                break
        if until is not None and engine.steps == until:
            break
    weights = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return losses, weights, engine.steps, len(data.reads)


@pytest.mark.parametrize(("uneven", "every"), [("join", 45), ("drop", 25)])
def test_ranks_train_like_one_and_resume_on_others(tmp_path, uneven, every):
    losses, weights, steps, _ = run(trained, None, ranks=1, uneven=uneven)[0]
    first = run(trained, tmp_path / "kept", every, every + 3, ranks=4, uneven=uneven)
    assert first[0][0] == pytest.approx(losses[: every + 3], rel=1e-5)
    for mine, its, at, reads in run(trained, tmp_path / "kept", every, ranks=2, uneven=uneven):
        assert len(mine) == len(losses) - every
        assert mine == pytest.approx(losses[every:], rel=1e-5)
        assert at == steps
        assert reads < sum(SIZES)  # two epochs of half of the shards, less what came before the checkpoint
        for one, other in zip(its, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "options", "line"),
    [
        (list(range(9)), {"divide": True}, "divide=True: list is no stream with shards"),
        (Shards(), {"divide": 9}, "divide=9: Shards has 8 shards"),
        (Shards(), {"divide": True, "cache": True}, "cache= does not go with divide=True"),
        (Shards(), {"divide": True, "lengths": len}, "lengths= does not go with divide=True"),
        (Shards([0, 0]), {"divide": True}, "the data set is empty"),
    ],
)
def test_a_mistake_is_one_line(data, options, line):
    with pytest.raises(EchelonError) as caught:
        next(iter(Loader(data, batch_size=4, **options)))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_divides_into_parts_of_several_shards():
    options = {"batch_size": 12, "shuffle": False, "uneven": "join"}
    found = [n for batch in Loader(Shards(), divide=3, **options) for n in batch["n"].tolist()]
    assert found[:6] == [0, 3000, 6000, 1, 3001, 6001]
    assert len(set(found)) == sum(SIZES)


@pytest.mark.parametrize(
    ("ranks", "options", "line"),
    [
        (2, {}, "stream: each of 2 ranks reads all 8 shards; with divide=True it reads 4 of them"),
        (2, {"divide": True}, None),
        (3, {"divide": True}, "stream: 8 shards cannot be divided evenly over 3 ranks, and each rank reads 8 of them"),
        (3, {}, None),
        (1, {}, None),
    ],
)
def test_a_line_says_who_reads_more_than_its_share(ranks, options, line, monkeypatch):
    monkeypatch.setattr("echelon.data.loader._agreement", lambda *args: None)
    found = Loader(Shards(), batch_size=2, rank=0, world_size=ranks, **options).reading_line
    assert found is None if line is None else found.startswith(line)
