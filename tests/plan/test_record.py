"""Recording a forward pass tells what each stage needs, leaves nothing behind, and names what cannot be cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import CPU
from torch import Tensor, nn

from echelon.base.config import build
from echelon.base.errors import UsageError
from echelon.parallel.objective import Objective
from echelon.plan.partition import balance_stages, count_operations, find_units
from echelon.plan.pytree import take_apart
from echelon.plan.stage_trace import StageTrace, record

torch.set_num_threads(1)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


X, Y = torch.arange(12.0).view(3, 4), torch.ones(3, 4)


def recorded(model: nn.Module, units: dict[str, int], batch: Any = (X, Y), loss: Any = F.mse_loss) -> StageTrace:
    return record(Objective(model, loss, None, CPU), model, batch, units)


class Net(nn.Module):
    """Three layers, and a forward that a test gives."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.run = [forward]  # in a list: a function is no module, but should not become a method either

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.run[0](self, x)
        return result


ABC = {"a": 0, "b": 1, "c": 2}


def edges(recording: StageTrace) -> set[tuple[str, int, int]]:
    return {(one.key, one.source, one.target) for one in recording.transfers}


# ---- what is needed ----


def test_only_what_is_used_travels() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        k = net.b(h)
        _ = h * 2  # and it is unused
        return net.c(k)

    recording = recorded(Net(forward), ABC)
    assert edges(recording) == {("a#0/0", 0, 1), ("b#0/0", 1, 2)}
    assert recording.inputs == ((True, False), (False, False), (False, True))
    assert recording.kept == ((), (), ("c#0/0",))


def test_an_argument_that_a_unit_does_not_touch_does_not_travel() -> None:
    class Second(nn.Linear):
        def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
            assert extra is not None
            return super().forward(x)

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        return net.c(net.b(x, extra=h))

    model = Net(forward)
    model.b = Second(4, 4)
    assert edges(recorded(model, ABC)) == {("b#0/0", 1, 2)}


def test_what_a_unit_uses_without_being_given_it_is_found() -> None:
    class Second(nn.Linear):
        memory: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.memory

    def forward(net: Net, x: Tensor) -> Tensor:
        net.b.memory = net.a(x)
        return net.c(net.b(x))

    model = Net(forward)
    model.b = Second(4, 4)
    assert ("a#0/0", 0, 1) in edges(recorded(model, ABC))
    assert not hasattr(model.b, "memory")  # set while recording, and gone with it


def test_views_and_changes_in_place_are_followed() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        base = torch.zeros(3, 8)
        row = base.view(2, 3, 4)[1]
        row += h
        k = net.b(x)
        return net.c(base[:, :4] + k)  # of base, which has got h through a view of a view

    assert edges(recorded(Net(forward), ABC)) == {("a#0/0", 0, 2), ("b#0/0", 1, 2)}


def test_who_changes_a_tensor_is_noted() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        h += 1
        k = net.b(h)
        k.mul_(2)
        return net.c(k)

    first, second = recorded(Net(forward), ABC).transfers
    assert (first.changed_at_source, first.changed_at_target) == (True, True)  # every pass that comes by does it
    assert (second.changed_at_source, second.changed_at_target) == (True, True)


def test_lists_of_modules_are_marked_as_a_whole() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = nn.ModuleList([linear(), linear()]), nn.ModuleDict({"only": linear()})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.lower:
                x = layer(x)
            return self.upper["only"](x)

    assert recorded(Lists(), {"lower": 0, "upper": 1}).units == {"lower.0": 0, "lower.1": 0, "upper.only": 1}


def test_a_recording_survives_json() -> None:
    recording = recorded(Net(lambda net, x: net.c(net.b(net.a(x)))), ABC)
    plain = {
        "units": recording.units,
        "transfers": [vars(one) for one in recording.transfers],
        "holders": {name: list(stages) for name, stages in recording.holders.items()},
        "inputs": [list(flags) for flags in recording.inputs],
        "kept": [list(keys) for keys in recording.kept],
        "written": [],
    }
    assert build(StageTrace, plain) == recording


# ---- nothing is left behind ----


