"""The fast path: what is chosen, what is said of it, and that it changes no number."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon import Fast, Strategy
from echelon.base.errors import UsageError
from echelon.fastpath import compile as compiled
from echelon.fastpath.fast_path import prepare
from echelon.fastpath.fused_optimizers import fuse
from echelon.fastpath.inspect import requested_fast_path, traits_of, with_fast_path
from echelon.fastpath.policy import OFF, DeviceCapabilities, FastPathTraits, decide, startup_lines
from echelon.plan import Plan, make_plan
from echelon.strategy import Amp, Shard
from echelon.strategy.fastpath_choice import FastPathChoice
from echelon.zoo.train.resolve import resolve
from echelon.zoo.train.strategies import requested_strategy
from echelon.zoo.train.train_arguments import sort_words

GPU = DeviceCapabilities(cuda=True, bf16=True, triton=True)
BLOCKS = tuple(f"layers.{i}" for i in range(24))
TRANSFORMER = FastPathTraits(machine=GPU, blocks=BLOCKS, unset={"main": "AdamW"})


def with_traits(**changes: Any) -> FastPathTraits:
    return dataclasses.replace(TRANSFORMER, **changes)


# ---- the choice ----


def test_on_a_gpu_everything_that_is_safe_is_on() -> None:
    chosen = decide(Fast(), None, TRANSFORMER)
    assert chosen == FastPathChoice(compiled=BLOCKS, fused={"main": "AdamW"}, graphs=True, bf16=True)
    convolutions = decide(Fast(), None, with_traits(blocks=(), convolutions=True))
    assert (convolutions.compiled, convolutions.channels_last) == (("",), True)


def test_on_a_cpu_nothing_is_on_by_itself_and_nothing_is_said() -> None:
    chosen = decide(Fast(), None, with_traits(machine=DeviceCapabilities(), unset={}, convolutions=True))
    assert chosen == FastPathChoice()
    assert list(startup_lines(chosen)) == []


@pytest.mark.parametrize(
    ("asked", "amp", "traits", "part", "reason"),
    [
        (Fast(), None, with_traits(cut="it is cut"), "compile", "it is cut"),
        (Fast(), None, with_traits(only_blocks="it has stages"), "compile", "it has stages"),
        (Fast(), None, with_traits(slow_inside="it talks"), "compile", "it talks"),
        (Fast(), None, with_traits(compiled=True), "compile", "the model was compiled before distribute()"),
        (Fast(), None, with_traits(fp32=False), "bf16", "the weights are not all fp32"),
        (Fast(), None, with_traits(machine=DeviceCapabilities(cuda=True, triton=True)), "bf16", "not every device"),
        (Fast(), None, with_traits(machine=DeviceCapabilities(cuda=True, bf16=True)), "compile", "Triton"),
        (Fast(), None, with_traits(unfused="servers step"), "fused optimizers", "servers step"),
    ],
)
def test_what_is_left_out_says_why(asked: Fast, amp: object, traits: FastPathTraits, part: str, reason: str) -> None:
    chosen = decide(asked, amp, traits)
    everything = decide(asked, amp, TRANSFORMER)
    assert chosen.left_out.keys() == {part}
    assert chosen.left_out[part].startswith(reason)
    assert f"fast: {part} disabled: {chosen.left_out[part]}" in list(startup_lines(chosen))
    field = {"compile": "compiled", "fused optimizers": "fused"}.get(part, part)
    assert not getattr(chosen, field)
    kept = {name: value for name, value in vars(everything).items() if name not in (field, "left_out")}
    assert kept == {name: getattr(chosen, name) for name in kept}


@pytest.mark.parametrize("part", ["compile", "channels_last", "fused", "graphs", "bf16", "pad"])
def test_each_part_is_switched_off_alone(part: str) -> None:
    traits = with_traits(convolutions=True, odd=("head",))
    chosen = decide(Fast(**{part: False}), Amp() if part == "bf16" else None, traits)
    field = {"compile": "compiled", "pad": "padded"}.get(part, part)
    both = vars(decide(Fast(), None, traits)), vars(chosen)
    assert not getattr(chosen, field)
    assert {name for name in both[0] if both[0][name] != both[1][name]} == {field}


def test_the_environment_switches_off_what_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested_fast_path(Strategy()) == Fast()
    monkeypatch.setenv("ECHELON_FAST", "0")
    assert requested_fast_path(Strategy()) is OFF
    assert requested_fast_path(Strategy(fast=Fast(compile=True))) == Fast(compile=True)


def test_switched_off_means_nothing_at_all() -> None:
    assert decide(OFF, None, with_traits(convolutions=True, odd=("head",))) == FastPathChoice()


@pytest.mark.parametrize(
    ("asked", "amp", "changes", "padded"),
    [
        (Fast(), None, {}, True),
        (Fast(), Amp(dtype="fp16"), {}, True),
        (Fast(), None, {"fp32": False}, True),
        (Fast(compile=False), None, {}, True),
        (Fast(), False, {}, False),
        (Fast(compile="whole"), None, {}, False),
        (Fast(), None, {"compiled": True}, False),
        (Fast(), None, {"machine": DeviceCapabilities(), "unset": {}}, False),
    ],
)
def test_odd_output_layers_padded_in_16_bits_without_compiler(
    asked: Fast, amp: Any, changes: dict[str, Any], padded: bool
) -> None:
    """Odd output layers are padded where computation is in 16 bits and the compiler does not pad them."""
    chosen = decide(asked, amp, with_traits(odd=("head",), **changes))
    assert chosen.padded == (("head",) if padded else ())
    assert any("padded head" in line for line in startup_lines(chosen)) is padded
    assert "padding" not in chosen.left_out


def test_padding_where_there_is_nothing_to_pad_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Fast\(pad=True\): no large output layer needs padding"):
        decide(Fast(pad=True), None, TRANSFORMER)


@pytest.mark.parametrize("amp", [False, Amp(), Amp(dtype="fp16")])
def test_what_the_user_says_of_sixteen_bits_is_what_happens(amp: object) -> None:
    chosen = decide(Fast(), amp, TRANSFORMER)
    assert not chosen.bf16
    assert chosen.left_out == {}


@pytest.mark.parametrize(
    ("asked", "amp", "traits", "line"),
    [
        (Fast(compile=True), None, with_traits(cut="it is cut"), r"^Fast\(compile=True\): it is cut;"),
        (Fast(compile="whole"), None, with_traits(only_blocks="it has stages"), "; use compile=True$"),
        (Fast(compile=True), None, with_traits(only_blocks="no", blocks=()), "and there are none; leave compile out$"),
        (Fast(bf16=True), False, TRANSFORMER, r"^Fast\(bf16=True\): Strategy\(amp=...\)"),
        (Fast(graphs=True), None, with_traits(machine=DeviceCapabilities()), "only NVIDIA GPUs have CUDA graphs"),
        (Fast(graphs=True), None, with_traits(uncaptured="2 talk"), ": 2 talk; leave graphs out"),
        (Fast(compile="blocks"), None, with_traits(blocks=()), "the model has no repeated blocks"),
        (Fast(channels_last=True), None, TRANSFORMER, "the model has no 2-D convolutions"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(asked: Fast, amp: object, traits: FastPathTraits, line: str) -> None:
    with pytest.raises(UsageError, match=line) as caught:
        decide(asked, amp, traits)
    assert "\n" not in str(caught.value)


def test_a_wish_overrules_what_would_only_be_slow() -> None:
    traits = with_traits(slow_inside="batch norms talk", machine=DeviceCapabilities())
    assert decide(Fast(compile=True), None, traits).compiled == BLOCKS
    assert decide(Fast(compile="whole"), None, traits).compiled == ("",)


def test_graphs_impossible_not_reported_unless_requested() -> None:
    """If steps cannot be CUDA graphs, that is not reported unless graphs were requested."""
    chosen = decide(Fast(), None, with_traits(uncaptured="2 ranks talk"))
    assert not chosen.graphs
    assert "CUDA graphs" not in chosen.left_out


def test_the_announcement_names_every_part() -> None:
    said = list(startup_lines(decide(Fast(), None, with_traits(convolutions=True, unfused="servers step"))))
    assert said == [
        "fast: compiled 24 blocks of layers.*; bf16 (Strategy(amp=False) keeps fp32); channels last; "
        "CUDA graphs where the host limits the step; Strategy(fast=False) switches it off",
        "fast: fused optimizers disabled: servers step",
    ]


# ---- what it goes by ----


class Blocks(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 8, 8)) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for width in widths]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def planned(model: nn.Module, strategy: Strategy | None = None, ranks: int = 1) -> tuple[Plan, FastPathTraits]:
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
    plan = make_plan(model, optimizers, strategy or Strategy(), ranks)
    return plan, traits_of(plan, GPU, model, optimizers, served=False)


def test_blocks_count_only_where_all_are_alike() -> None:
    assert planned(Blocks())[1].blocks == ("layers.0", "layers.1", "layers.2")
    assert planned(Blocks((8, 16, 8)))[1].blocks == ()


def compiled_before() -> bool:
    model = Blocks()
    model.layers[1].compile(backend="eager")
    return planned(model)[1].compiled


def test_what_plans_do_to_a_model_is_found() -> None:
    assert planned(Blocks())[1].cut is None
    assert "shard 3" in str(planned(Blocks(), Strategy(shard=Shard(level=3)), ranks=2)[1].only_blocks)
    assert planned(Blocks(), Strategy(shard=Shard(level=2)), ranks=2)[1].only_blocks is None
    norms, _ = zoo.build("convnet")
    assert "batch norms" in str(planned(norms, ranks=2)[1].slow_inside)
    assert planned(norms, Strategy(sync_batch_norm=False), ranks=2)[1].slow_inside is None
    assert "2 ranks" in str(planned(Blocks(), ranks=2)[1].uncaptured)
    sparse, _ = zoo.build("sparse")
    assert planned(sparse)[1].unfused == planned(sparse)[1].uncaptured == "some gradients are sparse"
    assert run(compiled_before, ranks=1) == [True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shard": Shard(level=3)}, "shard 3 gathers weights"),
        ({"mesh": {"replicate": 2, "stage": 2}, "pipeline": echelon.pipeline(schedule="1f1b")}, "stages send"),
    ],
)
def test_gpus_compile_blocks_between_messages_on_request(changes: dict[str, Any], reason: str) -> None:
    """On GPUs, known here by their capabilities alone, blocks under shard 3 and stages are compiled if asked for."""
    model = Blocks()
    plan = dataclasses.replace(planned(model, ranks=2)[0], **changes)
    traits = traits_of(plan, GPU, model, {}, served=False)
    chosen = decide(Fast(), None, traits)
    assert chosen.compiled == ()
    assert chosen.left_out["compile"].startswith(reason)
    assert decide(Fast(compile=True), None, traits).compiled == traits.blocks


def test_a_plan_keeps_its_fast_path_in_json() -> None:
    plan, traits = planned(Blocks())
    quick = with_fast_path(plan, decide(Fast(), None, with_traits(blocks=traits.blocks, uncaptured="no")))
    assert Plan.from_json(quick.to_json()) == quick
    assert quick.amp == Amp()
    assert quick.hash != plan.hash


def test_a_fused_step_goes_on_from_an_unfused_one() -> None:
    def trained(switch: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            if switch and step == 2:
                fuse(optimizer)
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for plain, fused in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(plain, fused)


class Imaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolution(x).relu().flatten(1))  # type: ignore[no-any-return]


IMAGING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("begins", ["from a file", "with state"])
@pytest.mark.parametrize("kind", IMAGING)
def test_optimizer_state_has_memory_format_of_its_weights(kind: str, begins: str, tmp_path: Path) -> None:
    """Optimizer state has the memory format of its weights, which a fused step relies on."""
    torch.manual_seed(1)
    batches = [(torch.randn(4, 3, 8, 8), torch.randn(4, 8)) for _ in range(6)]
    found = []
    for channels_last in (False, True):
        weights = [torch.empty(0)]
        engine = None
        for first, last in ((0, 3), (3, 6)):
            if engine is None or begins == "from a file":
                model = Imaging()
                optimizer = IMAGING[kind](model.parameters())
            state = optimizer.state_dict()
            engine = echelon.distribute(
                model,
                loss=F.mse_loss,
                optimizer=optimizer,
                strategy=Strategy(fast=Fast(channels_last=channels_last and (first == 3 or begins == "from a file"))),
                log=echelon.Log(console=False),
            )
            assert begins == "from a file" or first == 0 or state["state"]
            if first and begins == "from a file":
                engine.load(str(tmp_path / str(channels_last)))
            for batch in batches[first:last]:
                engine.step(*batch)
            engine.save(str(tmp_path / str(channels_last)), wait=True)
            engine.close()
            weights = [parameter.detach().clone() for parameter in model.parameters()]
        found.append(weights)
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    torch.testing.assert_close(found[0], found[1])


def test_a_fused_step_takes_a_first_gradient_that_comes_late() -> None:
    def trained(fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        model.head.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        if fused:
            fuse(optimizer)
        for step in range(5):
            model.head.requires_grad_(step > 1)
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(True), trained(False))


def test_channels_last_changes_strides_and_nothing_else() -> None:
    model = nn.Conv2d(3, 8, 3)
    before = model.weight.detach().clone()
    prepare(model, FastPathChoice(channels_last=True))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


# ---- running ----

Trained = tuple[list[float], list[Tensor], str]


def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler here")


def train(strategy: Strategy, lengths: tuple[int, ...] = (8, 5, 8, 6)) -> Trained:
    """Losses, weights and what was said, of steps with batches of these lengths on each rank."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with redirect_stdout(io.StringIO()) as said:
        engine = echelon.distribute(
            model,
            loss=nn.functional.cross_entropy,
            optimizer=optimizer,
            strategy=strategy,
            log=echelon.Log(lines=False),
        )
        losses = []
        for step, length in enumerate(lengths):
            torch.manual_seed(100 * step + echelon.rank())
            losses.append(float(engine.step(torch.randn(length, 8), torch.randint(3, (length,)))))
        assert list(model.state_dict(keep_vars=True)) == list(Blocks().state_dict())
        losses.append(engine.evaluate([(torch.ones(4, 8), torch.ones(4, dtype=torch.long))])["loss"])
        weights = list(engine.whole_state().values())
        engine.close()
    return losses, weights, said.getvalue()


