"""Recommenders compute what their papers say, and train alike alone, on workers with servers, and on ragged bags."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from serving import served
from torch import Tensor
from zoo import QUIET

import echelon
from echelon.base.errors import UsageError
from echelon.nn import SparseEmbedding
from echelon.zoo import registry
from echelon.zoo.application import Application, load
from echelon.zoo.datasets.click_log import open_click_log
from echelon.zoo.datasets.made_up.synthetic_click_log import click_log, item_shares, spread
from echelon.zoo.entry import Request
from echelon.zoo.recommender_tasks import next_items, retrieval

MODELS = ("dcn_v2", "xdeepfm", "din", "mmoe", "two_tower", "sasrec", "hstu")
Array = np.ndarray


def loaded(name: str, **given: Any) -> Application:
    torch.manual_seed(0)
    tiny = registry.all_models()[name].tiny
    asked = {"num_sample_per_epoch": 96, "history_length": 6, "dropout": 0.0, **tiny, **given}
    known = {setting.name for setting in registry.all_models()[name].settings}
    asked = {key: value for key, value in asked.items() if key != "dropout" or key in known}
    return load(name, dataset_name="click_log", **asked)


def trained(app: Application, **strategy: Any) -> tuple[Any, list[float]]:
    engine = echelon.distribute(
        app.model,
        loss=app.loss,
        optimizer=torch.optim.SGD(app.model.parameters(), lr=0.1),
        strategy=echelon.Strategy(**strategy),
        log=QUIET,
    )
    losses = [float(engine.step(*batch)) for batch in app.loader(engine, global_batch=16, uneven="join")]
    return engine, losses


# ---- the published formulas, sample by sample in numpy


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def linear(layer: Any, x: Array) -> Array:
    return x @ array(layer.weight).T + (0 if layer.bias is None else array(layer.bias))


def through(layers: Any, x: Array) -> Array:
    """Linear layers with ReLU or PReLU between them."""
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            x = linear(layer, x)
        elif isinstance(layer, torch.nn.PReLU):
            x = np.where(x > 0, x, layer.weight.item() * x)
        elif isinstance(layer, torch.nn.ReLU):
            x = np.maximum(x, 0)
    return x


def dcn_v2(model: Any, ids: Tensor, numbers: Tensor) -> Array:
    """Wang et al., equations 1 and 2: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with W_l = U_l V_l' of low rank."""
    found = []
    for row, number in zip(array(model.vectors(ids)), array(numbers), strict=True):
        x0 = x = np.concatenate([row.ravel(), number])
        for cross in model.crosses:
            w = array(cross.up.weight)
            w = w @ array(cross.down.weight) if hasattr(cross.down, "weight") else w
            x = x0 * (w @ x + array(cross.up.bias)) + x
        deep = through(model.layers, x if model.structure == "stacked" else x0)
        found.append(linear(model.head, deep if model.structure == "stacked" else np.concatenate([x, deep]))[0])
    return np.array(found)


def xdeepfm(model: Any, ids: Tensor, numbers: Tensor) -> Array:
    """Lian et al., equation 6: X^k_h = sum over i, j of W^{k,h}_ij (X^{k-1}_i o X^0_j), then sum pooling."""
    found = []
    for row, first, number in zip(array(model.vectors(ids)), array(model.first(ids)), array(numbers), strict=True):
        x0 = np.concatenate([row, number[:, None] * array(model.number_vectors)])
        maps, pooled = x0, []
        for layer in model.interaction.layers:
            weights = array(layer.weight).reshape(-1, len(maps), len(x0))
            maps = np.array([
                sum(w[i, j] * maps[i] * x0[j] for i in range(len(maps)) for j in range(len(x0))) for w in weights
            ])  # fmt: skip
            pooled.append(maps.sum(1))
        known = np.concatenate([*pooled, through(model.layers, x0.ravel())])
        found.append(first[0] + number @ array(model.number_weights) + linear(model.head, known)[0])
    return np.array(found)


