"""BERT, GPT and T5: published sizes, transformers' answers, and the same training however the model is spread."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon.base.errors import CheckpointError, UsageError
from echelon.nn import take_auxiliary_loss
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request
from echelon.zoo.models import bert, gpt, t5
from echelon.zoo.models.bert_names import from_hugging_face, sizes_from_config
from echelon.zoo.tasks import TASKS
from echelon.zoo.train.parameters import PARAMETERS

REFERENCE = json.loads((Path(__file__).parent / "references" / "text.json").read_text())
ENTRIES = [entry for entry in registry._models.values() if entry.runner in ("bert", "gpt", "t5")]
PAIRS = [(entry.name, task) for entry in ENTRIES for kind in entry.tasks for task in entry.tasks[kind]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than these models do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name: str, task: str, **values: Any) -> nn.Module:
    return entry_of(name).build(request(name, task, **values))


def entry_of(name: str) -> Model:
    return registry._models[name]


def request(name: str, task: str, **values: Any) -> Request:
    entry = entry_of(name)
    known = {each.name: each.default for each in (*PARAMETERS, *entry.settings)}
    assert values.keys() <= known.keys(), values.keys() - known.keys()
    return Request({**known, **entry.defaults, **values}, task)


# ---- sizes ----


@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.parameters], ids=lambda each: each.name)
def test_has_the_published_number_of_parameters(entry: Model) -> None:
    with torch.device("meta"):
        model = made(entry.name, entry.tasks["pretrain"][0])
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.parameters


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.name)
def test_cuts_and_advice_name_modules_that_are_there(entry: Model) -> None:
    for kind in entry.tasks:
        for task in entry.tasks[kind]:
            with torch.device("meta"):
                model = made(entry.name, task)
            assert set(entry.cuts) <= set(dict(model.named_modules()))
            echelon.annotate(model, entry.split)
    echelon.Strategy.from_dict(entry.strategy)


# ---- answers of transformers ----


def test_bert_guesses_words_as_that_of_transformers() -> None:
    model = restored("pretraining", bert.BertPretraining(bert_sizes()))
    positions = torch.tensor([[0, 3, 7], [4, 1, 1]])
    words, follows = model(*bert_inputs(), positions)
    expected = expected_of("pretraining", "prediction_logits").view(2, 8, 24)
    same(words, expected.gather(1, positions[..., None].expand(-1, -1, 24)))
    same(follows, expected_of("pretraining", "seq_relationship_logits").view(2, 2))


def test_bert_classifies_as_that_of_transformers() -> None:
    model = restored("classifier", bert.BertClassifier(bert_sizes(), classes=3))
    same(model(*bert_inputs()), expected_of("classifier", "logits").view(2, 3))


def test_bert_finds_answers_as_that_of_transformers() -> None:
    model = restored("span", bert.BertSpan(bert_sizes()))
    begins, ends = (expected_of("span", name).view(2, 8) for name in ("start_logits", "end_logits"))
    same(model(*bert_inputs()), torch.stack([begins, ends], -1))


def test_gpt_answers_as_that_of_transformers() -> None:
    state = drawn_state(REFERENCE["gpt"]["shapes"])
    model = gpt.Gpt(vocabulary=24, positions=12, hidden=16, layers=2, heads=2, dropout=0.1).double().eval()
    model.load_state_dict(gpt_state(state))
    same(model(numbers(24, 2, 8)), torch.tensor(REFERENCE["gpt"]["outputs"]["logits"]).view(2, 8, 24))


def test_t5_answers_as_that_of_transformers() -> None:
    sizes = t5.T5Sizes(
        vocabulary=24, hidden=16, layers=2, heads=2, width=6, inner=20, dropout=0.1,
        experts=0, top=1, capacity=1.0, masked=True,
    )  # fmt: skip
    model = t5.T5(sizes).double().eval()
    model.load_state_dict(t5_state(drawn_state(REFERENCE["t5"]["shapes"])))
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 35:] = 0
    found = model(numbers(24, 1, 40), mask, numbers(23, 1, 30))
    same(found, torch.tensor(REFERENCE["t5"]["outputs"]["logits"]).view(1, 30, 24), within=1e-6)


def same(found: Tensor, expected: Tensor, within: float = 1e-7) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < within
    assert expected.std() > 0.05


def drawn_state(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Draw weights as references/make_text.py does."""
    return {name: drawn(name, shape) for name, shape in shapes.items()}