def train_each(backend: Any, strategies: list[Strategy]) -> list[Trained]:
    """The same with each strategy, in one process."""
    compiled.backend = backend
    return [train(strategy) for strategy in strategies]


MERGED = {"gradient_merge": 2, "clip": 0.1, "amp": "bf16"}
CASES: dict[str, dict[str, Any]] = {"blocks": {}, "whole": {}, "merged": MERGED, "sharded": {"shard": 3}}


@pytest.mark.parametrize(("ranks", "backend", "cases"), [(1, "aot_eager", ["blocks"]), (2, "eager", list(CASES))])
def test_compiled_equals_plain_also_where_lengths_change(ranks: int, backend: str, cases: list[str]) -> None:
    strategies = [
        Strategy(fast=fast, **CASES[name])
        for name in cases
        for fast in (False, Fast(compile="whole" if name == "whole" else "blocks"))
    ]
    for results in run(train_each, backend, strategies, ranks=ranks):
        for name, (plain, quick) in zip(cases, zip(results[::2], results[1::2], strict=True), strict=True):
            rounding = 1e-2 if name == "merged" else 1e-6
            assert quick[0] == pytest.approx(plain[0], rel=rounding)
            torch.testing.assert_close(plain[1], quick[1], rtol=rounding, atol=rounding)
            assert "failed" not in quick[2]