def din(model: Any, ids: Tensor, numbers: Tensor, candidate: Tensor, history: Tensor) -> Array:
    """Zhou et al., equation 3: v_U(A) = sum over j of a(e_j, v_A) e_j, with weights that are not normalized."""
    found = []
    context, wanted, before = (
        array(part) for part in (model.context(ids), model.items(candidate), model.items(history))
    )
    for at in range(len(ids)):
        interest = np.zeros(model.items.dim)
        for j in range(history.shape[1]):
            if history[at, j] != 0:
                e, v = before[at, j], wanted[at]
                interest += through(model.interest.score, np.concatenate([e, v, e - v, e * v]))[0] * e
        known = np.concatenate([wanted[at], interest, context[at].ravel(), array(numbers[at])])
        found.append(through(model.layers, known)[0])
    return np.array(found)


def mmoe(model: Any, ids: Tensor, numbers: Tensor) -> Array:
    """Ma et al., equations 6 and 7: y_k = h_k(f^k(x)), f^k(x) = sum over i of softmax(W_gk x)_i f_i(x)."""
    found = []
    for row, number in zip(array(model.vectors(ids)), array(numbers), strict=True):
        x = np.concatenate([row.ravel(), number])
        experts = [through(expert, x) for expert in model.experts]
        logits = []
        for gate, tower in zip(model.gates, model.towers, strict=True):
            score = np.exp(linear(gate, x))
            mixed = sum(share * expert for share, expert in zip(score / score.sum(), experts, strict=True))
            logits.append(through(tower, mixed)[0])
        found.append(logits)
    return np.array(found)


def two_tower(model: Any, users: Tensor, items: Tensor, tags: Any) -> Array:
    """Users' and items' unit vectors; the tags of an item are averaged, and an item without tags has zeros."""
    wishes, offers = [], []
    for user, item, bag in zip(users, items, tags.unpack(), strict=True):
        vectors = array(model.tags(bag[None]))[0] if len(bag) else np.zeros(model.tags.dim)
        for tower, x, into in (
            (model.user_tower, array(model.users(user)).ravel(), wishes),
            (model.item_tower, np.concatenate([array(model.items(item)).ravel(), vectors]), offers),
        ):
            out = linear(tower.head, through(tower.layers, x))
            into.append(out / np.linalg.norm(out))
    return np.stack([np.array(wishes) / model.temperature, np.array(offers)], axis=1)


def normed(norm: Any, x: Array) -> Array:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return x * array(norm.weight) + array(norm.bias)


def sasrec_block(block: Any, x: Array, is_there: Array) -> Array:
    """Kang and McAuley, equations 2 to 6: softmax(Q K' / sqrt(d)) V over items up to each place, then F(S)."""
    heads, width = block.attention.heads, block.attention.width
    qkv = linear(block.attention.qkv, normed(block.attention_norm, x)).reshape(len(x), heads, 3, width)
    mixed = np.zeros_like(x)
    for i in np.flatnonzero(is_there):
        seen = [j for j in range(i + 1) if is_there[j]]
        for h in range(heads):
            weights = np.exp([qkv[i, h, 0] @ qkv[j, h, 1] / math.sqrt(width) for j in seen])
            mixed[i, h * width : (h + 1) * width] = weights / weights.sum() @ qkv[seen, h, 2]
    x = x + linear(block.attention.project, mixed)
    return x + through(block.network, normed(block.network_norm, x))


def hstu_block(block: Any, x: Array, is_there: Array) -> Array:
    """Zhai et al., equations 1 to 3: U, V, Q, K = silu(f(X)); A = silu(Q K' + rab) / n; Y = f(norm(A V) * U)."""

    def silu(values: Array) -> Array:
        return values / (1 + np.exp(-values))

    u, v, q, k = np.split(silu(linear(block.project, normed(block.norm, x))), 4, axis=1)
    mixed, bias = np.zeros_like(x), array(block.distance)
    for i in np.flatnonzero(is_there):
        for h in range(block.heads):
            part = slice(h * block.width, (h + 1) * block.width)
            for j in range(i + 1):
                if is_there[j]:
                    mixed[i, part] += silu(q[i, part] @ k[j, part] + bias[i - j]) / len(x) * v[j, part]
    return x + linear(block.output, normed(block.mixed_norm, mixed) * u)


