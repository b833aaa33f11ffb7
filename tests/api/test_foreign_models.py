"""Models in the manner of other libraries, in plain torch: what they return, draw, keep and call between layers."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import ROWS, Case, check, optimizer_of
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy
from echelon.base.errors import UsageError
from echelon.plan.stage_trace import record

WIDTH, WORDS, LENGTH = 16, 20, 5


def words(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {name: torch.randint(WORDS, (ROWS, LENGTH), generator=g) for name in ("input_ids", "labels")}


def in_stages(layers: str = "layers", schedule: str = "1f1b") -> dict[str, Any]:
    """Marks of two stages of two layers."""
    return {
        "": echelon.pipeline(micro_batches=2, schedule=schedule),  # type: ignore[arg-type]
        f"{layers}.0-1": echelon.stage(0),
        f"{layers}.2-3": echelon.stage(1),
    }


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclass
class Output:
    """An output as transformers' models return it."""

    loss: Tensor
    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


class Decoder(nn.Module):
    """Layers between an embedding and a head, which no stage is given."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = [self.embed(input_ids)]
        for layer in self.layers:
            hidden.append(self.run(layer, hidden[-1]))
        logits = self.head(hidden[-1])
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits, tuple(hidden))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


def test_pipeline_hidden_states_in_output_equal_one_process() -> None:
    """The last stage holds the embedding for the sake of the output, and has no gradient for it."""
    check([Case(Decoder, words, in_stages(schedule=schedule)) for schedule in ("1f1b", "zero-bubble")], ranks=2)
    check([Case(Decoder, words, in_stages()), Case(Decoder, words, in_stages(), {"shard": 1})], ranks=4)


# ---- functions with a backward of their own ----


class Scaled(torch.autograd.Function):
    """Saves its input, and has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x.square() * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0] * ctx.by, None


class StraightThrough(torch.autograd.Function):
    """Saves nothing: what is not seen here would be gone without a word."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul(8).round().div(8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class CustomLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        inner = Scaled.apply(self.up(self.norm(x)), 0.5)
        return x + self.down(StraightThrough.apply(inner))


class CustomDecoder(Decoder):
    layer = CustomLayer


def test_custom_functions_between_split_layers_equal_one_process() -> None:
    marks = {"layers.*.up": echelon.split("column"), "layers.*.down": echelon.split("row")}
    check([Case(CustomDecoder, words, marks), Case(CustomDecoder, words, {"layers.*.up": echelon.split()})], ranks=2)


# ---- calls and classes that cannot be ----


def called_past_the_engine() -> list[str]:
    """In a pipeline, as for a sample after every epoch."""
    echelon.init()
    torch.manual_seed(3)
    model = echelon.annotate(Decoder(), in_stages())
    engine = echelon.distribute(model, optimizer=optimizer_of(model), log=QUIET)
    engine.step(**words(0))
    lines = []
    for call in (lambda: model(**words(1)), lambda: model.layers[0](torch.zeros(2, 3, WIDTH))):
        try:
            with torch.no_grad():
                call()
        except UsageError as error:
            lines.append(str(error))
    assert torch.isfinite(engine.step(**words(1)))  # the engine itself goes on
    engine.close()
    return lines


def test_a_pipelined_model_called_past_the_engine_is_one_line() -> None:
    first, second = run(called_past_the_engine, ranks=2)
    assert len(first) == 1  # its own layers run
    assert len(second) == 2
    for line, name in ((first[0], "layers.2"), (second[0], "layers.0")):
        assert line.startswith(f"the model was called past the engine: '{name}' is in stage ")
        assert "engine.evaluate()" in line


def distributed_with_a_scripted_module() -> list[str]:
    echelon.init()
    lines = []
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"": echelon.pipeline(), "0": echelon.stage(0), "1": echelon.stage(1)}, {}),
        ({"": echelon.pipeline(stages=2)}, {}),
        ({}, {"shard": 3}),
        ({}, {"recompute": echelon.Recompute(checkpoints=("0",))}),
    ]
    for marks, strategy in ways:
        plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit.script is deprecated
            model: nn.Module = nn.Sequential(torch.jit.script(plain[0]), plain[1])
        try:
            echelon.annotate(model, marks)
            engine = echelon.distribute(
                model, loss=F.mse_loss, optimizer=optimizer_of(model), strategy=Strategy(**strategy), log=QUIET
            )
            engine.step(torch.zeros(8, 64), torch.zeros(8, 64))
        except UsageError as error:
            lines.append(str(error))
    return lines


def test_a_scripted_module_is_refused_in_a_line() -> None:
    scripted = "'0' was compiled by torch.jit.script, which reads parameters outside Python; build it plain, or "
    for lines in run(distributed_with_a_scripted_module, ranks=2):
        assert lines == [
            f"pipeline: {scripted}train it without stages",
            f"pipeline: {scripted}train it without stages",
            f"sharding: {scripted}use level 2",
            f"recompute: {scripted}name the modules inside it",
        ]


# ---- draws between stages ----


class Dropped(Decoder):
    """Layer dropout as in Whisper and BART: each layer may be skipped, by a draw between layers."""

    layerdrop = 0.0

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.layerdrop:
            return x
        return layer(x)


class OftenDropped(Dropped):
    layerdrop = 0.5


class ShiftedDraw(Dropped):
    """A draw that is changed in place is no draw from [0, 1) any more."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) if torch.rand([]).sub_(0.5) >= 0 else x


