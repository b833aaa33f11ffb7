"""Stages, each on a model of its own that keeps only what it needs, give the numbers of one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from harness import run
from staged import CPU, FixedWeights, Staged, assert_same_step, plain_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.base.errors import UsageError
from echelon.parallel.activation_checkpoint import apply_recompute
from echelon.parallel.objective import Objective
from echelon.parallel.pipeline.placeholder_pool import holds, keep_only
from echelon.parallel.pipeline.schedule_loop import StageTransfer, run_schedule
from echelon.parallel.pipeline.split_backward import WeightGradStore, defer_weight_grads
from echelon.parallel.pipeline.stage_runner import StageRunner
from echelon.parallel.pipeline.transport import PipelineLinks
from echelon.plan.fake_forward import is_placeholder
from echelon.plan.schedule import make_schedule
from echelon.plan.stage_trace import record
from echelon.strategy import Amp
from echelon.strategy.annotations.marks import ScheduleName

torch.set_num_threads(1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def regression(count: int = 3, width: int = 8, samples: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(numbers(samples, width, seed=i), numbers(samples, width, seed=100 + i)) for i in range(count)]


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*(sizes or (8, 8)))


# ---- models ----


class UNet(nn.Module):
    """Skips that pass over stages, and one that begins and ends in glue."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 1),
        )
        self.up2, self.up1 = nn.ConvTranspose2d(16, 4, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down1(x))
        second = self.down2(first)
        deep = self.middle(second)
        up = self.up2(torch.cat([deep, second], 1))
        return self.up1(torch.cat([up, first], 1)) + x


UNET_STAGES = {"down1": 0, "down2": 1, "middle": 1, "up2": 2, "up1": 3}


@dataclasses.dataclass
class State:
    hidden: Tensor
    note: str
    gate: Tensor | None = None


class ModelOutput(OrderedDict[str, Any]):
    """Outputs as in transformers: fields and items at once, and not known to torch's pytree."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__.update(entries)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> State:
        hidden = self.inner(x) * scale
        return State(hidden if mask is None else hidden.masked_fill(mask, 0.0), "made", hidden.sigmoid())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, state: State) -> ModelOutput:
        assert state.note == "made"
        assert state.gate is not None
        return ModelOutput(last=self.inner(state.hidden) * state.gate, none=None, many=(state.hidden, [state.gate]))


class Structured(nn.Module):
    """Keyword arguments, masks, dataclasses, dicts and None between units."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Encoder(), Decoder(), linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor, scale: float) -> dict[str, Tensor]:
        state = self.encoder(x=x, mask=mask, scale=scale)
        out = self.decoder(state)
        assert out["none"] is None
        hidden, (gate,) = out["many"]
        return {"logits": self.head(out["last"] + hidden * gate.mean()), "hidden": hidden}


def named_loss(output: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(output["logits"], batch["y"]) + 0.1 * output["hidden"].square().mean()


def named_batches(count: int = 2) -> list[dict[str, Any]]:
    return [
        {"x": numbers(5, 8, seed=i), "mask": numbers(5, 8, seed=9 + i) > 0.5, "scale": 1.5, "y": torch.arange(5) % 3}
        for i in range(count)
    ]


class SharedGlue(nn.Module):
    """Parameters and buffers outside of units that two stages use, and a head tied to what the first unit reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((8,), 1.5))
        self.norm = nn.BatchNorm1d(8)
        self.unused = linear()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.register_buffer("table", numbers(8, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x * self.gain))  # its batch norm runs wherever h is used
        k = self.second(h.tanh() * self.table)
        return F.linear(self.third(k * self.gain + h), self.first.weight)


class InPlace(nn.Module):
    """Glue that writes into what units return, and into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        h = self.a(x)
        early = h * 2
        h += x
        h[:, 0] = h[:, 1] * 3
        k = self.b(h)
        k.relu_()
        wide = torch.zeros(len(x), 16)
        wide[:, :8] = k
        wide[:, 8:].copy_(h.view(-1, 8) + early)
        return self.c(wide.view(-1, 2, 8).sum(1))


class ByInput(nn.Module):
    """Control flow by values of the batch, decided in glue."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.extra = linear(), linear(), linear(), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        h = self.a(x)
        if flags.any():
            h = h * self.extra
        for _ in range(int(flags.sum())):
            h = self.b(h).tanh()
        if flags.tolist()[0]:
            h = h + 1
        return self.c(h)


class Chosen(nn.Module):
    """Glue selects by a mask of the batch between stages, and another after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.a(x)[mask])[:, 1:]


