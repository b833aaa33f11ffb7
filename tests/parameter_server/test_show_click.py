"""Shows and clicks of rows: counted, decayed and used for removal as a numpy reference does, wherever tables are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from serving import served
from torch import Tensor, nn

import echelon
from echelon.base.errors import UsageError
from echelon.nn import Packed, SparseEmbedding, pack
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import Table
from echelon.parameter_server.worker.job_description import make_job
from echelon.strategy import ParameterServer
from echelon.strategy.show_click_score import ShowClickScore
from echelon.strategy.sparse_update_rules import Sgd

SCORE = ShowClickScore(show=0.25, click=1.5, decay=0.75, threshold=0.9)


class Reference:
    """Shows and clicks by id, all of which decay at the end of a pass."""

    def __init__(self, score: ShowClickScore) -> None:
        self.score, self.rows, self.passes = score, dict[int, list[float]](), 0

    def push(self, ids: np.ndarray, events: np.ndarray) -> None:
        for key, (shows, clicks) in zip(ids.tolist(), events.tolist(), strict=True):
            row = self.rows.setdefault(key, [0.0, 0.0, 0])
            row[:] = row[0] + shows, row[1] + clicks, self.passes

    def new_pass(self, expire_passes: int | None = None) -> None:
        self.passes += 1
        score = self.score
        for key, row in list(self.rows.items()):
            row[:2] = row[0] * score.decay, row[1] * score.decay
            low = (row[0] - row[1]) * score.show + row[1] * score.click < score.threshold
            if low or (expire_passes is not None and self.passes - row[2] > expire_passes):
                del self.rows[key]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("expire_passes", [None, 2])
def test_rows_with_a_low_score_go_as_in_the_reference(dtype: Any, expire_passes: int | None) -> None:
    spec = TableSpec(name="t", dim=3, rule=Sgd(), score=SCORE, expire_passes=expire_passes, dtype=dtype)
    table, reference, draw = Table(spec), Reference(SCORE), np.random.default_rng(0)
    removed = 0
    for _ in range(8):
        for _ in range(3):
            ids = draw.permutation(60)[:20] * 10**17
            shows = draw.integers(0, 9, len(ids))
            events = np.stack([shows, shows * draw.random(len(ids)) // 3], 1).astype(np.float32)
            table.push(ids, np.ones((len(ids), 3), np.float32), events=events)
            reference.push(ids, events)
        table.new_pass()
        removed += table.expire(0)
        reference.new_pass(expire_passes)
        present = np.array(sorted(reference.rows))
        assert sorted(np.concatenate([ids for ids, _ in table.items()]).tolist()) == present.tolist()
        expected = [reference.rows[key][:2] for key in present.tolist()]
        np.testing.assert_allclose(table.events(present), np.array(expected).reshape(-1, 2), rtol=1e-6)
    assert removed > 20
    assert len(table) > 5


def test_ids_that_wait_for_admission_go_by_their_pushes() -> None:
    table = Table(TableSpec(name="t", dim=2, rule=Sgd(), score=ShowClickScore(show=1.0, decay=0.5), admit_after=9))
    for ids in ([1, 2], [1]):
        table.push(np.array(ids), np.ones((len(ids), 2), np.float32))
    counts = []
    for _ in range(2):
        table.new_pass()
        table.expire(0)
        counts.append(sum(len(table.rows_of(bucket).ids) for bucket in table.buckets))
    assert counts == [1, 0]  # id 1 has 2 * 0.5 = 1, then 0.5; id 2 has 0.5


class Clicks(nn.Module):
    def __init__(self, bag: bool = False, **options: Any) -> None:
        super().__init__()
        given: dict[str, Any] = {"score": SCORE, "combiner": "sum" if bag else None, **options}
        self.ids = SparseEmbedding(2, name="ids", optimizer="sgd", **given)
        self.net = nn.Linear(2 if bag else 6, 1)

    def forward(self, ids: Tensor | Packed) -> Tensor:
        return self.net(self.ids(ids).flatten(1)).squeeze(1)


def data(samples: int = 48) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (samples, 3), generator=draw) ** 2
    return ids, (torch.rand(samples, generator=draw) < 0.3).float()


def train(bag: bool = False, mode: str = "collective", batch: int = 8, **options: Any) -> dict[str, Any]:
    """Train for two passes over the data; the rows that are left after each, and their weights."""
    echelon.init(seed=0)
    model = Clicks(bag, **options)
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps=mode),
        log=echelon.Log(console=False),
    )
    ids = torch.arange(40) ** 2
    with torch.no_grad():
        first = model.eval().ids(ids.view(-1, 1)).reshape(40, -1).clone()
    model.train()
    left = []
    for _ in range(2):
        for inputs, labels in engine.loader(data(), global_batch=batch, shuffle=False):
            engine.step(pack(list(inputs)) if bag else inputs, labels)
        engine.synchronize()  # the last step is applied
        engine.served.new_pass()
        with torch.no_grad():
            rows = model.eval().ids(ids.view(-1, 1)).reshape(40, -1).clone()
        model.train()
        left.append(ids[(rows != first).any(1)].tolist())
    engine.close()
    return {"left": left, "rows": rows.numpy()}


def expected() -> list[list[int]]:
    ids, labels = (part.numpy() for part in data())
    reference, left = Reference(SCORE), []
    for _ in range(2):
        for row, clicked in zip(ids, labels, strict=True):
            for key in row:
                reference.push(np.array([key]), np.array([[1.0, clicked]]))
        reference.new_pass()
        left.append(sorted(reference.rows))
    return left


def test_shows_and_clicks_of_a_batch_decide_what_stays() -> None:
    (alone,) = run(train, ranks=1)
    assert alone["left"] == expected()
    assert 0 < len(alone["left"][0]) < len(np.unique(data()[0]))


@pytest.mark.parametrize("place", ["two workers", "servers", "async servers", "bf16"])
def test_scores_are_the_same_wherever_the_table_is(place: str) -> None:
    if place in ("two workers", "bf16"):
        found = run(train, ranks=2, **({"dtype": "bf16"} if place == "bf16" else {}))
    else:
        found = served(train, mode="sync" if place == "servers" else "async", servers=2, workers=2 - (place[0] == "a"))
    assert found[0]["left"] == expected()  # with servers worker 0 ends the pass, and others do not wait for that


def test_ragged_bags_are_counted_by_sample() -> None:
    (alone,) = run(train, True, ranks=1)
    assert alone["left"] == expected()


def test_clicks_that_are_not_one_a_sample_are_refused() -> None:
    for said in errors(train, score=ShowClickScore(clicks=0), ranks=1):
        assert "ShowClickScore(clicks=0) is a tensor of shape (8, 3); it must have one value a sample" in said


def test_geo_mode_refuses_tables_with_a_score() -> None:
    shape: dict[str, Any] = {"session": "", "servers": 1, "trainers": 1, "seed": 0}
    with pytest.raises(UsageError, match="table 't' has a score, and ps='geo' sends"):
        make_job(ParameterServer(mode="geo"), [TableSpec(name="t", dim=2, score=ShowClickScore())], None, {}, **shape)


def test_a_score_goes_by_passes_alone() -> None:
    with pytest.raises(UsageError, match="expire_seconds"):
        SparseEmbedding(2, score="show_click", expire_seconds=60.0)
    assert SparseEmbedding(2, score="show_click").spec.score == ShowClickScore()
