"""Recomputed activations: the same bits as kept ones, in less memory."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import echelon
from echelon.base.errors import UsageError
from echelon.parallel.activation_checkpoint import apply_recompute
from echelon.plan.saved_bytes import SavedBytes, activation_bytes
from echelon.plan.segments import balance, cut_chain, find_chains, find_segments

# ---- models, each with something that recomputation easily gets wrong ----


class Encoder(nn.Module):
    """Dropout (in attention and outside), a mask by keyword, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=x == 0))


class Power(nn.Module):
    """Reads a buffer and replaces it; reads another and changes it in place; both decide the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("direction", F.normalize(torch.ones(6), dim=0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.direction = F.normalize(self.weight @ self.direction, dim=0)
            self.calls += 1
        return torch.tanh(x @ self.weight / (self.direction @ self.weight @ self.direction) * self.calls.clone())


class Tangle(nn.Module):
    """Keywords, nested inputs and outputs, an argument given three times, random numbers, a block called twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.norm = nn.BatchNorm1d(6)
            self.power = Power()

        def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float, bias: Tensor | None = None) -> Any:
            x, extra = pair
            x = self.norm(x.transpose(1, 2)).transpose(1, 2) * scale + extra["shift"]
            attended, _ = self.attention(x, x, x)
            noise = torch.randn_like(x) + torch.rand(())
            y = self.power(attended + noise)
            return {"out": y if bias is None else y + bias, "more": [(attended.sin(), "a word")]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.bias = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None, :].expand(-1, 4, -1)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            result = block((h, {"shift": h.mean()}), scale=0.5, bias=self.bias)
            h = result["out"] + result["more"][0][0]
        return self.head(h.mean(1))