class Expert(nn.Module):
    """Sets an auxiliary loss, and looks at values of its input as routing does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router = linear(), linear(8, 1)
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).squeeze(1)
        self.auxiliary_loss = weight.square().mean()
        chosen = (weight > 0).nonzero().squeeze(1)
        out = x.clone()
        out[chosen] = self.inner(x[chosen])
        return out * weight[:, None]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Expert(), Expert(), Expert()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Recurrent(nn.Module):
    """One module called several times, and a recurrent one, whose weights live in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.memory, self.head = linear(), nn.LSTM(8, 8, batch_first=True), linear()

    def forward(self, x: Tensor) -> Tensor:
        steps = [self.cell(x)]
        for _ in range(2):
            steps.append(self.cell(steps[-1].tanh()))
        out, (hidden, _) = self.memory(torch.stack(steps, 1))
        return self.head(out[:, -1] + hidden[0] + steps[0])


# ---- parity ----


def test_convnet_with_batch_norm() -> None:
    model, loss = zoo.build("convnet")
    batches = [zoo.batch_for("convnet", 4, step) for step in range(3)]
    units = {**{f"body.{i}": i // 3 for i in range(6)}, "head": 2}
    assert_same_step(Staged(model, loss, batches[0], units), model, loss, batches)


@pytest.mark.parametrize(
    "units",
    [
        {"layers.layers.0": 0, "layers.layers.1": 1},
        {"embed": 0, "layers.layers.0": 0, "layers.layers.1": 1, "head": 2},
        {"embed": 0, "layers": 1, "head": 2},
    ],
    ids=["glue", "units", "whole encoder"],
)
def test_tied_transformer(units: dict[str, int]) -> None:
    model, loss = zoo.build("transformer")
    batches = [zoo.batch_for("transformer", 3, step) for step in range(2)]
    staged = Staged(model, loss, batches[0], units)
    assert staged.recording.holders["embed.weight"] == (0, staged.stages[-1])
    assert_same_step(staged, model, loss, batches)


def test_skips_across_stages() -> None:
    model = UNet()
    batches = [(numbers(2, 3, 8, 8, seed=i), numbers(2, 3, 8, 8, seed=9 + i)) for i in range(2)]
    staged = Staged(model, F.mse_loss, batches[0], UNET_STAGES)
    assert {(one.key, one.source, one.target) for one in staged.recording.transfers} == {
        ("down1#0/0", 0, 1), ("down2#0/0", 1, 2), ("middle#0/0", 1, 2), ("up2#0/0", 2, 3), ("down1#0/0", 0, 3)
    }  # fmt: skip
    assert_same_step(staged, model, F.mse_loss, batches)


def test_structures_masks_keywords_and_a_named_batch() -> None:
    model, batches = Structured(), named_batches()
    staged = Staged(model, named_loss, batches[0], {"encoder": 0, "decoder": 1, "head": 2})
    assert_same_step(staged, model, named_loss, batches)


def test_glue_parameters_of_two_stages() -> None:
    model = SharedGlue()
    staged = Staged(model, F.mse_loss, regression()[0], {"first": 0, "second": 1, "third": 2})
    holders = staged.recording.holders
    assert holders["gain"] == (0, 2)
    assert holders["first.weight"] == (0, 2)
    assert holders["norm.running_mean"] == holders["norm.num_batches_tracked"] == holders["norm.bias"] == (1, 2)
    assert holders["table"] == (1,)
    assert holders["unused.weight"] == (0,)
    assert_same_step(staged, model, F.mse_loss, regression())


@pytest.mark.parametrize("b", [0, 1])
def test_changes_in_place(b: int) -> None:
    model, batches = InPlace(), regression()
    staged = Staged(model, F.mse_loss, batches[0], {"a": 0, "b": b, "c": b + 1})
    assert staged.recording.written == (0,)
    assert_same_step(staged, model, F.mse_loss, copy.deepcopy(batches))


def test_changes_in_place_between_stages_of_one_rank() -> None:
    model, batches = InPlace(), regression()
    staged = Staged(model, F.mse_loss, batches[0], {"a": 0, "b": 1, "c": 2}, ranks=[[0, 2], [1]])
    assert_same_step(staged, model, F.mse_loss, batches)


def test_control_flow_by_the_batch() -> None:
    model = ByInput()
    flags = [torch.tensor([True, False, True]), torch.tensor([False, True, True])]
    batches = [(numbers(4, 8, seed=i), each, numbers(4, 8, seed=9)) for i, each in enumerate(flags)]
    staged = Staged(model, F.mse_loss, batches[0], {"a": 0, "b": 1, "c": 2})
    assert staged.recording.inputs == ((True, True, False), (False, True, False), (False, True, True))
    assert_same_step(staged, model, F.mse_loss, batches)


def test_another_way_through_the_forward_is_an_error() -> None:
    model = ByInput()
    flags = [torch.tensor([False, True, False]), torch.tensor([False, False, False])]
    batches = [(numbers(4, 8, seed=i), each, numbers(4, 8, seed=9)) for i, each in enumerate(flags)]
    staged = Staged(model, F.mse_loss, batches[0], {"a": 0, "b": 1, "c": 2})
    with pytest.raises(UsageError, match=r"^'c' needs a value that it did not need when stages were cut"):
        staged.step(batches[1:], [1.0])  # b is left out, so c would need a's output


def test_selection_by_a_mask() -> None:
    model = Chosen()
    batches = [
        (numbers(4, 8, seed=i), torch.tensor([True, False, True, i > 0]), numbers(2 + (i > 0), 7, seed=i))
        for i in range(2)
    ]
    assert_same_step(Staged(model, F.mse_loss, batches[0], {"a": 0, "b": 1}), model, F.mse_loss, batches)


def test_modules_called_several_times() -> None:
    model = Recurrent()
    staged = Staged(model, F.mse_loss, regression()[0], {"cell": 0, "memory": 1, "head": 2})
    assert_same_step(staged, model, F.mse_loss, regression())


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 1, 2, 3]], [[0, 3], [1, 2]]])
def test_several_stages_on_one_rank(ranks: list[list[int]]) -> None:
    model = UNet()
    batches = [(numbers(2, 3, 8, 8, seed=i), numbers(2, 3, 8, 8, seed=9 + i)) for i in range(2)]
    staged = Staged(model, F.mse_loss, batches[0], UNET_STAGES, ranks=ranks)
    assert_same_step(staged, model, F.mse_loss, batches)