def drawn(name: str, shape: list[int]) -> Tensor:
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    is_norm = any(part in name.lower() for part in ("norm", "ln_")) and name.endswith("weight")
    return torch.from_numpy(1 + 0.1 * values if is_norm else 0.1 * values)


def numbers(high: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(high).randint(0, high, shape))


def bert_sizes() -> bert.BertSizes:
    config = sizes_from_config(REFERENCE["bert"]["config"])
    assert (config["num_layers"], config["num_heads"], config["intermediate_size"]) == (2, 2, 48)
    return bert.BertSizes(
        vocabulary=config["vocab_size"], positions=config["max_position_embeddings"], segments=2,
        hidden=config["hidden_size"], layers=2, heads=2, inner=48, dropout=0.1, attention_dropout=0.1,
        norm_eps=config["layer_norm_eps"], masked=True,
    )  # fmt: skip


def bert_inputs() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return numbers(24, 2, 8), numbers(2, 2, 8), mask


def restored(kind: str, model: nn.Module) -> nn.Module:
    """With the reference's weights, every one of them."""
    model.double().eval().load_state_dict(from_hugging_face(drawn_state(REFERENCE["bert"][kind]["shapes"])))
    return model


def expected_of(kind: str, output: str) -> Tensor:
    return torch.tensor(REFERENCE["bert"][kind]["outputs"][output], dtype=torch.double)


