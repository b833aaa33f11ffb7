"""``echelon memory`` against real tensors: weights, gradients and optimizer state of every rank to the byte,
activations as autograd keeps them, and what is said to be saved against a second look."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates

import echelon
from echelon.base.environment import PLAN_ONLY
from echelon.base.errors import UsageError
from echelon.cli.commands.memory import run_memory
from echelon.distributed.local_state import LocalState
from echelon.observability.runlog import read
from echelon.observability.runlog.measured_memory import measured
from echelon.optim import LAMB, LARS
from echelon.plan.draft import Draft
from echelon.plan.fake_forward import is_placeholder
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.profiling.profile import Profile, profile
from echelon.strategy import LowMemory, Shard, Strategy
from echelon.strategy.annotations.annotate import ModelMarks, annotate, collect, pipeline, split, stage
from echelon.strategy.annotations.marks import Pipeline
from echelon.strategy.annotations.slices import Slices
from echelon.tools.memory_profile import Footprint, TrainingJob, find_footprint
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.memory_profile.saved_activations import LOSS
from echelon.tools.plan_report import plan_options as plans
from echelon.tools.plan_report.model_source import find_source

SAMPLES = 6


class Tied(nn.Module):
    """Words, blocks, and a head that is the table of words; a mask as a buffer, and glue outside of all blocks."""

    def __init__(self, blocks: int = 3, width: int = 16, words: int = 40) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.blocks[1][1].weight.requires_grad = False

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) * self.scale.to(self.words.weight.dtype)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden)).tanh()


def images() -> tuple[nn.Module, Any, Any]:
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    return net, (torch.randn(SAMPLES, 3, 12, 12), torch.randint(0, 4, (SAMPLES,))), F.cross_entropy


def words() -> tuple[nn.Module, Any, Any]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    ids = torch.randint(0, 40, (SAMPLES, 5))
    return Tied(), (ids, ids.roll(1, 1)), loss


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {"images": images, "words": words}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "lamb": lambda p: LAMB(p, lr=0.1),
    "lars": lambda p: LARS(p, lr=0.1),
    "adadelta, StepLR": lambda p: scheduled(torch.optim.Adadelta(p), rates.StepLR, 1),
    "adamw, cosine": lambda p: scheduled(torch.optim.AdamW(p), rates.CosineAnnealingLR, 10),
    "momentum, OneCycle": lambda p: scheduled(torch.optim.SGD(p, 0.1, momentum=0.9), rates.OneCycleLR, 0.1, 10),
    "adam, two LambdaLR": lambda p: scheduled(
        scheduled(torch.optim.Adam(p), rates.LambdaLR, float), rates.LambdaLR, float
    ),
    "hooked": lambda p: hooked(torch.optim.Adam(p)),
    "lookahead": lambda p: Lookahead(torch.optim.AdamW(p)),
}


def scheduled(optimizer: torch.optim.Optimizer, schedule: Any, *options: Any) -> torch.optim.Optimizer:
    """The optimizer, on whose instance a scheduler has put a ``step``."""
    schedule(optimizer, *options)
    return optimizer


def hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with a hook that takes no other for it."""

    def check(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert stepping is optimizer

    optimizer.register_step_pre_hook(check)
    return optimizer


class Lookahead(torch.optim.Optimizer):
    """An optimizer that holds another, whose groups it shares, and keeps a state of its own beside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                self.state[parameter].setdefault("slow", torch.empty_like(parameter))


@functools.cache
def profiled(case: str) -> tuple[Profile, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, batch, loss = CASES[case]()
    return profile(model, batch, loss=loss, device="cpu"), model, batch, loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_gradients_and_state_are_those_of_real_tensors(optimizer: str) -> None:
    looked, model, (ids, target), loss = profiled("words")
    model.zero_grad()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    found = find_footprint(looked, TrainingJob(samples=SAMPLES), stepping)
    loss(model(ids), target).backward()
    stepping.step()
    both = [stepping, stepping.inner] if isinstance(stepping, Lookahead) else [stepping]
    real = [measured(LocalState(model, dict(model.named_parameters())), [each], peak=0).kinds for each in both]
    counted = {"parameters": real[0]["parameters"], "optimizer": sum(kinds["optimizer"] for kinds in real)}
    for kind, size in counted.items():
        assert sum(getattr(row, kind) for row in found.modules) == size == found.kinds[kind], kind
    assert sum(row.gradients for row in found.modules) == sum(_bytes(p.grad) for p in model.parameters())
    assert sum(row.buffers for row in found.modules) == _bytes(model.scale)
    by_name = {row.name: row for row in found.modules}
    assert by_name["blocks.0"].parameters == sum(map(_bytes, model.blocks[0].parameters()))
    assert by_name["blocks.0"].parameters - by_name["blocks.1"].gradients == _bytes(model.blocks[1][1].weight)


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def autograd_keeps(model: nn.Module, batch: Any, loss: Any, amp: bool = False) -> int:
    """Bytes of the storages that a real forward pass keeps for backward, weights left out."""
    kept: dict[int, tuple[int, Tensor]] = {}
    weights = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor.detach()
        return tensor

    *inputs, target = batch
    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keeping, torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss(model(*inputs), target)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("amp", [None, "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_activations_are_what_autograd_keeps(case: str, amp: Any) -> None:
    looked, model, batch, loss = profiled(case)
    found = find_footprint(looked, TrainingJob(samples=SAMPLES, strategy=Strategy(amp=amp)), "adam")
    real = autograd_keeps(model, batch, loss, amp is not None)
    # placeholders have batch norm's statistics in 16 bits under amp, a real CPU in 32
    off = 4 * 8 * 2 if amp and case == "images" else 0
    assert sum(row.activations for row in found.modules) == real - off
    assert {row.name for row in found.modules} >= {LOSS}


class Looking(nn.Module):
    """At values, of which placeholders have none; and a layer whose kernel keeps what it alone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.memory, self.head = nn.Linear(6, 8), nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if hidden.abs().max() > 1e9 or float(hidden.detach().sum()) > 1e9:
            hidden = hidden * 2
        return self.head(self.memory(hidden)[0])


def test_forward_may_read_values_and_uncounted_parts_are_noted() -> None:
    model, batch = Looking(), (torch.randn(SAMPLES, 6), torch.randint(0, 4, (SAMPLES,)))
    looked = profile(model, batch, loss=F.cross_entropy, device="cpu")
    found = find_footprint(looked, TrainingJob(samples=SAMPLES), "adam")
    by_name = {row.name: row for row in found.modules}
    assert by_name["head"].parameters == sum(map(_bytes, model.head.parameters()))
    assert by_name["inner"].activations == _bytes(batch[0])
    assert any(note.startswith("LSTM layers hold more than is counted") for note in found.notes)
    looked, *_ = profiled("words")
    assert not any("LSTM" in note for note in find_footprint(looked, TrainingJob(samples=SAMPLES), "adam").notes)


def test_recomputed_blocks_keep_what_they_are_given() -> None:
    looked, *_ = profiled("words")
    jobs = TrainingJob(samples=SAMPLES, strategy=Strategy(recompute=True)), TrainingJob(samples=SAMPLES)
    found, plain = ({row.name: row.activations for row in find_footprint(looked, job, "adam").modules} for job in jobs)
    given = SAMPLES * 5 * 16 * 4
    assert [found[f"blocks.{at}"] for at in range(3)] == [given] * 3
    assert all(plain[f"blocks.{at}"] > 4 * given for at in range(3))
    assert found[LOSS] == plain[LOSS]


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_to_be_saved_is_what_a_second_look_finds(case: str) -> None:
    looked, *_ = profiled(case)
    found = find_footprint(looked, TrainingJob(samples=SAMPLES, procs=4), "adamw")
    assert sum(found.kinds.values()) == found.peak
    said = {saving.what: saving.bytes for saving in found.savings}
    assert {"shard 1", "shard 3", "low_memory"} <= said.keys()
    others = {
        "recompute": Strategy(recompute=True),
        "amp bf16": Strategy(amp="bf16"),
        "low_memory": Strategy(low_memory=True),
        **{f"shard {level}": Strategy(shard=Shard(level=level)) for level in (1, 2, 3)},
    }
    jobs = {what: TrainingJob(samples=SAMPLES, procs=4, strategy=strategy) for what, strategy in others.items()}
    for what, job in {**jobs, "batch 3": TrainingJob(samples=3, procs=4)}.items():
        again = find_footprint(looked, job, "adamw")
        assert said.get(what, 0) == max(0, found.peak - again.peak), what


def test_the_peak_is_that_of_a_real_step() -> None:
    looked, model, (x, target), loss = profiled("words")
    found = find_footprint(looked, TrainingJob(samples=SAMPLES), "adam")
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        value = loss(model(x), target)
        optimizer.zero_grad()  # as the engine does: gradients of the step before live through forward
        value.backward()
        optimizer.step()

    peak = _allocated_at_most(step) + sum(map(_bytes, (x, target, *model.parameters(), *model.buffers())))
    assert found.peak == pytest.approx(peak, rel=0.02)
    assert found.moment.startswith(("backward of ", "forward of "))


def _allocated_at_most(step: Callable[[], None]) -> int:
    """Bytes beyond those that were there, by the profiler's account of the allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        for _ in range(3):
            step()
    now = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


# ---- plans whose ranks hold different things: real ranks, every tensor counted ----

STAGED = {"blocks.0": stage(0), "blocks.1-2": stage(1), "": pipeline(micro_batches=3)}
PLANS: dict[str, tuple[int, dict[str, Any], Strategy]] = {
    "shard 1": (2, {}, Strategy(shard=1)),
    "shard 2": (2, {}, Strategy(shard=2)),
    "shard 3": (2, {}, Strategy(shard=3)),
    "stages": (2, STAGED, Strategy()),
    "split": (2, {"blocks.*": split()}, Strategy()),
    "low_memory": (2, {}, Strategy(low_memory=LowMemory(state="device"))),
    "lamb": (2, {}, Strategy(lamb=True)),
    "stages x shard 3": (4, STAGED, Strategy(shard=3)),
    "split x shard 1": (4, {"blocks.*": split()}, Strategy(shard=1)),
}
KINDS = ("parameters", "gradients", "optimizer", "buffers")


def marked(marks: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, batch, loss = words()
    return annotate(model, marks), batch, loss


def _trained(ranks: int, logs: str) -> dict[str, tuple[dict[str, int], int]]:
    """By plan: bytes of this rank's own tensors, and what autograd kept at most."""
    echelon.init()
    found = {}
    for name, (size, marks, strategy) in PLANS.items():
        if size == ranks:
            model, batch, loss = marked(marks)
            optimizer = torch.optim.AdamW(model.parameters())
            sliced = Slices(average=2) if marks else None
            log = echelon.Log(dir=f"{logs}/{name}", console=False)
            engine = echelon.distribute(
                model, optimizer=optimizer, loss=loss, strategy=strategy, cluster=sliced, log=log
            )
            engine.step(*batch)
            with _Saved(model) as saved:
                engine.step(*batch)
            found[name] = own_bytes(engine), saved.most
            engine.close()
    return found


def own_bytes(engine: Any) -> dict[str, int]:
    stepping = next(iter(engine.optimizers.values()))
    shards = [p for group in stepping.param_groups for p in group["params"]]
    here = [p for p in engine.model.parameters() if not is_placeholder(p.data)]
    away = engine.plan.shard is not None and engine.plan.shard.level == 3
    return {
        "parameters": sum(map(_bytes, shards if away else here)),
        "gradients": sum(_bytes(p.grad) for p in {*here, *shards}),
        "optimizer": sum(_bytes(v) for s in stepping.state.values() for v in s.values() if isinstance(v, Tensor)),
        "buffers": sum(_bytes(b) for b in engine.model.buffers() if not is_placeholder(b)),
    }


class _Saved:
    """Bytes that autograd keeps, at most at one time: each storage once, weights never."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.most = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> _Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights and not is_placeholder(tensor):
            self._uses[storage._cdata] += 1
            self._sizes[storage._cdata] = storage.nbytes()
            self.most = max(self.most, sum(self._sizes[at] for at, uses in self._uses.items() if uses))
        return _Kept(tensor.detach(), self)

    def let_go(self, address: int) -> None:
        self._uses[address] -= address in self._sizes


class _Kept:
    def __init__(self, tensor: Tensor, saved: _Saved) -> None:
        self.tensor, self._saved = tensor, saved

    def __del__(self) -> None:
        self._saved.let_go(self.tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_holds_what_is_said_of_it(ranks: int, tmp_path: Path) -> None:
    real = run(_trained, ranks, str(tmp_path), ranks=ranks)
    for name, (size, marks, strategy) in PLANS.items():
        if size != ranks:
            continue
        model, batch, loss = marked(marks)
        sliced = Slices(average=2) if marks else None
        job = TrainingJob(samples=SAMPLES, procs=ranks, strategy=strategy, marks=collect(model), slices=sliced)
        looked, optimizer = profile(model, batch, loss=loss, device="cpu"), torch.optim.AdamW(model.parameters())
        found = find_footprint(looked, job, optimizer)
        by_rank = {rank: one for one in found.each or (found,) for rank in one.ranks}
        written = read(tmp_path / name).memory
        assert written is not None
        assert sorted(by_rank) == list(range(ranks)) == [each.ranks[0] for each in written.each]
        for rank, one in by_rank.items():
            counted, kept = real[rank][name]
            said = {kind: sum(getattr(row, kind) for row in one.modules) for kind in KINDS}
            assert said == counted, (name, rank)
            assert {kind: written.each[rank].kinds[kind] for kind in KINDS} == counted, (name, rank)
            assert written.each[rank].place == one.place, (name, rank)
            if "shard 3" not in name:  # there autograd keeps weights as well, which are gone until backward comes
                # what goes round block 0 is made on stage 1 as well, which keeps the words' numbers for it
                again = _bytes(batch[0]) if (name, rank) == ("stages", 1) else 0
                assert sum(row.activations for row in one.modules) + again == kept, (name, rank)


SCRIPT = """
import torch, echelon
from torch import nn
echelon.init()
net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)), nn.Linear(8, 2))
engine = echelon.distribute(net, loss=nn.CrossEntropyLoss(), strategy=echelon.Strategy(recompute=True),
                            optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
engine.step(torch.randn(16, 8), torch.randint(0, 2, (16,)))
raise AssertionError("it went on")
"""
MADE = """
import torch
from torch import nn
def make():
    blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))
    net = nn.Sequential(*blocks, nn.Linear(8, 2))
    return net, (torch.randn(16, 8), torch.randint(0, 2, (16,))), nn.CrossEntropyLoss()