def test_batches_of_other_shapes_than_recorded() -> None:
    model, loss = zoo.build("transformer")
    staged = Staged(model, loss, zoo.batch_for("transformer", 4, 0), {"layers.layers.0": 0, "layers.layers.1": 1})
    batches = [tuple(part[:samples, :length] for part in zoo.batch_for("transformer", 4, 1)) for samples, length in ((4, 7), (1, 7), (3, 5))]  # fmt: skip # noqa: E501
    assert_same_step(staged, model, loss, batches)


def test_autocast() -> None:
    model, loss = zoo.build("transformer")
    batches = [zoo.batch_for("transformer", 4, step) for step in range(2)]
    units = {"embed": 0, "layers.layers.0": 0, "layers.layers.1": 1, "head": 1}
    assert_same_step(Staged(model, loss, batches[0], units, amp=Amp()), model, loss, batches, amp=Amp())


def test_recompute_inside_and_around_units() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Sequential(linear(), nn.ReLU(), linear()), linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(checkpoint(self.b, self.a(x), use_reentrant=False))

    model = Checkpointed()
    apply_recompute(model, (("a",),), (), offload=False, group=None)
    staged = Staged(model, F.mse_loss, regression()[0], {"a": 0, "b": 1, "c": 2})
    assert_same_step(staged, model, F.mse_loss, regression())


def test_frozen_units_get_no_gradient() -> None:
    model = nn.Sequential(linear().requires_grad_(False), linear(), linear().requires_grad_(False))
    staged = Staged(model, F.mse_loss, regression()[0], {"0": 0, "1": 1, "2": 2})
    assert_same_step(staged, model, F.mse_loss, regression())