class Features(nn.Module):
    """A long chain as in VGG: in-place activations, a shared one, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU(inplace=True)
        layers: list[nn.Module] = [nn.ReLU(inplace=True)]
        for inner, outer in itertools.pairwise((3, 8, 8, 12, 12)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), act]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(12 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x * 1.5))


def conv_blocks() -> nn.Sequential:
    def block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inner, outer, 3), nn.BatchNorm2d(outer), nn.ReLU())

    return nn.Sequential(block(3, 8), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


Recipe = tuple[Callable[[], nn.Module], str, Any]
CASES: dict[str, Recipe] = {
    "transformer with dropout": (Encoder, "transformer", "auto"),
    "transformer, named": (Encoder, "transformer", ("encoder.layers.[02]", "head")),
    "convnet, points in a chain": (zoo.ConvNet, "convnet", ("body.1", "body.4")),
    "convnet, a chain cut by bytes": (zoo.ConvNet, "convnet", "auto"),
    "convnet, batch norm alone": (zoo.ConvNet, "convnet", ("body.1",)),
    "blocks in a root Sequential": (conv_blocks, "convnet", "auto"),
    "in-place chain": (Features, "convnet", "auto"),
    "tangle": (Tangle, "partial", "auto"),
}


def recompute(model: nn.Module, checkpoints: Any, group: Any = None) -> None:
    chains = find_chains(model) if checkpoints == "auto" else ()
    apply_recompute(model, find_segments(model, checkpoints), chains, offload=False, group=group)


def made(case: str) -> tuple[nn.Module, Any]:
    make, data, _ = CASES[case]
    torch.manual_seed(3)
    return make(), zoo.token_loss if data == "transformer" else F.cross_entropy


def train(case: str, recomputed: bool, amp: bool, steps: int = 3) -> dict[str, Tensor]:
    """Everything that comes out of some steps of a hand-written loop."""
    model, loss_function = made(case)
    _, data, checkpoints = CASES[case]
    if recomputed:
        recompute(model, checkpoints)
    optimizer = zoo.sgd(model)
    torch.manual_seed(11)
    result: dict[str, Tensor] = {}
    for step in range(steps):
        x, y = zoo.batch_for(data, 6, step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result[f"loss {step}"] = loss.detach()
        result |= {f"grad {step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return result | dict(model.state_dict()) | {"random": torch.get_rng_state()}


def assert_same_bits(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    different = [name for name in mine if not torch.equal(mine[name], expected[name])]
    assert not different


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_without(case: str, amp: bool) -> None:
    assert_same_bits(train(case, True, amp), train(case, False, amp))


# ---- on two ranks, with the reducer and synchronized batch norm ----


def train_on_ranks(case: str, recomputed: bool) -> dict[str, Tensor]:
    model, loss_function = made(case)
    _, data, checkpoints = CASES[case]
    strategy = echelon.Strategy(recompute=echelon.Recompute(checkpoints=checkpoints) if recomputed else None)
    optimizer = zoo.sgd(model)
    engine = echelon.distribute(model, loss=loss_function, optimizer=optimizer, strategy=strategy, log=zoo.QUIET)
    torch.manual_seed(11)
    rows = slice(0, 5) if engine.world.rank == 0 else slice(5, 8)  # uneven: rank 0's bytes must decide for both
    losses = {}
    for step in range(3):
        x, y = zoo.batch_for(data, 8, step)
        losses[f"loss {step}"] = engine.step(x[rows], y[rows]).detach().clone()
    return losses | {name: value.clone() for name, value in model.state_dict().items()}


def both_on_ranks() -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    echelon.init()
    return {case: (train_on_ranks(case, True), train_on_ranks(case, False)) for case in CASES}


def test_same_bits_on_two_ranks() -> None:
    first, second = run(both_on_ranks, ranks=2)
    for case in CASES:
        for mine, expected in (first[case], second[case]):
            assert_same_bits(mine, expected)
        names = [*dict(made(case)[0].named_parameters()), "loss 0", "loss 1", "loss 2"]
        assert_same_bits({name: first[case][0][name] for name in names}, {n: second[case][0][n] for n in names})


def pooled_chain() -> nn.Sequential:
    """Activations kept before the pooling grow with the image; those kept after it do not."""
    wide = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*wide, nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Tanh(), nn.Flatten())


def cut_on_ranks() -> tuple[Any, Any]:
    """Return the cuts of a chain when ranks see images of different size, and the cuts of this rank alone."""
    world = echelon.init()
    image = torch.randn(2, 3, *((32, 32) if world.rank == 0 else (4, 4)))
    chain, alone = pooled_chain(), pooled_chain()
    for model, group in ((chain, world.control), (alone, None)):
        recompute(model, "auto", group)
        model(image)
    return chain.__dict__["_recompute_cuts"], alone.__dict__["_recompute_cuts"]


def test_ranks_cut_alike_whatever_they_see() -> None:
    first, second = run(cut_on_ranks, ranks=2)
    assert first[0] == first[1] == second[0]
    assert second[1] != second[0]


# ---- memory ----


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Count the storages that autograd keeps, by address, independently of the code under test."""
    storages = [t.untyped_storage() for t in [*model.parameters(), *model.buffers()]]
    persistent = {each.data_ptr(): each for each in storages}  # held: a buffer may be replaced, and its place be reused
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in persistent:
            kept[address] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def really_kept(model: nn.Module, x: Tensor) -> int:
    with counting(model) as kept:
        output = model(x)
        return kept() + 0 * output.numel()


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_less_is_kept_and_that_is_foretold(case: str, amp: bool) -> None:
    model, _ = made(case)
    _, data, checkpoints = CASES[case]
    x = zoo.batch_for(data, 6, 0)[0]
    chains = find_chains(model) if checkpoints == "auto" else ()
    segments = find_segments(model, checkpoints)
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        told_plain, told = activation_bytes(model, (x,)), activation_bytes(model, (x,), segments, chains)
        assert [type(module) for module in model.modules()] == kinds
        assert_same_bits(model.state_dict(), before)
        plain = really_kept(model, x)
        apply_recompute(model, segments, chains, offload=False, group=None)
        kept = really_kept(model, x)
    # In bf16 torch's shape functions take the few statistics that batch norm saves for bf16, where they are fp32.
    assert (told_plain, told) == pytest.approx((plain, kept), rel=0.01 if amp else 0)
    assert kept < plain


def test_a_deep_model_keeps_one_input_a_block() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(10)))
    x = torch.randn(32, 64)
    recompute(model, "auto")
    assert really_kept(model, x) == 10 * x.numel() * 4


def test_counting_holds_nothing_itself() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    with SavedBytes(model.parameters()) as saved:
        model(x).sum().backward()
    assert saved.total == 3 * x.numel() * 4  # x and two outputs of tanh, one of which two layers need


# ---- what stays as it is ----


@pytest.mark.parametrize("case", ["in-place chain", "tangle", "convnet, points in a chain"])
def test_names_types_and_evaluation_stay(case: str) -> None:
    model, _ = made(case)
    _, data, checkpoints = CASES[case]
    twin, x = copy.deepcopy(model), zoo.batch_for(data, 6, 0)[0]
    recompute(model, checkpoints)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    assert all(isinstance(a, type(b)) for a, b in zip(model.modules(), twin.modules(), strict=True))
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            torch.manual_seed(5)
            mine = really_kept(model.eval(), x), model(x)
            torch.manual_seed(5)
            theirs = really_kept(twin.eval(), x), twin(x)
            assert mine[0] == theirs[0]
            assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("case", ["in-place chain", "tangle"])