def test_nothing_is_left_behind() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), linear()
            self.calls, self.latest = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.latest = self.norm(self.drop(x)) * random.random()
            x.add_(1)
            return self.head(self.body(self.latest))

    model, batch = Noisy(), (X.clone(), Y.clone())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    drawn, python, grad = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled()
    with torch.no_grad():
        recording = recorded(model, {"body": 0, "head": 1}, batch)
    assert recording.written == (0,)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert objects == {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == python
    assert torch.is_grad_enabled() == grad
    assert (model.calls, model.latest) == (0, None)
    assert all(value.grad is None for value in model.parameters())
    assert torch.equal(batch[0], X)
    assert {type(part) for part in model.modules()} == {Noisy, nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.Dropout}


def test_units_are_not_computed() -> None:
    class Huge(nn.Module):
        """A unit whose arithmetic would take minutes and whose result would not fit into memory."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            wide = (x * self.weight).sum().expand(2**20, 2**20) * 2
            return (wide @ wide)[:3, :4]

    recording = recorded(nn.Sequential(Huge(), Huge()), {"0": 0, "1": 1})
    assert edges(recording) == {("0#0/0", 0, 1)}


# ---- mistakes ----


def mistake(forward: Any, units: dict[str, int] = ABC) -> str:
    with pytest.raises(UsageError) as caught:
        recorded(Net(forward), units)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def straight(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.c(net.b(net.a(x)))
    return out


def test_stages_that_go_backwards() -> None:
    assert mistake(straight, {"a": 0, "b": 1, "c": 0}) == (
        "'c' of stage 0 is called after a module of stage 1; stages run one after another, so give 'c' stage 1, or "
        "the modules called before it stage 0"
    )


def test_a_unit_that_is_never_called() -> None:
    said = mistake(lambda net, x: net.b(net.a(x)))
    assert said == "'c' has stage 2, but the forward never calls it; give the stage to a module that is called"


def test_a_stage_without_units() -> None:
    assert mistake(straight, {"a": 0, "c": 2}).startswith("stage 1 has no module; give it one")


def test_a_name_that_does_not_exist() -> None:
    assert mistake(straight, {"a": 0, "nrom": 1}) == "stage 1: no module is called 'nrom'; did you mean 'norm'?"


@pytest.mark.parametrize(
    "look",
    [lambda h: bool(h.mean() > 0), lambda h: h.sum().item(), lambda h: h.tolist(), lambda h: h.detach().numpy()],
    ids=["bool", "item", "tolist", "numpy"],
)
def test_control_flow_by_what_a_unit_returns(look: Any) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x) * 2
        return net.c(net.b(h)) if look(h) else net.c(h)

    said = mistake(forward)
    assert said.startswith("the forward reads values of the output of 'a' (")
    assert said.endswith("move that decision into a module with a stage, or decide by the batch")


def test_a_unit_that_changes_what_another_stage_uses() -> None:
    class Second(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu_())

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x) * 1
        return net.c(net.b(h) + h)

    model = Net(forward)
    model.b = Second(4, 4)
    with pytest.raises(
        UsageError, match=r"^'b' of stage 1 changes a tensor in place that stage 2 uses too; use inplace"
    ):
        recorded(model, ABC)
    assert recorded(model, {"a": 0, "b": 1, "c": 1}).stages == 2  # as told


def test_random_numbers_that_two_stages_would_draw() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.drop(net.a(x))
        return net.c(net.b(h) + h)

    said = mistake(forward)
    assert said.startswith("stages 1 and 2 use the same random numbers (aten::")
    assert said.endswith("give the module that draws them a stage")


def test_objects_that_hide_tensors() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Boxing(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x))

    model = Net(lambda net, x: net.c(net.b(net.a(x).value)))
    model.a = Boxing(4, 4)
    with pytest.raises(UsageError, match=r"^'a' returns a Box, in which tensors cannot be found; return tensors"):
        recorded(model, ABC)


def keep_inner(net: Net, kept: list[Tensor], unit: str) -> None:
    net.get_submodule(unit).register_forward_hook(lambda module, args, output: kept.append(output * 2))


@pytest.mark.parametrize(("unit", "stage"), [("a", 0), ("b", 1)])
def test_a_captured_inner_tensor_in_the_loss_is_refused(unit: str, stage: int) -> None:
    kept: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        kept.clear()
        return net.c(net.b(net.a(x))) + kept[0].mean()

    model = Net(forward)
    keep_inner(model, kept, unit)
    with pytest.raises(UsageError, match=rf"stage 2 uses a tensor that was made inside '{unit}' of stage {stage}"):
        recorded(model, ABC)


def test_a_captured_inner_tensor_of_the_last_stage_counts() -> None:
    kept: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        kept.clear()
        return net.c(net.b(net.a(x))) + kept[0].mean()

    model = Net(forward)
    keep_inner(model, kept, "c")
    assert edges(recorded(model, ABC)) == {("a#0/0", 0, 1), ("b#0/0", 1, 2)}


def test_a_captured_inner_tensor_outside_of_the_loss_stays() -> None:
    kept: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Any:
        kept.clear()
        return net.c(net.b(net.a(x))), kept[0]

    model = Net(forward)
    keep_inner(model, kept, "a")
    assert edges(recorded(model, ABC, loss=lambda output, y: F.mse_loss(output[0], y))) == {
        ("a#0/0", 0, 1),
        ("b#0/0", 1, 2),
    }


def test_one_module_with_two_stages() -> None:
    model = Net(straight)
    model.c = model.a
    with pytest.raises(UsageError, match=r"^'a' and 'c' are one module, but have stages 0 and 2; give it one"):
        recorded(model, ABC)


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        recorded(Net(lambda net, x: net.a(x[:, :3])), {"a": 0, "b": 1, "c": 2})


# ---- taking values apart ----


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    )
)
@settings(max_examples=50)
def test_what_is_taken_apart_goes_together_again(value: Any) -> None:
    parts = take_apart(value)
    assert parts.together(parts.leaves) == value


# ---- cutting by cost ----


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1, self.layer2 = nn.Sequential(Block(), Block()), nn.Sequential(Block())
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv2d(4, 4, 3, padding=1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.down(x)


def test_units_are_blocks_and_children_of_sequentials() -> None:
    transformer, _ = zoo.build("transformer")
    convnet, _ = zoo.build("convnet")
    assert find_units(transformer) == ["layers.layers.0", "layers.layers.1"]
    assert find_units(convnet) == [f"body.{i}" for i in range(6)]
    assert find_units(Resnet()) == ["layer1.0", "layer1.1", "layer2.0"]
    assert find_units(nn.Sequential(nn.Embedding(9, 4), transformer.layers, linear())) == [
        "0", "1.layers.0", "1.layers.1", "2"
    ]  # fmt: skip
    gpt = nn.Module()
    gpt.transformer = nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": nn.ModuleList([Block(), Block()])})
    assert find_units(gpt) == ["transformer.h.0", "transformer.h.1"]
    mlp = nn.Module()
    mlp.layers = nn.ModuleList([linear(), linear()])
    assert find_units(mlp) == ["layers.0", "layers.1"]


def test_arithmetic_is_counted_with_the_glue_around_it() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            x = x @ torch.ones(8, 8)  # of the second layer
            return self.layers[1](x) @ torch.ones(2, 5)  # after the last: its own

    model = Uneven()
    call = Objective(model, lambda output: output.sum(), None, CPU)
    costs = count_operations(model, call, (X,), ["layers.0", "layers.1"])
    assert [names for names, _ in costs] == [["layers.0"], ["layers.1"]]
    assert costs[0][1] == 2 * 3 * 4 * 8
    assert costs[1][1] == 2 * 3 * 8 * 8 + 2 * 3 * 8 * 2 + 2 * 3 * 2 * 5 + (64 + 10) + 1  # two ones(), one sum


def test_stages_of_equal_cost() -> None:
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in ((4, 64), (64, 64), (64, 64), (64, 4), (4, 4), (4, 4))))
    call = Objective(model, F.mse_loss, None, CPU)
    by_cost = balance_stages(model, 2, call, (X, Y))
    assert list(by_cost.values()) == [0, 0, 1, 1, 1, 1]
    assert balance_stages(model, 2) == by_cost  # parameters say the same of linear layers
    assert list(balance_stages(model, 2, call, (X, Y), weights=(1.0, 9.0)).values()) == [0, 1, 1, 1, 1, 1]
    assert recorded(model, by_cost).stages == 2


def test_units_that_are_called_again_stay_together() -> None:
    class Albert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([linear() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for at in (0, 1, 2, 1, 3):
                x = self.layers[at](x)
            return x

    model = Albert()
    call = Objective(model, F.mse_loss, None, CPU)
    stages = balance_stages(model, 3, call, (X, Y))
    assert stages == {"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 2}
    assert recorded(model, stages).stages == 3
    with pytest.raises(UsageError, match=r"^4 stages were requested, but only 3 modules run one after another"):
        balance_stages(model, 4, call, (X, Y))


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.data())
@settings(max_examples=40)
def test_no_other_cut_is_quicker(sizes: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(sizes)))
    speeds = tuple(data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=stages, max_size=stages)))
    model = nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))
    found = list(balance_stages(model, stages, weights=speeds).values())
    assert sorted(set(found)) == list(range(stages))
    assert found == sorted(found)

    def slowest(cut: list[int]) -> float:
        return max(sum(s for s, at in zip(sizes, cut, strict=True) if at == k) / speeds[k] for k in range(stages))

    assert slowest(found) == pytest.approx(min(slowest(cut) for cut in _cuts(len(sizes), stages)))


def _cuts(units: int, stages: int) -> list[list[int]]:
    if stages == 1:
        return [[0] * units]
    return [
        [*inner, *[stages - 1] * last]
        for last in range(1, units - stages + 2)
        for inner in _cuts(units - last, stages - 1)
    ]