def test_evaluation_gives_the_output_and_keeps_no_graph() -> None:
    model, loss = zoo.build("convnet")
    model.eval()
    batch = zoo.batch_for("convnet", 4, 0)
    staged = Staged(model, loss, batch, {"body": 0, "head": 1})
    staged.begin([batch], [1.0], training=False)
    made = staged.forward(0)
    last = staged.runners[1]
    with torch.no_grad():
        output = model(batch[0])
    torch.testing.assert_close(last.outputs[0], output)
    torch.testing.assert_close(last.losses[0], loss(output, batch[1]))
    assert not any(value.requires_grad for value in made.values() if value is not None)


# ---- auxiliary losses, parts of backward, memory ----


def test_auxiliary_losses_are_trained_where_they_arise() -> None:
    torch.manual_seed(1)
    model, batches, weights = Experts(), regression(), [0.5, 1.0, 2.0]
    staged = Staged(model, F.mse_loss, batches[0], {"layers.0": 0, "layers.1": 0, "layers.2": 1})
    losses = staged.step(batches, weights)
    for micro, ((x, y), weight) in enumerate(zip(batches, weights, strict=True)):
        loss = F.mse_loss(model(x), y)
        extra = [layer.auxiliary_loss for layer in model.layers]
        total = loss + sum(extra)
        (total * weight).backward()
        known = [runner.auxiliary.get(micro, torch.zeros(())) for runner in staged.runners.values()]
        torch.testing.assert_close(known[0], (extra[0] + extra[1]).detach())
        torch.testing.assert_close(losses[micro] + sum(known), total.detach())
    found = staged.gradients()
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-6, atol=1e-6)
    assert all(layer.auxiliary_loss is None for mine in staged.models for layer in mine.layers)


class Later:
    """A layer with a deferred part of backward, which counts its calls."""

    ran = 0

    def __init__(self) -> None:
        self.store, self.inside = WeightGradStore(), contextlib.ExitStack()

    def __enter__(self) -> None:
        self.inside.enter_context(defer_weight_grads(self.store))

    def __exit__(self, *_: object) -> None:
        self.inside.close()

    def run(self) -> None:
        Later.ran += len(self.store)
        self.store.run()


@pytest.mark.parametrize("parts", [("B",), ("I", "W")])
@pytest.mark.parametrize("defer", [None, Later])
def test_input_part_and_weight_part_make_a_whole(parts: tuple[Any, ...], defer: Any) -> None:
    Later.ran = 0
    model = SharedGlue()
    apply_recompute(model, (("second",),), (), offload=False, group=None)
    staged = Staged(model, F.mse_loss, regression()[0], {"first": 0, "second": 1, "third": 2}, defer=defer)
    assert_same_step(staged, model, F.mse_loss, regression(), parts=parts)
    assert Later.ran == (3 * 4 if defer else 0)  # first, second, third and the tied product, in each micro-batch


def test_weights_wait_for_their_part() -> None:
    model = nn.Sequential(linear(), linear())
    staged = Staged(model, F.mse_loss, regression()[0], {"0": 0, "1": 1}, defer=Later)
    staged.begin(regression(1), [1.0])
    staged.forward(0)
    staged.backward(0, parts=("I",))
    assert all(gradient is None for gradient in staged.gradients().values())
    for stage, runner in staged.runners.items():
        assert runner.backward(stage, 0, {}, "W") == {}
    assert all(gradient is not None for gradient in staged.gradients().values())


class Traced(nn.Linear):
    """Remembers, weakly, what it has computed."""

    seen: list[weakref.ref[Tensor]] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        Traced.seen.append(weakref.ref(out))
        return out


def test_activations_live_from_their_forward_to_their_backward() -> None:
    model = nn.Sequential(*(Traced(8, 8) for _ in range(4)))
    staged = Staged(model, F.mse_loss, regression()[0], {"0": 0, "1": 0, "2": 1, "3": 1})
    staged.begin(regression(6), [1.0] * 6)
    Traced.seen.clear()
    gc.collect()
    gc.disable()  # memory must not wait for the collector
    try:
        alive = []
        for micro in range(6):
            staged.forward(micro)
            if micro:
                staged.backward(micro - 1)
            alive.append(sum(ref() is not None for ref in Traced.seen))
        staged.backward(5)
        left = sum(ref() is not None for ref in Traced.seen)
    finally:
        gc.enable()
    assert alive == [4] * 6  # those of one micro-batch, however many have passed
    assert left == 0