def test_a_deep_copy_is_a_model_of_its_own(case: str) -> None:
    model, loss_function = made(case)
    _, data, checkpoints = CASES[case]
    recompute(model, checkpoints)
    before = copy.deepcopy(model.state_dict())
    x, y = zoo.batch_for(data, 6, 0)
    twin = copy.deepcopy(model)
    plain_bytes = really_kept(made(case)[0], x)
    loss_function(twin(x), y).backward()
    assert_same_bits(dict(model.state_dict()), before)
    assert all(p.grad is None for p in model.parameters())
    assert really_kept(twin, x) < plain_bytes


def test_applying_again_replaces_what_was() -> None:
    model, _ = made("in-place chain")
    kinds = [type(module) for module in model.modules()]
    recompute(model, "auto")
    model(torch.randn(2, 3, 8, 8))  # now it is cut
    assert find_chains(model) == ("features",)
    recompute(model, ("features.3", "features.1"))
    assert find_segments(model, ("features.3",)) == (("features.0", "features.1", "features.2", "features.3"),)
    apply_recompute(model, (), (), offload=False, group=None)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(key.startswith("_recompute") for module in model.modules() for key in module.__dict__)


def test_a_slice_of_a_recomputed_sequential_runs() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    twin = copy.deepcopy(model)
    recompute(model, ("2", "4"))
    x = torch.randn(3, 4)
    assert torch.equal(model[1:](x), twin[1:](x))
    assert torch.equal(model[:2](x), twin[:2](x))


def test_offload_changes_nothing_on_a_cpu() -> None:
    model, loss_function = made("transformer with dropout")
    twin = copy.deepcopy(model)
    for each, offload in ((model, True), (twin, False)):
        apply_recompute(each, find_segments(each, "auto"), (), offload=offload, group=None)
        torch.manual_seed(1)
        x, y = zoo.batch_for("transformer", 6, 0)
        loss_function(each(x), y).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_backward_twice_through_one_graph() -> None:
    model, loss_function = made("tangle")
    recompute(model, "auto")
    x, y = zoo.batch_for("partial", 6, 0)
    loss = loss_function(model(x), y)
    state = copy.deepcopy(model.state_dict())
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_same_bits(dict(model.state_dict()), dict(state))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
@pytest.mark.parametrize("case", ["transformer with dropout", "blocks in a root Sequential"])
def test_compiled_models_keep_their_numbers(case: str) -> None:
    results = []
    for recomputed in (True, False):
        model, loss_function = made(case)
        if recomputed:
            recompute(model, "auto")
        torch.compiler.reset()
        model.compile(backend="aot_eager")
        torch.manual_seed(5)
        x, y = zoo.batch_for(CASES[case][1], 6, 0)
        loss_function(model(x), y).backward()
        gradients = {f"grad {name}": p.grad for name, p in model.named_parameters()}
        results.append(dict(model.state_dict()) | gradients)
    assert_same_bits(*results)


# ---- which segments ----


