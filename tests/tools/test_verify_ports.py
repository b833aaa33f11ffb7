"""``echelon verify`` on what people port: padded text, noise in models, accumulation by the number of ranks, loaders of
torch's. A verdict is "same" only where the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from verifying import STEPS, verified

import echelon
from echelon import Strategy
from echelon.nn import gather_batch
from echelon.tools.verify.accumulation import find_accumulation
from echelon.tools.verify.causes import likely_cause
from echelon.tools.verify.denominators import denominators
from echelon.tools.verify.loop_events import put_together
from echelon.tools.verify.padded_batches import padded_together
from echelon.tools.verify.verdict_text import conclusion, in_short

QUIET = echelon.Log(console=False)

# ---- padded text ----


def texts() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(1, 23, (int(n),), generator=made) for n in torch.randint(3, 20, (32,), generator=made)]


class Words(nn.Module):
    """Has a loss of its own, over labels that are not -100, as language models of other libraries have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(words)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    return {"words": words, "labels": words.masked_fill(words == 0, -100)}


def masked(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """With words hidden at random, as masked language models want them."""
    batch = padded(samples)
    batch["words"][torch.rand(batch["words"].shape) < 0.2] = 0
    return batch


def tokens(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def language(
    collate: Callable[[Sequence[Tensor]], Any] = padded, samples: Callable[[Any], float | None] = tokens
) -> None:
    model = Words()
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), log=QUIET)
    for batch in engine.loader(texts(), global_batch=8, collate=collate, shuffle=False, workers=1):
        words = batch["words"]  # the script makes its labels itself, of what the loader gives
        made = {**batch, "labels": words.masked_fill(words == 0, -100)} if collate is padded else batch
        engine.step(made, samples=samples(made))


def by_tokens() -> None:
    language()


def by_tokens_masked() -> None:
    language(masked)


def by_rows() -> None:
    """Train with a wrong statement of the script: that rows count alike."""
    language(samples=lambda batch: len(batch["words"]))


def by_itself() -> None:
    language(samples=lambda batch: None)


def language_loop() -> None:
    model = Words()
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), log=QUIET)
    for batch in engine.loader(texts(), global_batch=8, collate=padded, shuffle=False):
        engine.backward(model(**batch), samples=tokens(batch))
        engine.update()


def loader_of_torch() -> None:
    model = Words()
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), log=QUIET)
    own = texts()[echelon.rank() :: echelon.world_size()]
    for batch in DataLoader(own, batch_size=4, collate_fn=padded):  # type: ignore[arg-type]
        engine.step(batch)