def gpt_state(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers keeps GPT-2's matrices transposed, and query, key and value one after another."""
    ours = {
        "embeddings.words.weight": theirs["transformer.wte.weight"],
        "embeddings.positions.weight": theirs["transformer.wpe.weight"],
        "head.weight": theirs["transformer.wte.weight"],
        **{f"norm.{leaf}": theirs[f"transformer.ln_f.{leaf}"] for leaf in ("weight", "bias")},
    }
    names = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.project"}
    for name, other in (names | {"mlp.c_fc": "mlp.0", "mlp.c_proj": "mlp.2"}).items():
        for layer, leaf in ((layer, leaf) for layer in range(2) for leaf in ("weight", "bias")):
            value = theirs[f"transformer.h.{layer}.{name}.{leaf}"]
            value = value.t() if value.dim() == 2 else value
            ours[f"layers.{layer}.{other}.{leaf}"] = by_head(value.chunk(3), 2) if "c_attn" in name else value
    return ours


def t5_state(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {"words.weight": theirs["shared.weight"], "head.weight": theirs["shared.weight"]}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        ours[f"{stack}_norm.weight"] = theirs[f"{stack}.final_layer_norm.weight"]
        table = theirs[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        ours[f"{stack}_bias.table.weight"] = table
        for i in range(2):
            ours |= {f"{stack}.{i}.{name}": value for name, value in t5_layer(theirs, f"{stack}.block.{i}", last)}
    return ours


def t5_layer(theirs: dict[str, Tensor], block: str, last: int) -> list[tuple[str, Tensor]]:
    own = [theirs[f"{block}.layer.0.SelfAttention.{each}.weight"] for each in "qkvo"]
    found = [
        ("norm.weight", theirs[f"{block}.layer.0.layer_norm.weight"]),
        ("attention.qkv.weight", by_head(own[:3], 2)),
        ("attention.project.weight", own[3]),
        ("feed.norm.weight", theirs[f"{block}.layer.{last}.layer_norm.weight"]),
        ("feed.mlp.0.weight", theirs[f"{block}.layer.{last}.DenseReluDense.wi.weight"]),
        ("feed.mlp.3.weight", theirs[f"{block}.layer.{last}.DenseReluDense.wo.weight"]),
    ]
    if last == 2:
        cross = [theirs[f"{block}.layer.1.EncDecAttention.{each}.weight"] for each in "qkvo"]
        found += [("cross_norm.weight", theirs[f"{block}.layer.1.layer_norm.weight"]), ("cross.q.weight", cross[0])]
        found += [("cross.kv.weight", by_head(cross[1:3], 2)), ("cross.project.weight", cross[3])]
    return found


def by_head(parts: Any, heads: int) -> Tensor:
    return torch.cat([torch.cat([part.chunk(heads)[head] for part in parts]) for head in range(heads)])


# ---- names of other BERTs ----


def test_names_without_prefix_and_with_old_leaves_are_understood() -> None:
    new = drawn_state(REFERENCE["bert"]["pretraining"]["shapes"])
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("Norm.bias", "Norm.beta"): value
        for name, value in new.items()
    }
    old["embeddings.position_ids"] = torch.arange(12)
    expected, found = from_hugging_face(new), from_hugging_face(old)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_number_of_heads_changes_the_order() -> None:
    state = drawn_state(REFERENCE["bert"]["span"]["shapes"])
    fused = from_hugging_face(state, heads=4)["layers.1.attention.qkv.weight"]
    key = state["bert.encoder.layer.1.attention.self.key.weight"]
    assert torch.equal(fused.view(4, 3, 32, 128)[2, 1], key[64:96])


def test_heads_that_do_not_fit_are_named() -> None:
    with pytest.raises(CheckpointError, match="attention of 128 features does not divide into 3 heads"):
        from_hugging_face(drawn_state(REFERENCE["bert"]["span"]["shapes"]), heads=3)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("bert.encoder.layer.0.attention.self.key.weight", "has a query but no 'layers.0.attention.k.weight'"),
        ("", "'model.layers.0.mlp.weight' is no weight of a BERT"),
    ],
)
def test_incomplete_and_foreign_checkpoints_are_named(name: str, line: str) -> None:
    state = drawn_state(REFERENCE["bert"]["span"]["shapes"])
    state = {key: value for key, value in state.items() if key != name}
    if not name:
        state["model.layers.0.mlp.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=line):
        from_hugging_face(state)


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UsageError, match="max_seq_length 600 is more than the 512 positions"):
        made("bert_tiny", "masked_lm", max_seq_length=600)
    with pytest.raises(UsageError, match="hidden_size 128 does not divide into num_heads 3"):
        made("gpt_tiny", "language_model", num_heads=3)


# ---- learning ----


def batch_of(task: str, values: Any, rows: int = 8, seed: int = 0) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    length, vocabulary = values["max_seq_length"], values["vocab_size"]

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (rows, *shape), generator=g)

    mask = (torch.arange(length) < 3 + ints(length - 2, 1)).long()  # every row has its own length
    text = (ints(vocabulary, length), ints(2, length), mask)
    if task == "masked_lm":
        words = values["max_predictions_per_seq"]
        labels = ints(vocabulary, words)
        labels[::2, -1] = -100
        return *text, ints(3, words), (labels, ints(2))
    if task == "classify_text":
        return *text, ints(values["num_classes"])
    if task == "answer_span":
        return *text, ints(3, 2)
    if task == "language_model":
        return text[0], ints(vocabulary, length)
    target = ints(vocabulary, values["max_target_length"])
    return text[0], mask, target.roll(1, 1), target


def tiny(name: str, task: str, **values: Any) -> Request:
    return request(name, task, **(dict(entry_of(name).tiny) | {"dropout": 0.0, "num_classes": 5} | values))