class Stages(nn.Module):
    """Blocks in stages, as in a ResNet, and a stage that holds only one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.layer1 = nn.Sequential(Partition(), Partition())
        self.layer2 = nn.Sequential(Partition())
        self.stages = nn.Sequential(nn.Sequential(Partition(), Partition()), nn.Sequential(Partition(), Partition()))


class Partition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](self.fc(x))


def own_forward() -> nn.Module:
    class Dense(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + self[0](x) + self[1](x)

    return nn.Sequential(Dense(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))


def vgg() -> nn.Module:
    return nn.Sequential(Features().features, nn.Sequential(nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 5)))


RULES: list[tuple[Callable[[], nn.Module], Any, list[list[str]]]] = [
    # named children of a Sequential are points: all since the one before
    (vgg, ("0.3", "0.6"), [["0.0", "0.1", "0.2", "0.3"], ["0.4", "0.5", "0.6"]]),
    (vgg, ("0",), [["0"]]),
    (vgg, ("1",), [["0", "1"]]),
    # anywhere else: a segment of their own
    (Encoder, ("encoder.layers.1",), [["encoder.layers.1"]]),
    (Encoder, ("encoder.layers.1", "embed"), [["embed"], ["encoder.layers.1"]]),
    (own_forward, ("0.1",), [["0.1"]]),
    # patterns; of nested matches the outer one
    (Encoder, ("encoder.layers.*",), [[f"encoder.layers.{i}"] for i in range(3)]),
    (Encoder, ("enc*",), [["encoder"]]),
    (Encoder, ("encoder.layers.*", "*.linear1", "encoder"), [["encoder"]]),
    (Encoder, ("*.self_attn",), [[f"encoder.layers.{i}.self_attn"] for i in range(3)]),
    (vgg, ("1", "0.3"), [["0", "1"]]),
    (Stages, ("layer1.0.fc",), [["layer1.0.fc"]]),
    (Stages, ("layer1.0", "layer1.1.fc"), [["layer1.0"], ["layer1.1.fc"]]),
    # repeated blocks
    (Encoder, "auto", [[f"encoder.layers.{i}"] for i in range(3)]),
    (conv_blocks, "auto", [["0"], ["1"]]),
    (Stages, "auto", [[f"layer1.{i}"] for i in range(2)]
        + [["layer2.0.experts.0"], ["layer2.0.experts.1"]]
        + [[f"stages.{i}.{j}"] for i in range(2) for j in range(2)]),
    # no blocks but chains, to be cut by bytes
    (vgg, "auto", []),
    (Features, "auto", []),
]  # fmt: skip


@pytest.mark.parametrize(("make", "checkpoints", "expected"), RULES)
def test_rules(make: Callable[[], nn.Module], checkpoints: Any, expected: list[list[str]]) -> None:
    found = find_segments(make(), checkpoints)
    assert json.loads(json.dumps(found)) == expected


def test_chains() -> None:
    assert find_chains(vgg()) == ("0",)
    assert find_chains(Features()) == ("features",)
    assert find_chains(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))) == ("",)
    assert find_chains(Stages()) == ()


@pytest.mark.parametrize(
    ("make", "checkpoints", "line"),
    [
        (Encoder, ("encoder.layer.*",), "no module is called 'encoder.layer.*'; did you mean 'encoder.layers'?"),
        (Encoder, ("blocks.1",), "no module is called 'blocks.1'; there are embed, encoder, encoder.layers"),
        (Encoder, ("encoder.layers",), "'encoder.layers' is a ModuleList, which only holds modules; name 'encoder.la"),
        (lambda: nn.Linear(2, 2), "auto", "neither repeated blocks nor a long nn.Sequential"),
        (zoo.Partial, "auto", "checkpoints=('first', ...)"),
    ],
)
def test_what_cannot_be_found(make: Callable[[], nn.Module], checkpoints: Any, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_segments(make(), checkpoints)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- cutting ----


def best_by_trying_all(weights: list[int], parts: int) -> int:
    return min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))
        for cuts in itertools.combinations(range(1, len(weights)), parts - 1)
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
@settings(max_examples=150)
def test_balance_is_the_best_there_is(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    cuts = balance(weights, parts)
    assert len(cuts) == parts
    assert [i for first, end in cuts for i in range(first, end)] == list(range(len(weights)))
    assert all(first < end for first, end in cuts)
    assert max(sum(weights[first:end]) for first, end in cuts) == best_by_trying_all(weights, parts)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=16))
@settings(max_examples=150)
def test_a_chain_is_never_cut_before_an_in_place_child(children: list[tuple[int, bool]]) -> None:
    kept, in_place = [size for size, _ in children], [changes for _, changes in children]
    cuts = cut_chain(kept, in_place)
    free = [i for i, changes in enumerate(in_place) if not changes]
    assert all(not in_place[first] for first, _ in cuts)
    assert [i for first, end in cuts for i in range(first, end)] == list(range(min(free, default=len(kept)), len(kept)))
    assert len(cuts) == min(round(len(kept) ** 0.5), len(free))


# ---- mistakes ----


class Cache:
    """A model that passes its cache on, as transformers' models do by default."""

    def get_seq_length(self) -> int:
        return 0


class Cached(nn.Linear):
    def forward(self, input: Tensor, past_key_values: Cache | None = None) -> Tensor:
        return super().forward(input)


def test_a_cache_that_would_be_filled_twice_is_refused() -> None:
    model = nn.Sequential(Cached(4, 4))
    recompute(model, ("0",))
    assert model[0](torch.randn(2, 4)).shape == (2, 4)
    with pytest.raises(UsageError, match=r"Cached is given a cache of keys and values.*use_cache = False$"):
        model[0](torch.randn(2, 4), past_key_values=Cache())


def test_an_input_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    recompute(model, ("0", "2"))
    with pytest.raises(UsageError, match="ReLU changes its input in place"):
        model(torch.randn(2, 4))


def test_weights_that_changed_before_backward_are_refused() -> None:
    model, loss_function = made("transformer with dropout")
    recompute(model, "auto")
    x, y = zoo.batch_for("transformer", 6, 0)
    loss = loss_function(model(x), y)
    with torch.no_grad():
        model.encoder.layers[1].linear1.weight.mul_(2)
    with pytest.raises(UsageError, match="a weight of TransformerEncoderLayer changed between forward and backward"):
        loss.backward()


def test_a_forward_replaced_on_the_module_is_refused() -> None:
    model = Encoder()
    layer = model.encoder.layers[1]
    layer.forward = layer.forward  # what patching libraries do
    with pytest.raises(UsageError, match=r"forward\(\) of 'encoder.layers.1' was replaced"):
        recompute(model, "auto")