"""


def asked(model: str, save: str | None = None, **options: Any) -> Footprint:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_memory(MemoryOptions(model, device="cpu", **options), as_json=True, save=save)
    found = Footprint.of(json.loads(out.getvalue()))
    assert found is not None
    return found


MOMENTUM = "torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"
RATE = f"optimizer = {MOMENTUM}\nrate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)\n"
SCHEDULED = SCRIPT.replace(f"optimizer={MOMENTUM}", "optimizer=optimizer").replace("engine = ", f"{RATE}engine = ")


def test_a_script_with_a_scheduler_has_its_state_counted(tmp_path: Path) -> None:
    passed = SCHEDULED.replace("optimizer=optimizer", "optimizer=optimizer, scheduler=rate")
    assert SCRIPT != SCHEDULED != passed
    (tmp_path / "train.py").write_text("")
    plain, *others = run(_listened_to_all, str(tmp_path / "train.py"), [SCRIPT, SCHEDULED, passed], ranks=1)[0]
    assert plain["footprint"]["kinds"]["optimizer"] > 0
    assert others == [plain, plain]


def _listened_to_all(path: str, scripts: list[str]) -> list[Any]:
    found = []
    for script in scripts:
        Path(path).write_text(script)
        found.append(_listened(path))
    return found


def test_a_script_is_taken_with_its_own_strategy_and_optimizer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "made.py").write_text(MADE)
    [answer] = run(_listened, str(tmp_path / "train.py"), ranks=1)
    same = asked(f"{tmp_path / 'made.py'}:make", optimizer="momentum", recompute=True, save=str(tmp_path / "out"))
    assert Footprint.of(answer["footprint"]) == same
    assert answer["title"] == "train, SGD"
    assert read(tmp_path / "out").memory == same


def _listened(script: str) -> Any:
    """Return the answer of the process of a script, as ``ask`` starts it."""
    question, answer = Path(script).with_name("question.json"), Path(script).with_name("answer.json")
    wanted = MemoryOptions(model=script, device="cpu").to_dict()
    question.write_text(json.dumps({"footprint": wanted, "answer": str(answer)}))
    os.environ[PLAN_ONLY] = str(question)
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
    return json.loads(answer.read_text())


@pytest.mark.parametrize(
    ("model", "words", "line"),
    [
        ("nowhere.py", {}, "MODEL: no file at 'nowhere.py'"),
        ("gpt:layers=1,hidden=8,heads=1,sequence=4", {}, "--batch-size is missing"),
        ("gpt:layers=1,hidden=8,heads=1,sequence=4", {"batch": 1, "optimizer": "adamm"}, "no 'adamm'"),
        ("gpt:layers=1,hidden=8,heads=1,sequence=4", {"batch": 1, "shard": 5}, "--shard 5: expected 0, 1, 2 or 3"),
        ("gpt:layers=1,hidden=8,heads=1,sequence=4", {"batch": 0}, "expected 1 or more"),
        ("gpt:layers=2,hidden=8,heads=2,sequence=4", {"batch": 1, "split": 64}, "can be cut in at most 2; take fewer"),
        (
            "torch.nn:PReLU",
            {"batch": 8, "input": "4", "split": 2},
            "'PReLU' has no layers that plans split by themselves",
        ),
        (
            "gpt:layers=2,hidden=8,heads=2,sequence=4",
            {"batch": 1, "stages": 2, "low_memory": True},
            "low_memory and pipeline do not",
        ),
        ("gpt:layers=2,hidden=8,heads=2,sequence=4", {"batch": 1, "stages": 2, "procs": 3}, "3 is not a multiple"),
    ],
)
def test_mistakes_are_one_line(model: str, words: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        run_memory(MemoryOptions(model, **words))
    assert len(str(error.value).splitlines()) == 1


def test_the_tables_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    run_memory(
        MemoryOptions("gpt:layers=3,hidden=64,heads=4,sequence=32,vocabulary=100", batch=4, procs=2, device="cuda")
    )
    shown = capsys.readouterr().out
    how = "4 samples on each of 2 processes, amp bf16 (by itself, on a GPU)"
    assert shown.startswith(f"gpt(3 layers, hidden 64), adamw: {how}\n")
    assert "1 .. 3, each of 3" in shown
    assert "the peak would be lower with" in shown


def test_a_saved_plan_holds_what_the_same_words_do(tmp_path: Path) -> None:
    model = "gpt:layers=4,hidden=32,heads=2,sequence=8,vocabulary=60"
    looked = find_source(plans.PlanOptions(model=model, cluster="1xCPU", batch=8), Cluster.parse("1xCPU")).profile
    draft = Draft(batch=8, stage=2, cuts=(3,), micro_batches=2, schedule="1f1b", replicate=2, shard=1)
    make_saved_plan(draft, looked).save(tmp_path / "plan.json")
    planned = asked(model, plan=str(tmp_path / "plan.json"))
    marks = ModelMarks(
        units={name: int(at >= 3) for at, name in enumerate(looked.names)}, splits={}, replicates=(),
        pipeline=Pipeline(micro_batches=2), default=None,
    )  # fmt: skip
    written = find_footprint(looked, TrainingJob(samples=4, procs=4, strategy=Strategy(shard=1), marks=marks), "adamw")
    assert planned == written
    assert [one.place for one in planned.each] == ["stage 0", "stage 1"]
    with pytest.raises(UsageError, match="--plan already sets --shard; remove --shard or --plan"):
        asked(model, plan=str(tmp_path / "plan.json"), shard=2)