class Layered(nn.Module):
    """Blocks that torch wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]


#: A model, what is compiled of it, and how many programs: blocks get an input without a gradient, and those with one.
COMPILED: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "torch's blocks": (Layered, "blocks", 2),
    "chains": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5))), "blocks", 2),
    "a user's blocks in a chain": (lambda: nn.Sequential(*(Unit() for _ in range(5))), "blocks", 2),
    "a chain": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "whole", 1),
    "a user's whole": (Layered, "whole", 1),
    "one layer": (lambda: nn.Linear(8, 8), "whole", 1),
}


def stepping(model: nn.Module, compile: Any, console: bool = False) -> Callable[[], float]:
    engine = echelon.distribute(
        model,
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=Strategy(fast=Fast(compile=compile)),
        log=echelon.Log(console=console, lines=False),
    )
    torch.manual_seed(1)
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    return lambda: float(engine.step(x, y))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect compiled programs, and run them uncompiled."""
    found: list[Any] = []
    monkeypatch.setattr(compiled, "backend", lambda program, inputs: found.append(program) or program)
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_as_reported_one_program_for_equal_blocks(case: str, programs: list[Any]) -> None:
    """All that is reported as compiled is compiled, and one program serves all blocks that are alike."""
    make, compile, count = COMPILED[case]
    losses = []
    for on in (False, compile):
        torch.manual_seed(0)
        step = stepping(make(), on)
        losses.append([step() for _ in range(3)])
        assert len(programs) == (count + 1 if on else 0), "with that of the loss"
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("where", ["compiled", "inside"])
@pytest.mark.parametrize("case", COMPILED)
def test_a_hook_that_comes_later_runs(case: str, where: str, programs: list[Any]) -> None:
    make, compile, _ = COMPILED[case]
    model, calls = make(), list[int]()
    step = stepping(model, compile)
    step()
    made = len(programs)
    compiled_one = [module for module in model.modules() if module._compiled_call_impl is not None][-1]
    module = (
        compiled_one if where == "compiled" else next(one for one in compiled_one.modules() if type(one) is nn.Linear)
    )
    handle = module.register_forward_hook(lambda module, args, output: calls.append(len(args)))
    step()
    handle.remove()
    step()
    assert calls == [1]
    assert made > 0
    assert len(programs) == made or module is not compiled_one


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
def test_each_engine_compiles_for_itself_however_many_there_were(programs: list[Any]) -> None:
    for width in range(20):
        stepping(nn.Sequential(nn.Linear(8, 4 + width), nn.ReLU(), nn.Linear(4 + width, 8)), "whole")()
        assert len(programs) == 2 * (width + 1)
    programs.clear()
    for width in range(20):
        stepping(Bottle(4 + width), "whole")()
        assert len(programs) == 2 * (width + 1)