def test_layerdrop_of_zero_is_no_obstacle_to_a_pipeline() -> None:
    check([Case(Dropped, words, in_stages())], ranks=2)
    for kind in (OftenDropped, ShiftedDraw):
        model = kind()
        with pytest.raises(UsageError, match=r"decides by random numbers .aten::rand .*set the probability to 0"):
            record(lambda batch, model=model: model(**batch).loss, model, words(0), UNITS)


UNITS = {f"layers.{number}": number // 2 for number in range(4)}


# ---- grouped matrix products ----


class GroupedLayer(nn.Module):
    """Experts as transformers computes them, in fp32, which torch's own shape rule refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.histc(expert.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        inner = F.gelu(torch._grouped_mm(flat[order], self.up, offs=ends))
        made = torch._grouped_mm(inner, self.down, offs=ends)
        return x + (torch.zeros_like(flat).index_add(0, order, made) * weight[:, None]).view_as(x)


class GroupedDecoder(Decoder):
    layer = GroupedLayer


class Spoken(Decoder):
    """CTC, as speech models have it. Torch has no shape rule for it."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        scores = super().forward(input_ids, labels).logits.log_softmax(-1).transpose(0, 1)
        rows = torch.full((len(input_ids),), LENGTH)
        loss = F.ctc_loss(scores, labels[:, :2].clamp(min=1), rows, torch.full_like(rows, 2), reduction="sum")
        return {"loss": loss / len(input_ids)}


def test_operations_without_shape_rule_recorded_and_profiled() -> None:
    """Operations for which torch has no shape rule are recorded and profiled."""
    check(
        [
            Case(Spoken, words, in_stages()),
            Case(GroupedDecoder, words, in_stages()),
            Case(GroupedDecoder, words, {"": echelon.pipeline(micro_batches=2, stages=2)}),
            Case(GroupedDecoder, words, {}, {"auto": True}),
        ],
        ranks=2,
    )


# ---- caches of keys and values ----


@dataclass
class Config:
    use_cache: bool = True


class Cache:
    def __init__(self) -> None:
        self.filled = 0

    def get_seq_length(self) -> int:
        return self.filled


class CachedLayer(Layer):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.filled += 1
        return super().forward(x)


class CachedDecoder(Decoder):
    """A decoder as in transformers: it returns a cache unless the configuration says no."""

    layer = CachedLayer

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.__dict__["cache"] = Cache() if self.config.use_cache else None
        return super().forward(input_ids, labels)

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, self.__dict__["cache"])


def test_recompute_disables_caches_until_engine_is_closed() -> None:
    cases = [Case(CachedDecoder, words, in_stages(), {"recompute": True}), Case(CachedDecoder, words, {}, {"shard": 3})]
    check([*cases, Case(CachedDecoder, words, {}, {"shard": 3, "recompute": True})], ranks=2)
    model, said = CachedDecoder(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        engine = echelon.distribute(model, optimizer=optimizer_of(model), strategy=Strategy(recompute=True))
        engine.step(**words(0))
    assert not model.config.use_cache
    assert said.getvalue().count("recompute: config.use_cache is off while training; ") == 1
    engine.close()
    assert model.config.use_cache