def losses_of_plain_torch() -> list[float]:
    """Return losses of the first steps, in one process, without Echelon."""
    model, found = Words(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for at in range(STEPS):
        loss = model(**padded(texts()[8 * at : 8 * at + 8]))
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("body", [by_tokens, language_loop, by_tokens_masked], ids=lambda f: f.__name__)
def test_padded_text_weighed_by_tokens_is_the_same(body: Callable[[], None], tmp_path: Path) -> None:
    verdict = verified(body, tmp_path)
    assert verdict.status == "same", conclusion(verdict)
    assert verdict.passes == 1  # of the samples of all replicas, collated anew
    assert all(row.gradient and row.gradient.relative < 2e-5 for row in verdict.rows)
    if body is not by_tokens_masked:
        assert [row.reference for row in verdict.rows] == pytest.approx(losses_of_plain_torch(), rel=1e-5)


def test_padded_text_weighed_by_rows_differs_and_names_tokens(tmp_path: Path) -> None:
    verdict = verified(by_rows, tmp_path)
    assert [row.reference for row in verdict.rows[:1]] == pytest.approx(losses_of_plain_torch()[:1], rel=1e-5)
    assert verdict.status == "differs"
    says = conclusion(verdict)
    assert says.startswith("differs: the loss is a mean over labels that are not -100 (batch['labels'][:, 1:])")
    assert "count as 4 and 4" in says


def test_padded_text_is_the_same_only_with_one_processs_numbers(tmp_path: Path) -> None:
    verdict = verified(by_itself, tmp_path)
    plain = losses_of_plain_torch()
    assert verdict.rows[0].reference == pytest.approx(plain[0], rel=1e-5)
    is_right = all(row.loss == pytest.approx(loss, rel=1e-5) for row, loss in zip(verdict.rows, plain, strict=True))
    assert verdict.status == ("same" if is_right else "differs"), conclusion(verdict)


def test_padded_batches_without_samples_cannot_be_told(tmp_path: Path) -> None:
    verdict = verified(loader_of_torch, tmp_path)
    assert verdict.status == "cannot tell"
    assert "the replicas' batches do not fit into one" in conclusion(verdict)


def test_padding_is_found_on_either_side() -> None:
    one, two = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[4, 5, 6]])
    right = {"x": torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]])}
    left = {"x": torch.tensor([[0, 1, 2], [0, 3, 0], [4, 5, 6]])}
    for whole in (right, left):
        assert torch.equal(padded_together(whole, [{"x": one}, {"x": two}])["x"], whole["x"])
    assert padded_together({"x": torch.zeros(3, 3, dtype=torch.long)}, [{"x": one}, {"x": two}]) is None
    assert padded_together({"x": right["x"][:2]}, [{"x": one}, {"x": two}]) is None
    drawn = {**right, "y": torch.full((3, 3), -1)}  # what a collate function draws is taken from the replicas
    both = padded_together(drawn, [{"x": one, "y": one}, {"x": two, "y": two}])
    assert both["y"].tolist() == [[1, 2, -1], [3, 0, -1], [4, 5, 6]]


# ---- graphs: a batch is no rows ----


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor, owner: Tensor) -> Tensor:
        told = torch.zeros(len(nodes), 8).index_add(0, edges[1], torch.relu(self.inner(nodes))[edges[0]])
        whole = torch.zeros(len(target), 8).index_add(0, owner, told)
        return F.mse_loss(self.head(whole)[:, 0], target)


def graph_batch(samples: Sequence[tuple[Tensor, Tensor, float]]) -> dict[str, Tensor]:
    sizes = [len(nodes) for nodes, _, _ in samples]
    before = [sum(sizes[:at]) for at in range(len(sizes))]
    return {
        "target": torch.tensor([target for *_, target in samples]),
        "nodes": torch.cat([nodes for nodes, _, _ in samples]),
        "edges": torch.cat([edges + start for (_, edges, _), start in zip(samples, before, strict=True)], 1),
        "owner": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
    }


def graphs() -> None:
    made = torch.Generator().manual_seed(2)
    sizes = torch.randint(2, 6, (24,), generator=made).tolist()
    data = [(torch.randn(n, 4, generator=made), torch.randint(n, (2, 2 * n), generator=made), float(n)) for n in sizes]
    model = Graph()
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), log=QUIET)
    for batch in engine.loader(data, batch_size=4, collate=graph_batch):
        engine.step(batch)


def test_graphs_are_collated_anew(tmp_path: Path) -> None:
    verdict = verified(graphs, tmp_path)
    assert verdict.status == "same", conclusion(verdict)
    assert verdict.passes == 1


# ---- noise in the model ----