def sequences(model: Any, history: Tensor, candidates: Tensor, block_of: Any) -> Array:
    found = []
    for row, offered in zip(history, candidates, strict=True):
        is_there = row.numpy() != 0
        x = array(model.items(row)) * math.sqrt(model.items.dim) + array(model.positions)[: len(row)]
        x = x * is_there[:, None]
        for block in model.blocks:
            x = block_of(block, x, is_there) * is_there[:, None]
        found.append(np.einsum("skd,sd->sk", array(model.items(offered)), normed(model.norm, x)))
    return np.array(found)


REFERENCES: dict[str, Any] = {
    "dcn_v2": dcn_v2,
    "xdeepfm": xdeepfm,
    "din": din,
    "mmoe": mmoe,
    "two_tower": two_tower,
    "sasrec": lambda model, *batch: sequences(model, *batch, sasrec_block),
    "hstu": lambda model, *batch: sequences(model, *batch, hstu_block),
}
CASES = [*((name, {}) for name in MODELS), ("dcn_v2", {"cross_rank": 3, "structure": "parallel"})]


@pytest.mark.parametrize(("name", "given"), CASES, ids=[f"{name}-{len(given)}" for name, given in CASES])
def test_a_trained_recommender_equals_its_papers_formula(name: str, given: dict[str, Any]) -> None:
    app = loaded(name, **given)
    engine, losses = trained(app)
    with closing(engine):
        *inputs, target = next(iter(engine.loader(app.data.test, batch_size=12, shuffle=False)))
        app.model.eval()
        with torch.no_grad():
            output = app.model(*inputs)
        expected = REFERENCES[name](app.model, *inputs)
        found = torch.stack(output[:2], dim=1) if name == "two_tower" else output
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert float(found.std()) > 0
        assert torch.isfinite(app.loss(output, target))
    assert all(math.isfinite(loss) for loss in losses)


# ---- losses


def test_retrieval_is_a_corrected_softmax_over_the_batch() -> None:
    """Yi et al., equations 4 and 5, without items that are the user's own once more."""
    echelon.init(seed=0)
    g = torch.Generator().manual_seed(1)
    users, offers = torch.randn(5, 3, generator=g), torch.randn(5, 3, generator=g)
    ids, shares = torch.tensor([7, 8, 7, 9, -4]), torch.tensor([0.4, 0.1, 0.4, 0.3, 0.2])
    losses = []
    for i in range(5):
        scores = {j: float(users[i] @ offers[j]) - math.log(shares[j]) for j in range(5) if j == i or ids[j] != ids[i]}
        losses.append(math.log(sum(math.exp(score) for score in scores.values())) - scores[i])
    assert float(retrieval((users, offers, ids), shares.log())) == pytest.approx(np.mean(losses), rel=1e-5)


def test_next_items_counts_real_places_of_each_sequence() -> None:
    scores = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(2))
    is_there = torch.tensor([[0.0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]])
    right, wrong = -F.logsigmoid(scores[..., 0]), -F.logsigmoid(-scores[..., 1:]).sum(2)
    places = right + wrong
    expected = (places[0, 1:].mean() + places[1, 3]) / 3
    torch.testing.assert_close(next_items(scores, is_there), expected)


# ---- the same on workers with servers


def job(name: str, given: dict[str, Any], strategy: dict[str, Any]) -> dict[str, Any]:
    echelon.init(seed=0)
    app = loaded(name, **given)
    engine, losses = trained(app, **strategy)
    engine.synchronize()
    probe = next(iter(engine.loader(app.data.test, batch_size=20, shuffle=False, rank=0, world_size=1)))
    app.model.eval()
    with torch.no_grad():
        output = app.model(*probe[:-1])
    found = {key: value.detach().numpy().copy() for key, value in app.model.named_parameters()}
    found["output"] = (output[0] if isinstance(output, tuple) else output).numpy()
    engine.close()
    return {"losses": losses, **found}