class Dropping(nn.Module):
    """Dropped entries are zero in the output, and in the gradient of ``shift``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(Shifted() for _ in range(3)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.dropout = nn.Parameter(torch.ones(8)), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x.abs() + self.shift)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_drops_in_forward_it_drops_in_backward(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code draws other random numbers than the same as it is written."""
    monkeypatch.setattr(compiled, "backend", lambda program, _: lambda *args: (torch.rand(3), program(*args))[1])
    model = Dropping(reentrant)
    outputs: list[Tensor] = []
    engine = echelon.distribute(
        model,
        loss=lambda output: outputs.append(output.detach()) or output.sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        strategy=Strategy(fast=Fast(compile="blocks")),
    )
    gradients: list[Tensor] = []
    model.layers[2].shift.register_hook(gradients.append)
    for _ in range(3):
        engine.step(torch.ones(1, 8))
    assert torch.stack(gradients).ne(0).equal(torch.cat(outputs).ne(0))


class Bottle(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.norm, self.up = nn.Linear(8, width), nn.BatchNorm1d(3), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x)).relu())  # type: ignore[no-any-return]


class Forces(Bottle):
    """The gradient of what it computes, as of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return found


class Counts(Bottle):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Broken(Bottle):
    """Two programs, the first of which counts batches."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(x)).relu()
        torch._dynamo.graph_break()
        return self.up(x)  # type: ignore[no-any-return]