class Noise(nn.Module):
    """Draws as VAEs and diffusion models do: like a tensor, by shape, in place, with samples in another dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.times, self.outer = nn.Linear(6, 8), nn.Embedding(5, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x) + torch.randn_like(self.inner(x))
        hidden = hidden + self.times(torch.randint(5, (len(x),))) * torch.empty(len(x), 1).uniform_()
        hidden = hidden + torch.randn(3, len(x), 8).mean(0) * torch.distributions.Normal(hidden, 1.0).rsample()
        return torch.as_tensor(self.outer(hidden[torch.randperm(len(x))]))


def noisy_loss(out: Tensor, x: Tensor) -> Tensor:
    return (out - x + 0.1 * torch.randn(out.shape)).square().mean()


def noise_in_step() -> None:
    model = Noise()
    engine = echelon.distribute(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=noisy_loss, log=QUIET
    )
    made = torch.Generator().manual_seed(echelon.rank())
    for _ in range(STEPS):
        x = torch.randn(5 + echelon.rank(), 6, generator=made)  # uneven, too
        engine.step(x, x)


def test_noise_inside_a_step_is_given_to_one_process(tmp_path: Path) -> None:
    verdict = verified(noise_in_step, tmp_path)
    assert verdict.status == "same", conclusion(verdict)
    assert not verdict.unrest
    assert not verdict.stray
    assert verdict.compared[0] >= 3
    assert verdict.rows[0].loss != verdict.rows[1].loss


def test_draws_are_put_together_along_the_dimension_of_samples() -> None:
    one, two, own = torch.randn(3, 2, 4), torch.randn(3, 5, 4), torch.randn(3, 7, 4)
    whole = put_together([one, two], own, [None, None])
    assert whole is not None
    assert torch.equal(whole, torch.cat([one, two], 1))
    assert put_together([one, two], torch.randn(3, 6, 4), [2, 5]) is None


# ---- accumulation by the number of ranks ----


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 6), torch.randint(4, (3,))


def merged() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    strategy = Strategy(gradient_merge=4 // echelon.world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, optimizer=optimizer, loss=F.cross_entropy, strategy=strategy, log=QUIET)
    for _ in range(4 * STEPS):
        engine.step(*draw())


def accumulated() -> None:
    """The next batch is drawn before backward, as in nanoGPT."""
    steps = 4 // echelon.world_size()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log=QUIET)
    x, y = draw()
    for _ in range(STEPS):
        for _ in range(steps):
            loss = F.cross_entropy(model(x), y) / steps
            x, y = draw()
            engine.backward(loss)
        engine.update()


@pytest.mark.parametrize("body", [merged, accumulated], ids=lambda f: f.__name__)
def test_accumulation_divided_by_the_ranks_is_the_same(body: Callable[[], None], tmp_path: Path) -> None:
    verdict = verified(body, tmp_path)
    assert verdict.status == "same", conclusion(verdict)
    assert "2" in verdict.options
    assert "4 in one" in verdict.options
    assert verdict.compared[0] >= 3
    assert all(row.gradient and row.gradient.relative < 2e-5 for row in verdict.rows)


def test_accumulation_that_cannot_be_followed_is_known() -> None:
    found = find_accumulation(4, [2, 2], [4, 6, 8, 10])  # two events a pass, two ahead
    assert found is not None
    assert [found.event(at) for at in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert find_accumulation(3, [2, 2], [2, 4, 6, 8]) is None
    assert find_accumulation(4, [2, 2], [2, 4, 7, 9]) is None  # the end of an epoch


# ---- the same data on all replicas ----


def by_torch(shuffle: bool) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(32, 6), torch.randint(4, (32,)))
    model = nn.Linear(6, 4)
    engine = echelon.distribute(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, log=QUIET
    )
    torch.manual_seed(echelon.rank())
    for x, y in DataLoader(data, batch_size=4, shuffle=shuffle):
        engine.step(x, y)


def in_order() -> None:
    by_torch(shuffle=False)


def shuffled() -> None:
    by_torch(shuffle=True)


@pytest.mark.parametrize(
    ("body", "says"),
    [(in_order, "were given the same samples in every step"), (shuffled, "each replica reads all of the data")],
    ids=["in_order", "shuffled"],
)
def test_all_data_on_each_replica_is_not_called_same(body: Callable[[], None], says: str, tmp_path: Path) -> None:
    verdict = verified(body, tmp_path)
    assert verdict.parting is None
    assert verdict.status == "cannot tell"
    assert says in conclusion(verdict)


# ---- samples that are compared with each other ----


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(image), self.text(text)


def pairs(gathers: bool) -> None:
    def loss(out: tuple[Tensor, Tensor], batch: Any) -> Tensor:
        image, text = gather_batch(*out) if gathers else out
        return F.cross_entropy(image @ text.T, torch.arange(len(image)))

    model = Pairs()
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, log=QUIET)
    made = torch.Generator().manual_seed(echelon.rank())
    for _ in range(STEPS):
        engine.step(image=torch.randn(4, 6, generator=made), text=torch.randn(4, 5, generator=made))


def pairs_apart() -> None:
    pairs(gathers=False)


def pairs_gathered() -> None:
    pairs(gathers=True)


def test_contrastive_losses_differ_unless_features_are_gathered(tmp_path: Path) -> None:
    assert "(a contrastive loss)" in conclusion(verified(pairs_apart, tmp_path / "apart"))
    gathered = verified(pairs_gathered, tmp_path / "gathered")
    assert gathered.status == "same", conclusion(gathered)


# ---- causes ----


def shares(*told: tuple[float, float, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"loss": loss, "counted": counted, "counts": counts} for loss, counted, counts in told]


def cause(mine: list[dict[str, Any]], one: float, noisy: bool = False, counts: dict[str, float] | None = None) -> str:
    total = sum(share["counted"] for share in mine)
    loss = sum(share["loss"] * share["counted"] for share in mine) / total
    whole = {"loss": one, "passes": shares((one, total, counts or {}))}
    return likely_cause({"loss": loss, "passes": [mine]}, whole, len(mine), noisy=noisy)


def test_causes_are_told_from_the_losses_of_replicas() -> None:
    plain = shares((2.0, 4, {}), (3.0, 4, {}))
    assert cause(plain, 2.5) == ""
    assert "a sum, not a mean?" in cause(plain, 5.0)
    assert "a sum, not a mean?" in cause(plain, 5.03, noisy=True)
    assert "contrastive" in cause(plain, 3.4)
    assert cause(plain, 2.7) == ""  # a mean over what does not show
    counted = shares((2.0, 4, {"labels": 10.0, "rows": 4.0}), (3.0, 4, {"labels": 30.0, "rows": 4.0}))
    assert cause(counted, 2.75).startswith("the loss is a mean over labels, of which the replicas have 10 and 30")
    words, labels = (torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[-100, 5, 6], [7, 8, 9]]))
    wider = denominators({"x": F.pad(words, (1, 0)), "y": F.pad(labels, (1, 0), value=-100)})
    left = shares(
        *((loss, 1, denominators({"x": words[at:][:1], "y": labels[at:][:1]})) for at, loss in ((0, 2), (1, 3)))
    )
    padding = "padding changes what the loss counts: labels that are not -100 (batch['y'][:, 1:]) are 2 and 2 on the"
    assert cause(left, 2.7, counts=wider).startswith(padding)


def test_denominators_are_labels_and_masks_first() -> None:
    batch = {"x": torch.randn(2, 3, 5), "y": torch.tensor([[1, -100, 2], [3, 4, -100]]), "m": torch.ones(2, 3) > 0}
    found = denominators(batch)
    assert found["labels that are not -100 (batch['y'])"] == 4
    assert found["labels that are not -100 (batch['y'][:, 1:])"] == 2
    assert found["places that the mask shows (batch['m'])"] == 6
    assert next(iter(found)).startswith("labels")
    assert list(found.values())[-1] == 2  # rows
    assert next(iter(denominators({"x": torch.ones(2, 3).long(), "y": batch["y"]}))).endswith("(batch['y'])")


def test_long_names_keep_their_layer_and_their_end() -> None:
    assert in_short("layers.3.weight") == "layers.3.weight"
    name = "base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight"
    assert in_short(name) == "11..lora_A.default.weight"
    assert len(in_short("a." * 20 + "weight")) <= 25
