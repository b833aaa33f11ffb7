"""Sequences one after another, without padding: the numbers of each sequence alone, for any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import QUIET

import echelon
from echelon.base.errors import DataError, UsageError
from echelon.data import Loader, pack_collate, pad_collate
from echelon.nn import Bounds, Packed, mean_over_samples, pack, packed_attention
from echelon.parallel.pipeline.pipeline_runner import micro_batches

LENGTHS = [3, 7, 1, 0, 12, 5, 9, 2, 2, 6, 4, 11, 8]


def sentences() -> list[tuple[Tensor, Tensor, int]]:
    """Tokens, a label for each of them, and a label of the whole; one has no tokens."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(1, 9, (n,), generator=g), torch.randint(5, (n,), generator=g), n % 2) for n in LENGTHS]


# ---- the row ----


@pytest.mark.parametrize("multiple", [1, 16, 64])
def test_packed_row_keeps_order_and_its_padding_has_no_owner(multiple: int) -> None:
    """A packed row holds the sequences in order, and its padded end belongs to no sample."""
    texts = [tokens for tokens, _, _ in sentences()]
    row = pack(texts, multiple=multiple, longest=12, fill=-1)
    assert len(row.values) % multiple == 0
    assert all(torch.equal(a, b) for a, b in zip(row.unpack(), texts, strict=True))
    whose = [(at, place) for at, n in enumerate(LENGTHS) for place in range(n)]
    used = len(whose)
    assert list(zip(row.owners()[:used].tolist(), row.places()[:used].tolist(), strict=True)) == whose
    assert (row.owners()[used:] >= row.samples).all()
    assert (row.values[used:] == -1).all()
    assert (row.places()[used:] == 0).all()
    assert row.offsets[-1] == len(row.values)
    assert row.offsets.diff().max() <= 12


def test_owners_are_searched_for_in_no_view() -> None:
    """Torch 2.11 compiles a search for GPUs as if a view of the bounds began where the bounds do."""
    traced = make_fx(lambda offsets: Bounds(offsets, 4).owners(9))(torch.tensor([0, 3, 3, 7, 9]))
    searches = [node for node in traced.graph.nodes if "bucketize" in str(node.target)]
    assert [node.args[1].op for node in searches] == ["placeholder"]


def test_as_many_bounds_for_any_lengths() -> None:
    shapes = {pack([torch.ones(n), torch.ones(3)], multiple=32, longest=16).offsets.shape for n in range(1, 17)}
    assert len(shapes) == 1


def test_a_sequence_that_is_too_long_is_named() -> None:
    with pytest.raises(UsageError, match="longest=4, but a sequence has 5 tokens"):
        pack([torch.ones(5)], longest=4)


# ---- attention and means ----


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_each_sequence_alone(causal: bool) -> None:
    row = pack([torch.zeros(n) for n in LENGTHS], multiple=32)
    g = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(len(row.values), 2, 4, generator=g, dtype=torch.double).requires_grad_() for _ in range(4)
    )
    used = sum(LENGTHS)
    packed = packed_attention(q, k, v, row.bounds, causal=causal)[:used]
    alone = torch.cat([softmax_attention(*(x[a:b] for x in (q, k, v)), causal) for a, b in begins_and_ends()])
    assert torch.allclose(packed, alone, atol=1e-12)
    found, expected = (torch.autograd.grad((x * weight[:used]).sum(), (q, k, v)) for x in (packed, alone))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def begins_and_ends() -> list[tuple[int, int]]:
    return [(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS))]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("qhw,khw->hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hqk,khw->qhw", scores.softmax(-1), v)


def test_means_are_those_of_a_loop_over_samples() -> None:
    row = pack([torch.zeros(n) for n in LENGTHS], multiple=32)
    each = torch.randn(len(row.values), dtype=torch.double)
    counted = torch.rand(len(row.values)) < 0.6
    spans = [slice(a, b) for a, b in begins_and_ends()]
    plain = sum(each[at].mean() for at in spans if at.start < at.stop) / len(LENGTHS)
    chosen = sum(each[at][counted[at]].mean() for at in spans if counted[at].any()) / len(LENGTHS)
    assert torch.allclose(mean_over_samples(each, row), torch.as_tensor(plain))
    assert torch.allclose(mean_over_samples(each, row, counted), torch.as_tensor(chosen))


# ---- loaders ----