@pytest.mark.parametrize(("name", "task"), sorted(set(PAIRS)))
def test_learns_a_batch_by_heart(name: str, task: str) -> None:
    torch.manual_seed(0)
    asked = tiny(name, task, **({"attention_dropout": 0.0} if name.startswith("bert") else {}))
    model, batch = entry_of(name).build(asked), batch_of(task, asked)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(5):
        loss = TASKS[task].loss(model(*batch[:-1]), batch[-1])
        losses.append(loss.item())
        auxiliary = take_auxiliary_loss(model)
        (loss if auxiliary is None else loss + auxiliary).backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    assert losses[0] == pytest.approx(chance(task, asked), rel=0.25)


def chance(task: str, asked: Request) -> float:
    """The loss of a model that knows nothing."""
    if task == "masked_lm":
        return math.log(asked["vocab_size"]) + math.log(2)
    sizes = {"classify_text": "num_classes", "answer_span": "max_seq_length"}
    return math.log(asked[sizes.get(task, "vocab_size")])


def test_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    asked = tiny("bert_tiny", "answer_span")
    model = entry_of("bert_tiny").build(asked).eval()
    tokens, segments, _, _ = batch_of("answer_span", asked)
    mask = (torch.arange(16) < 9).long().expand(8, -1)
    alone = model(tokens[:, :9], segments[:, :9], mask[:, :9])
    assert (model(tokens, segments, mask)[:, :9] - alone).abs().max() < 1e-6


def test_attention_mask_off_is_a_mask_of_ones() -> None:
    asked = tiny("t5_tiny", "translate"), tiny("t5_tiny", "translate", attention_mask=False)
    source, mask, moved, _ = batch_of("translate", asked[0])
    outputs = []
    for each in asked:
        torch.manual_seed(0)
        outputs.append(entry_of("t5_tiny").build(each).eval()(source, torch.ones_like(mask), moved))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5


# ---- spread over ranks ----

STAGES = {"": echelon.pipeline(micro_batches=2, stages=2)}
CASES: dict[str, tuple[str, str, Any]] = {
    "bert, stages": ("bert_tiny", "masked_lm", STAGES),
    "bert, split": ("bert_tiny", "masked_lm", "model"),
    "bert span, split": ("bert_tiny", "answer_span", "model"),
    "gpt, stages": ("gpt_tiny", "language_model", STAGES),
    "gpt, split": ("gpt_tiny", "language_model", "model"),
    "t5, stages": ("t5_tiny", "translate", STAGES),
    "t5, split": ("t5_tiny", "translate", "model"),
    "experts, split": ("t5_moe_tiny", "translate", "model"),
}


def train_all() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """On this rank: each case in turn, two steps."""
    echelon.init()
    return {case: _train(*CASES[case]) for case in CASES}


def _train(name: str, task: str, marks: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    asked = tiny(name, task, **({"attention_dropout": 0.0} if name.startswith("bert") else {}))
    model = entry_of(name).build(asked)
    echelon.annotate(model, entry_of(name).split if marks == "model" else marks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(model, loss=TASKS[task].loss, optimizer=optimizer, log=QUIET)
    losses = []
    for step in range(2):
        batch = batch_of(task, asked, seed=step)
        if name == "t5_moe_tiny" and echelon.world_size() > 1:  # each device of an experts' split has its own
            batch = tuple(part.chunk(2)[echelon.rank()] for part in batch)
        losses.append(float(engine.step(*batch)))
    weights = engine.whole_state()
    engine.close()
    return losses, weights


def test_two_ranks_train_as_one_process() -> None:
    (one,), ranks = run(train_all, ranks=1), run(train_all, ranks=2)
    for case in CASES:
        losses, weights = one[case]
        for found, state in (each[case] for each in ranks):
            assert found == pytest.approx(losses, abs=1e-5), case
            assert state.keys() == weights.keys(), case
            for name, expected in weights.items():
                assert (state[name] - expected).abs().max() < 1e-5, f"{case}: {name}"