def fails_at_the_second(program: Any, inputs: Any) -> Any:
    if not any("norm" in str(node.target) for node in program.graph.nodes):
        raise RuntimeError("no second here")
    return program


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).view(x.size(0), -1))  # type: ignore[no-any-return]


def fails_in_backward(program: Any, inputs: Any) -> Any:
    from torch._dynamo.exc import BackendCompilerFailed

    def failing(*_: Any) -> Any:
        raise BackendCompilerFailed(failing, RuntimeError("no backward here"), None)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda made, _: make_boxed_func(made), bw_compiler=failing)(program, inputs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize(
    ("make", "backend", "line"),
    [
        (Forces, "aot_eager", "compile disabled: compiling failed (RuntimeError: torch.compile with aot_auto"),
        (Bottle, fails_in_backward, "compile disabled: compiling failed (RuntimeError: no backward here)"),
        (
            Counts,
            "eager",
            "code is recompiled too often, for a value that changes (self.calls == ",
        ),
        (Broken, fails_at_the_second, "compile disabled: compiling failed (RuntimeError: no second here)"),
        (Recurrent, "eager", "compile has no effect: the compiler has found nothing to compile"),
    ],
)
def test_not_compilable_reported_and_equals_uncompiled_run(
    make: Callable[[], nn.Module], backend: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that cannot be compiled is reported in one line and gives the numbers of an uncompiled run."""
    monkeypatch.setattr(compiled, "backend", backend)
    runs, said = [], io.StringIO()
    for compile in (False, "whole"):
        torch.manual_seed(0)
        model = make()
        with contextlib.redirect_stdout(said):
            step = stepping(model, compile, console=True)
            losses = torch.tensor([step() for _ in range(14)])
        runs.append([losses, *model.state_dict().values()])
    torch.testing.assert_close(runs[1], runs[0])
    assert [one for one in said.getvalue().splitlines() if f"fast: {line}" in one], said.getvalue()


def test_channels_last_with_view_raises_if_set_else_left_out() -> None:
    """A view that channels_last breaks raises a one-line error; unless it was set, channels_last is left out."""
    assert "view()" in str(planned(Viewing())[1].views)
    assert planned(Imaging())[1].views is None
    assert not decide(Fast(), None, with_traits(convolutions=True, views="it views")).channels_last
    assert decide(Fast(channels_last=True), None, with_traits(convolutions=True, views="it views")).channels_last
    model = Viewing()
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=Strategy(fast=Fast(channels_last=True)),
        log=echelon.Log(console=False),
    )
    with pytest.raises(UsageError, match=r"use reshape\(\) or flatten\(\), or give Strategy\(fast=Fast\(channels_las"):
        engine.step(torch.randn(2, 3, 8, 8), torch.randn(2, 8))


class Stateful(Unit):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.torch.jit.trace")
def test_copies_and_traces_of_a_compiled_model_are_plain(programs: list[Any]) -> None:
    model = nn.Sequential(*(Stateful() for _ in range(3)))
    stepping(model, "blocks")()
    assert programs
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    assert float(twin(torch.ones(1, 8)).detach().abs().sum()) == 0
    x = torch.ones(2, 8)
    for traced in (torch.fx.symbolic_trace(model), torch.jit.trace(model, (x,))):
        torch.testing.assert_close(traced(x), model(x))


def test_a_forward_of_the_users_own_is_kept(programs: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    plain = model.forward
    model.forward = functools.wraps(plain)(lambda x: 2 * plain(x))  # type: ignore[method-assign]
    model.register_forward_hook(lambda *_: None)
    mine = model.forward
    stepping(model, "whole")()
    assert model.forward is mine


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 3, 8))])
def test_models_of_scripted_modules_train_as_they_did_as_python(make: Callable[[nn.Module], nn.Module]) -> None:
    runs = []
    for scripts in (lambda unit: unit, make):
        torch.manual_seed(0)
        model = nn.Sequential(*(scripts(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) for _ in range(3)))
        for each in (model, scripts(model)):
            step = stepping(each, False)
            runs.append([step() for _ in range(3)])
    assert runs[2:] == runs[:2]
    assert planned(model)[1].uncaptured == "scripted modules hold values that guards cannot read"


class Judging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.inner(x).sigmoid(), y)


of_probabilities = nn.BCELoss()


def judged(output: Tensor, target: Tensor) -> Tensor:
    return of_probabilities(output.sigmoid(), target)  # type: ignore[no-any-return]


def judged_within(found: nn.Module) -> Callable[..., Tensor]:
    return lambda output, target: 2 * found(output, target)


@pytest.mark.parametrize(
    ("model", "loss", "reason"),
    [
        (Blocks(), F.mse_loss, None),
        (Blocks(), F.binary_cross_entropy_with_logits, None),
        (Blocks(), judged_within(nn.MSELoss()), None),
        (Blocks(), nn.BCELoss(), "binary_cross_entropy wants fp32"),
        (Blocks(), functools.partial(F.binary_cross_entropy, reduction="sum"), "binary_cross_entropy wants fp32"),
        (Blocks(), lambda output, target: 2 * judged(output, target), "binary_cross_entropy wants fp32"),
        (Blocks(), judged_within(nn.BCELoss()), "binary_cross_entropy wants fp32"),
        (Judging(), None, "binary_cross_entropy wants fp32"),
    ],
)
def test_a_loss_that_torch_refuses_in_16_bits_keeps_fp32(
    model: nn.Module, loss: Callable[..., Any] | None, reason: str | None
) -> None:
    plan, _ = planned(model)
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
    chosen = decide(Fast(), None, traits_of(plan, GPU, model, optimizers, False, loss))
    assert chosen.bf16 == (reason is None)
    assert reason is None or chosen.left_out["bf16"].startswith(reason)


def test_loss_refused_by_torch_in_16_bits_raises_one_line() -> None:
    """A loss that torch refuses in 16 bits raises a one-line error."""

    def refused(*_: Any) -> Tensor:  # as torch says it on a GPU
        raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n...")

    model = Blocks()
    engine = echelon.distribute(
        model,
        loss=refused,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=Strategy(amp="bf16"),
    )
    with pytest.raises(UsageError, match=r"^binary_cross_entropy was called in 16 bits.*Strategy\(amp=False\)$"):
        engine.step(torch.ones(2, 8), torch.ones(2, 3))


class Placed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.zeros(2, 8).index_put((torch.arange(2),), super().forward(input))


def test_operation_needing_fp32_error_names_source_of_16_bits() -> None:
    model = Placed(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, loss=F.mse_loss, optimizer=optimizer, strategy=Strategy(amp="bf16"))
    with pytest.raises(RuntimeError, match="BFloat16") as found:
        engine.step(torch.ones(2, 8), torch.ones(2, 8))
    assert found.value.__notes__ == ["(forward and loss run in bf16 here; Strategy(amp=False) keeps fp32)"]


def test_compile_failure_reported_once_and_training_continues() -> None:
    strategies = [Strategy(fast=False), Strategy(fast=Fast(compile=True))]
    ((plain, weights, silent), (losses, theirs, said)) = run(train_each, broken, strategies, ranks=1)[0]
    assert losses == plain
    torch.testing.assert_close(weights, theirs, rtol=0, atol=0)
    assert "fast:" not in silent
    told = [line.removeprefix("echelon: fast: ") for line in said.splitlines() if "fast:" in line]
    assert told[0] == "compiled 3 blocks of layers.*; Strategy(fast=False) switches it off"
    assert len(told) == 2
    assert told[1].startswith("compile disabled: compiling failed (RuntimeError: no compiler here)")


class Config:
    weight = 1.0


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() * Config.weight


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("notices", [False, True] if compiled._version() >= compiled.NOTICES else [False])
def test_changed_class_attribute_respected_by_every_torch(monkeypatch: pytest.MonkeyPatch, notices: bool) -> None:
    """Torch before 2.13 compiles its value in and never looks again."""
    monkeypatch.setattr(compiled, "NOTICES", (0, 0) if notices else (99, 0))
    monkeypatch.setattr(compiled, "backend", "eager")
    found, said = [], io.StringIO()
    for compile in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        strategy = Strategy(fast=Fast(compile=compile))
        with redirect_stdout(said):
            engine = echelon.distribute(
                model, loss=weighted, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy
            )
        for weight in (1.0, 1.0, 1.5, 2.0):
            monkeypatch.setattr(Config, "weight", weight)
            with redirect_stdout(said):
                found.append(float(engine.step(torch.ones(2, 8), torch.ones(2, 3))))
        engine.close()
    torch.testing.assert_close(found[:4], found[4:])
    lines = [line for line in said.getvalue().splitlines() if "fast: compile disabled" in line]
    assert len(lines) == (0 if notices else 1), lines
    assert all("Config.weight has changed" in line for line in lines)


def test_echelon_train_asks_for_the_same() -> None:
    def asked(*words: str) -> Strategy:
        return requested_strategy(resolve(sort_words(["--model_name=lenet", *words], {})))

    assert (asked().fast, asked().amp) == (None, None)
    assert asked("--compile").fast == Fast(compile=True)
    assert asked("--compile=false").fast == Fast(compile=False)
    assert asked("--use_fp16=false").amp is False
    assert asked("--use_fp16=false", "--amp=bf16").amp == Amp()


def test_amp_false_is_not_none() -> None:
    assert Strategy(amp=False) != Strategy()
    assert Strategy(amp=False).to_dict() == {"amp": False}
    assert Strategy.from_dict({"amp": False}).amp is False
    assert planned(Blocks(), Strategy(amp=False))[0].amp is None
    Strategy(amp=False, fast=False, auto=True)  # neither asks for what auto decides