def test_batches_have_the_structure_of_samples() -> None:
    samples = [
        {"tokens": [1, 2], "at": 0, "both": (torch.ones(2, 3), 1.5)},
        {"tokens": [3], "at": 1, "both": (torch.ones(1, 3), 2.5)},
    ]
    batch = pack_collate(samples, 4, {"tokens": -1, "both": 7})
    assert batch["tokens"].values.tolist() == [1, 2, 3, -1]
    assert batch["at"].tolist() == [0, 1]
    assert batch["both"][0].values.tolist() == [[1.0] * 3] * 3 + [[7.0] * 3]
    assert batch["both"][1].tolist() == [1.5, 2.5]


def steps(world_size: int = 1, uneven: Any = "join", state: Any = None) -> list[list[Tensor]]:
    loaders = [
        Loader(sentences(), batch_size=4 // world_size, rank=rank, world_size=world_size, uneven=uneven, pack=16)
        for rank in range(world_size)
    ]
    for loader in loaders if state else []:
        loader.load_state_dict(state)
    return [[text for tokens, _, _ in step for text in tokens.unpack()] for step in zip(*loaders, strict=True)]


def test_packed_step_same_samples_for_any_ranks_and_after_resume() -> None:
    """A step has the same samples for any number of ranks, and also after the loader was stopped and resumed."""
    alone = steps()
    assert same(alone[:-1], steps(2)[:-1])  # in the last one, which is ragged, a stand-in counts for nothing
    loader = Loader(sentences(), batch_size=4, uneven="join", pack=16)
    for _, _ in zip(range(2), loader, strict=False):
        state = loader.state_dict()
    assert same(alone[2:], steps(state=state))
    assert same(alone[2:-1], steps(2, state=state)[:-1])


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return [[t.tolist() for t in step] for step in a] == [[t.tolist() for t in step] for step in b]


def test_what_does_not_go_together_is_named() -> None:
    with pytest.raises(UsageError, match="pack=True does not go with lengths=, since packed sequences need no buckets"):
        Loader(sentences(), batch_size=2, pack=True, lengths=len)
    with pytest.raises(DataError, match="packed sequences, which micro-batches cannot be cut from"):
        micro_batches(pack_collate(sentences()), 2)


# ---- training ----


class Tagger(nn.Module):
    """One layer of attention, then a label for each token. Takes [n, s] with 0 as padding, or packed tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, tokens: Tensor | Packed) -> Tensor:
        x = self.words(tokens.values if isinstance(tokens, Packed) else tokens)
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).chunk(3, -1)
        if isinstance(tokens, Packed):
            mixed = packed_attention(q, k, v, tokens.bounds).flatten(1)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            seen = (tokens != 0)[:, None, None]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        out: Tensor = self.head(mixed)
        return out


def tag_loss(logits: Tensor, labels: Tensor | Packed) -> Tensor:
    if isinstance(labels, Packed):
        each = F.cross_entropy(logits, labels.values, ignore_index=-100, reduction="none")
        return mean_over_samples(each, labels, labels.values != -100)
    each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (each.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


def train(pack: bool) -> tuple[list[float], list[Tensor], dict[str, float]]:
    """Shares are uneven: 5 samples a step for two, and a last step of 2."""
    torch.manual_seed(0)
    model = Tagger().double()
    engine = echelon.distribute(
        model, loss=tag_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), log=QUIET
    )
    data = [(tokens, labels) for tokens, labels, _ in sentences() if len(tokens)]
    form = {"pack": 16, "pad_value": (0, -100)} if pack else {"collate": padded}
    loader = engine.loader(data, batch_size=5, uneven="join", **uneven_shares(), **form)
    losses = [float(engine.step(*batch)) for _ in loader.epochs(3) for batch in loader]
    judged = engine.evaluate(Loader(data, batch_size=5, shuffle=False, **form)) if echelon.world_size() == 1 else {}
    return losses, [weight.detach() for weight in model.parameters()], judged


def train_both() -> tuple[Any, Any]:
    return train(False), train(True)


def uneven_shares() -> dict[str, Any]:
    return {"shares": [3.0, 2.0], "total": 5} if echelon.world_size() == 2 else {}


def padded(samples: list[Any]) -> Any:
    return pad_collate(samples, (0, -100))


def test_packed_training_equals_padded_on_one_and_two_ranks() -> None:
    """Packed training equals training on padded rows, on one rank and on two with uneven shares."""
    ((expected, one),), two = run(train_both, ranks=1), run(train, True, ranks=2)
    for losses, weights, _ in (one, *two):
        assert losses == pytest.approx(expected[0], abs=1e-9)
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(weights, expected[1], strict=True))
    assert one[2]["loss"] == pytest.approx(expected[2]["loss"], abs=1e-9)