def test_placeholders_keep_nothing_that_is_written_into_them() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), Traced(8, 8), linear()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            k = self.b(x)
            h *= k  # and it is unused
            return self.c(k)

    model = Wasteful()
    staged = Staged(model, F.mse_loss, regression()[0], {"a": 0, "b": 1, "c": 1})
    Traced.seen.clear()
    gc.disable()
    try:
        staged.step(regression(), [1.0] * 3)
        assert [ref() for ref in Traced.seen] == [None] * 3
    finally:
        gc.enable()


# ---- what a rank keeps ----


def test_a_rank_keeps_only_what_it_needs() -> None:
    model, loss = zoo.build("transformer")
    batch = zoo.batch_for("transformer", 2, 0)
    staged = Staged(model, loss, batch, {"layers.layers.0": 0, "layers.layers.1": 1})
    for stage, mine in enumerate(staged.models):
        real = {name for name, value in mine.named_parameters() if not is_placeholder(value)}
        assert real == {name for name, holders in staged.recording.holders.items() if stage in holders}
        assert mine.head.weight is mine.embed.weight
        assert [name for name, _ in mine.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert [tuple(value.shape) for value in mine.parameters()] == [tuple(v.shape) for v in model.parameters()]
        assert [holds(mine.layers.layers[i]) for i in (0, 1)] == [stage == 0, stage == 1]


def test_keep_only_frees_other_parameters_held_by_optimizer() -> None:
    """Parameters of other stages are freed even where an optimizer refers to them."""
    model = nn.Sequential(linear(), linear())
    staged = Staged(model, F.mse_loss, regression()[0], {"0": 0, "1": 1})
    optimizer = zoo.sgd(model)
    held = sum(value.untyped_storage().nbytes() for group in optimizer.param_groups for value in group["params"])
    keep_only(model, staged.recording, [0])
    left = sum(value.untyped_storage().nbytes() for group in optimizer.param_groups for value in group["params"])
    assert left == held // 2
    assert all(is_placeholder(value) and not value.requires_grad for value in model[1].parameters())


def test_closing_leaves_the_classes_as_they_were() -> None:
    model = nn.Sequential(linear(), linear())
    staged = Staged(model, F.mse_loss, regression()[0], {"0": 0, "1": 1})
    assert [type(part) for part in model] == [nn.Linear, nn.Linear]  # recording has undone its own
    for stage, mine in enumerate(staged.models):
        assert all(type(part) is not nn.Linear and isinstance(part, nn.Linear) for part in mine)
        staged.runners[stage].close()
        assert [type(part) for part in mine] == [nn.Linear, nn.Linear]


# ---- on real ranks ----


def unet_on_a_rank(name: ScheduleName, stages: dict[str, int]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Losses and gradients this rank has found."""
    echelon.init()
    torch.manual_seed(3)
    model, batches = UNet(), unet_batches()
    recording = record(Objective(model, F.mse_loss, None, CPU), model, batches[0], stages)
    hosted = range(dist.get_rank(), recording.stages, 2)
    keep_only(model, recording, hosted)
    defer = Later if name == "zero-bubble" else None
    runner = StageRunner(model, Objective(model, F.mse_loss, None, CPU), recording, hosted, CPU, defer)
    runner.begin(batches, FixedWeights([0.25] * 4))
    transfers = [StageTransfer(one.key, one.source, one.target) for one in recording.transfers]
    run_schedule(
        make_schedule(name, recording.stages, 2, 4),
        runner,
        transfers,
        PipelineLinks(None, (0, 1), CPU, "gloo"),
        "one shape",
    )
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return runner.losses, found


def unet_batches() -> list[tuple[Tensor, Tensor]]:
    return [(numbers(2, 3, 8, 8, seed=i), numbers(2, 3, 8, 8, seed=9 + i)) for i in range(4)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_schedules_on_two_ranks(name: ScheduleName) -> None:
    halved = {unit: min(stage // 2, 1) for unit, stage in UNET_STAGES.items()}
    results = run(unet_on_a_rank, name, UNET_STAGES if name == "interleaved" else halved)
    torch.manual_seed(3)
    losses, gradients = plain_step(UNet(), F.mse_loss, unet_batches(), [0.25] * 4)
    torch.testing.assert_close(list(results[1][0].values()), losses, rtol=1e-6, atol=1e-6)
    assert results[0][0] == {}
    together = results[0][1] | results[1][1]
    assert together.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(together[key], gradient, rtol=1e-6, atol=1e-6)