@pytest.mark.parametrize(
    ("name", "given", "dense"),
    [
        ("dcn_v2", {"cross_rank": 3}, "servers"),
        ("din", {}, "servers"),
        ("mmoe", {}, "allreduce"),
        ("sasrec", {}, "servers"),
        ("two_tower", {"num_sample_per_epoch": 72}, "allreduce"),
    ],
)
def test_two_workers_train_what_one_process_trains(name: str, given: dict[str, Any], dense: str) -> None:
    """Loss, weights and rows; with negatives from both workers' batches, and an uneven last batch."""
    (alone,) = run(job, name, given, {}, ranks=1)
    together = served(job, name, given, {"ps": {"mode": "sync", "dense": dense}}, servers=1, workers=2)
    assert alone["losses"][-1] < alone["losses"][0]
    for worker in together:
        assert worker["losses"] == pytest.approx(alone["losses"], rel=1e-5, abs=1e-5)
        for key in alone.keys() - {"losses"}:
            np.testing.assert_allclose(worker[key], alone[key], rtol=1e-4, atol=1e-5, err_msg=key)


def test_ranks_that_hold_the_tables_compare_all_items_of_a_batch() -> None:
    """Retrieval without servers: negatives come from the batches of both ranks."""
    given = {"num_sample_per_epoch": 72}
    (alone,) = run(job, "two_tower", given, {}, ranks=1)
    for rank in run(job, "two_tower", given, {}, ranks=2):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5, abs=1e-5)
        for key in alone.keys() - {"losses"}:
            np.testing.assert_allclose(rank[key], alone[key], rtol=1e-4, atol=1e-5, err_msg=key)


# ---- the log


def test_the_log_follows_its_law() -> None:
    rows, again = click_log(20_000, 5), click_log(20_000, 5)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert abs(rows.click.sum() - rows.probability.sum()) < 3 * math.sqrt(20_000 / 4)  # clicks are drawn by the law
    for low, high in ((0.0, 0.2), (0.4, 0.6), (0.8, 1.0)):
        at = (low <= rows.probability) & (rows.probability < high)
        assert rows.click[at].mean() == pytest.approx(rows.probability[at].mean(), abs=0.05)
    assert (rows.conversion <= rows.click).all()
    assert rows.conversion.sum() > 0
    assert (np.diff(rows.time) > 0).all()
    counts = np.diff(rows.tag_offsets)
    assert set(counts) == {0, 1, 2, 3}
    assert counts.sum() == len(rows.tags)
    assert ((rows.history >= 0).any(1)).all()
    assert (rows.history[:, 0] < 0).any()
    assert item_shares().sum() == pytest.approx(1)


def test_ids_of_different_kinds_never_meet() -> None:
    kinds = ("users", "items", "categories", "hours", "tags")
    ids = np.concatenate([spread(np.arange(1000), kind) for kind in kinds])
    assert len(set(ids.tolist())) == 5000
    assert 0 not in ids
    assert spread(np.array([-1]), "items") == 0
    assert (ids < 0).any()


def test_settings_of_recommenders_that_cannot_be() -> None:
    for name, given, line in [
        ("dcn_v2", {"cross_layers": 0}, "--cross_layers 0 --cross_rank 0: expected a layer or more"),
        ("xdeepfm", {"maps": ""}, "--maps '': expected the feature maps"),
        ("mmoe", {"experts": 0}, "--experts 0 --expert '16,8': expected one expert"),
        ("two_tower", {"temperature": 0.0}, "--temperature 0.0: must be above 0"),
    ]:
        with pytest.raises(UsageError, match=line):
            loaded(name, **given)
    with pytest.raises(UsageError, match="--history_length 0: must be 1 or more"):
        open_click_log(Request({"history_length": 0}, "next_item"))


def test_tables_of_recommenders_take_the_settings() -> None:
    app = loaded("din", embedding_optimizer="adam", embedding_learning_rate=0.3)
    tables = [module for module in app.model.modules() if isinstance(module, SparseEmbedding)]
    assert [(type(table.spec.rule).__name__, table.lr) for table in tables] == [("Adam", 0.3)] * 2
