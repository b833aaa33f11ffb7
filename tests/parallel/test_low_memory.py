"""Low-memory training is the algorithm its page describes: an independent one in numpy arrives at the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Checkpoint, LowMemory, LrScaling, Strategy
from echelon.base.errors import CheckpointError, UsageError
from echelon.parallel.low_memory import building, formats
from echelon.parallel.low_memory.state_placement import choose, spread, state_bytes

Array = npt.NDArray[Any]

# ---- the algorithm once more, in numpy ----

WORDS = 37


class Tied(nn.Module):
    """A table that is also the head, repeated blocks, sizes that fill no block of 256, an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 20), nn.Tanh()) for _ in range(3))
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.table.weight.t()


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(WORDS, (8, 6), generator=g) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


def hashed(number: Array) -> Array:
    number = number.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = (number ^ (number >> np.uint32(shift))) * np.uint32(factor)
    return number ^ (number >> np.uint32(16))


def coded(values: Array, scale: Array, power: int, levels: int, chance: Array) -> Array:
    """The code below or above, by chance, of values that are ``(code / levels) ** power`` parts of the scale."""
    one = np.float32(1)
    inverse = np.divide(one, scale, out=np.zeros_like(scale), where=scale > 1e-37)
    share, constant = np.abs(values) * inverse, np.float32(1 / levels**power)

    def level(code: Array) -> Array:
        square = code * code
        return (square if power == 2 else square * square) * constant

    root = share
    for _ in range(power // 2):
        root = np.sqrt(root)
    below = np.minimum(np.floor(root * np.float32(levels)), np.float32(levels - 1))
    up = chance * (level(below + one) - level(below)) < share - level(below)
    return below + up.astype(np.float32)


class Reference:
    """AdamW on one parameter: fp32 weights, of which bf16 is seen; moments coded between the steps."""

    def __init__(self, weight: Tensor, number: int, decoupled: bool = True) -> None:
        self.exact = weight.detach().float().numpy().ravel().copy()
        self.number, self.decoupled, self.steps, self.shape = number, decoupled, 0, weight.shape
        rows = -(-self.exact.size // 256)
        self.first, self.second = np.zeros((rows, 256), np.float32), np.zeros((rows, 256), np.float32)
        self.codes: list[Array] = []

    def seen(self) -> Tensor:
        """Nearest, halves away from zero: half a unit is added to the magnitude, and the rest cut off."""
        bits = (self.exact.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
        return torch.from_numpy(bits.view(np.float32).copy()).bfloat16().view(self.shape)

    def step(self, grad: Tensor, rate: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        f, size = np.float32, self.exact.size
        self.steps += 1
        flat = grad.detach().float().numpy().ravel()
        if not self.decoupled:
            flat = flat + self.exact * f(decay)
        rows = np.zeros(self.first.size, np.float32)
        rows[:size] = flat
        rows = rows.reshape(-1, 256)
        first = self.first * f(betas[0]) + rows * f(1 - betas[0])
        second = self.second * f(betas[1]) + rows * rows * f(1 - betas[1])
        root = np.sqrt(second) * f((1 - betas[1] ** self.steps) ** -0.5) + f(eps)
        change = first / root * f(rate / (1 - betas[0] ** self.steps))
        shrink = f(1 - rate * decay) if self.decoupled else f(1)
        self.exact = self.exact * shrink - change.ravel()[:size]
        self._keep(first, second)

    def _keep(self, first: Array, second: Array) -> None:
        outer = int(hashed(np.array([self.steps]))[0]) ^ (self.number * 0x9E3779B1 & 0xFFFFFFFF)
        seed = int(hashed(np.array([outer]))[0]) >> 1
        chance = hashed(np.arange(first.size, dtype=np.uint32) + np.uint32(seed)).reshape(first.shape)
        high, low = (
            part.astype(np.float32) / np.float32(65536)
            for part in (chance >> np.uint32(16), chance & np.uint32(0xFFFF))
        )
        scales = np.abs(first).max(1, keepdims=True), second.max(1, keepdims=True)
        one = coded(first, scales[0], 2, 127, high)
        two = coded(second, scales[1], 4, 255, low)
        two = np.where(second > 0, np.maximum(two, 1), 0).astype(np.float32)
        self.codes = [np.where(first < 0, -one, one).ravel()[: self.exact.size], two.ravel()[: self.exact.size]]
        self.first = one * one * np.float32(1 / 127**2) * np.where(first < 0, np.float32(-1), np.float32(1)) * scales[0]
        self.second = two * two * (two * two) * np.float32(1 / 255**4) * scales[1]


OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def reference(steps: int, shares: tuple[int, ...], kind: str, times: float) -> dict[str, Tensor]:
    """Each share's gradients by plain autograd at the bf16 weights, summed in fp32, and the reference's steps."""
    torch.manual_seed(0)
    net = Tied()
    trained = {name: Reference(p, i, kind == "AdamW") for i, (name, p) in enumerate(net.named_parameters())}
    net = net.bfloat16()
    for tokens, target in batches(steps):
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(trained[name].seen())
        for part in zip(tokens.split(shares), target.split(shares), strict=True):
            net.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net(part[0]), part[1])
            (loss * (len(part[0]) / len(tokens)) if len(shares) > 1 else loss).backward()
            for name, parameter in net.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, torch.zeros(())) + parameter.grad.float()
        for name, grad in sums.items():
            trained[name].step(grad, OPTIONS["lr"] * times, OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"])  # type: ignore[operator,arg-type]
    found = {f"{name}.exact": torch.from_numpy(one.exact) for name, one in trained.items()}
    for name, one in trained.items():
        for field, codes in zip(("first", "second"), one.codes, strict=False):
            found[f"{name}.{field}"] = torch.from_numpy(codes)
    return found


def begin(strategy: Strategy, kind: str = "AdamW", device: str = "cpu", **more: Any) -> tuple[Any, nn.Module]:
    echelon.init(seed=0, device=device)
    torch.manual_seed(0)
    net = Tied()
    made = getattr(torch.optim, kind)(net.parameters(), **OPTIONS)
    return echelon.distribute(net, loss=loss_of, optimizer=made, strategy=strategy, log=QUIET, **more), net


def state_of(engine: Any) -> dict[str, Tensor]:
    """Weights rejoined, and codes, as the reference has them."""
    (optimizer,) = engine.optimizers.values()
    found = {}
    for entry in optimizer.entries:
        found[f"{entry.name}.exact"] = formats.join_fp32(entry.parameter.detach(), entry.kept["remainder"]).flatten()
        if entry.kept["step"]:
            found |= {f"{entry.name}.{name}": entry.kept[name].float().flatten() for name in ("first", "second")}
    return found


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


CASES: list[tuple[Strategy, str, float]] = [
    (Strategy(low_memory=True), "AdamW", 1.0),
    (Strategy(low_memory=True, recompute=True, lr_scaling=LrScaling(warmup_steps=0)), "Adam", 2.0),
]


def train_here(shares: tuple[int, ...]) -> list[dict[str, Tensor]]:
    found = []
    for strategy, kind, _ in CASES:
        engine, _ = begin(strategy, kind)
        at = sum(shares[: echelon.rank()])
        mine = slice(at, at + shares[echelon.rank()])
        for tokens, target in batches(6):
            engine.step(tokens[mine], target[mine])
        found.append(state_of(engine))
    return found


def test_one_process_has_the_bits_of_the_reference() -> None:
    for (_, kind, _), found in zip(CASES, train_here((8,)), strict=True):
        assert_same(found, reference(6, (8,), kind, 1.0))


def test_lean_two_uneven_replicas_match_reference_bits() -> None:
    """Two replicas with uneven shares end with the same bits as the reference."""
    ranks = run(train_here, (5, 3), ranks=2)
    for i, (_, kind, times) in enumerate(CASES):
        assert_same(ranks[0][i], ranks[1][i])
        assert_same(ranks[0][i], reference(6, (5, 3), kind, times))


def test_a_loop_of_ones_own_takes_the_same_steps() -> None:
    engine, net = begin(Strategy(low_memory=True))
    for tokens, target in batches(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.backward(loss_of(net(tokens), target))
        engine.update()
    assert_same(state_of(engine), reference(4, (8,), "AdamW", 1.0))


def test_lean_resumed_run_ends_with_same_bits(tmp_path: Path) -> None:
    """A run resumed from a checkpoint ends with the same bits as an uninterrupted one."""
    straight, _ = begin(Strategy(low_memory=True))
    stopped, _ = begin(Strategy(low_memory=True), checkpoint=Checkpoint(dir=str(tmp_path / "kept"), every=3))
    for tokens, target in batches(6):
        straight.step(tokens, target)
    for tokens, target in batches(6)[:3]:
        stopped.step(tokens, target)
    stopped.close()
    again, _ = begin(Strategy(low_memory=True), checkpoint=Checkpoint(dir=str(tmp_path / "kept")))
    assert again.steps == 3
    for tokens, target in batches(6)[3:]:
        again.step(tokens, target)
    assert_same(state_of(again), state_of(straight))
    plain, _ = begin(Strategy(amp="bf16"))
    with pytest.raises(CheckpointError, match="float32"):
        plain.load(tmp_path / "kept")


def test_state_that_is_not_lean_is_refused() -> None:
    engine, net = begin(Strategy(low_memory=True))
    plain = torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in net.parameters()])
    for group in plain.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    plain.step()
    with pytest.raises(CheckpointError, match="not low_memory; go on with the strategy it was saved with"):
        engine.optimizers["main"].load_state_dict(plain.state_dict())


# ---- the forms ----


def test_a_weight_comes_back_from_bf16_and_remainder() -> None:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=g).int()
    edges = torch.tensor([0, 0x8000, 0x7FFF, 0x7F7FFFFF, 0x7F800000, 0x3F808000, 0x3F818000, -(2**31)]).int()
    exact = torch.cat([bits, edges, edges | -(2**31)]).view(torch.float32)
    exact = exact[~exact.isnan()]
    weight, remainder = formats.split_fp32(exact)
    assert torch.equal(formats.join_fp32(weight, remainder).view(torch.int32), exact.view(torch.int32))
    differs = weight != exact.bfloat16()
    assert (exact[differs].view(torch.int32) & 0xFFFF == 0x8000).all()  # torch takes halves to the even one


def test_what_is_not_a_number_is_seen_as_such() -> None:
    weight, _ = formats.split_fp32(torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32))
    assert weight.isnan().all()


def test_lean_moments_decay_with_steps_smaller_than_a_code() -> None:
    """Moments decay at the right rate even though each step is smaller than the distance between two codes."""
    g = torch.Generator().manual_seed(0)
    count, steps, betas = 2560, 400, (0.97, 0.999)
    rule = formats.AdamStepScalars(
        betas, (1 - betas[0], 1 - betas[1]), eps=1e-8, shrink=1.0, decay=0.0, stride=0.0, inverse=1.0
    )
    blocks = torch.zeros(count // 256)
    codes = [torch.zeros(count, dtype=dtype) for dtype in (torch.int16, torch.int8, torch.uint8)]
    state = formats.LowMemoryState(*codes, blocks, blocks.clone())
    weight = torch.zeros(count, dtype=torch.bfloat16)
    grad = torch.randn(count, generator=g)
    formats.update(weight, grad, state, rule, seed=1)
    for step in range(steps):
        formats.update(weight, torch.zeros(count), state, rule, formats.seed_of(0, step))
    second = formats.second_level(state.second.float()) * state.second_scale.repeat_interleave(256)
    wanted = grad.square() * rule.rests[1] * betas[1] ** steps
    assert (state.second > 0).all()
    assert float(second.sum() / wanted.sum()) == pytest.approx(1, abs=0.03)
    small = wanted < wanted.median()
    assert float(second[small].sum() / wanted[small].sum()) == pytest.approx(1, abs=0.06)
    largest = float(grad.abs().max()) * rule.rests[0] * betas[0] ** steps
    assert float(state.first_scale.max()) == pytest.approx(largest, rel=1e-3)


# ---- where things lie, and what is refused ----


def test_what_goes_to_the_host_is_spread_over_the_model() -> None:
    sizes = [8, 100, 100, 8, 100, 100, 8, 100, 100, 100, 100]
    movable = [size > 8 for size in sizes]
    moved = spread(sizes, movable, 0.5)
    large = [away for away, may in zip(moved, movable, strict=True) if may]
    assert large == [True, False] * 4
    assert not any(spread(sizes, movable, 0.0))
    assert spread(sizes, movable, 1.0) == movable
    assert choose([3, 2**21], LowMemory(), torch.device("cpu")).host_bytes == 0
    assert state_bytes(2**20) == 2**20 * 4 + 2**20 // 256 * 8


def test_a_model_is_built_in_bf16_with_the_weights_it_draws() -> None:
    echelon.init(seed=0, device="cpu")
    torch.manual_seed(0)
    with building():
        net = Tied()
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert 0.9 < float(net.table.weight.detach().float().std()) < 1.1
    assert torch.get_default_dtype() == torch.float32
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    engine = echelon.distribute(net, loss=loss_of, optimizer=optimizer, strategy=Strategy(low_memory=True), log=QUIET)
    losses = [float(engine.step(*batches(1)[0])) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
            "low_memory is built on torch.optim.Adam or torch.optim.AdamW",
        ),
        (lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True), "low_memory has no amsgrad"),
        (lambda net: torch.optim.AdamW(net.double().parameters()), "low_memory: 'spare' is torch.float64; build the"),
    ],
)
def test_what_lean_cannot_do_is_refused_in_a_line(make: Any, line: str) -> None:
    echelon.init(seed=0, device="cpu")
    net = Tied()
    with pytest.raises(UsageError, match=line) as caught:
        echelon.distribute(net, loss=loss_of, optimizer=make(net), strategy=Strategy(low_memory=True), log=QUIET)
    assert "\n" not in str(caught.value)


def test_32_bits_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^amp=False and low_memory do not combine: low_memory computes in bf16"):
        Strategy(low_memory=True, amp=False)


def test_sparse_gradients_are_refused() -> None:
    echelon.init(seed=0, device="cpu")
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(UsageError, match=r"'0\.weight' has a sparse gradient; build its embedding with sparse=False"):
        echelon.distribute(
            net,
            loss=loss_of,
            optimizer=torch.optim.AdamW(net.parameters()),
            strategy=Strategy(low_memory=True),
            log=QUIET,
        )


# ---- on a GPU ----

ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="kernel and streams are a GPU's; the claims hold above"
)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_has_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    from echelon.parallel.low_memory import adam_kernel

    count, betas = 70_001, (0.9, 0.999)
    g = torch.Generator().manual_seed(0)
    weight, remainder = formats.split_fp32(torch.randn(count, generator=g))
    blocks = torch.zeros(-(-count // 256))
    codes = (torch.zeros(count, dtype=kind) for kind in (torch.int8, torch.uint8))
    here = formats.LowMemoryState(remainder, *codes, blocks, blocks.clone())  # type: ignore[call-arg]
    there, moved = formats.LowMemoryState(*(kept.cuda() for kept in here.tensors())), weight.cuda()
    for step in range(1, 6):
        grad = (torch.randn(count, generator=g) * torch.rand(count, generator=g) ** 4).to(dtype)
        rule = formats.AdamStepScalars(betas, (1 - betas[0], 1 - betas[1]), 1e-8, 0.999, 0.01, 0.003, 2.0)
        formats.update(weight, grad, here, rule, formats.seed_of(5, step))
        adam_kernel.update(moved, grad.cuda(), there, rule, formats.seed_of(5, step))
    for mine, theirs in zip((weight, *here.tensors()), (moved, *there.tensors()), strict=True):
        assert torch.equal(mine, theirs.cpu())


@ON_GPU
def test_state_in_host_memory_trains_as_on_the_device(tmp_path: Path) -> None:
    (found,) = run(train_on_gpu, str(tmp_path), ranks=1)
    assert_same(found["device"], found["host"])
    assert_same(found["device"], found["resumed"])


def train_on_gpu(directory: str) -> dict[str, dict[str, Tensor]]:
    """With state in either place; and in host memory once more, in two halves."""
    found = {}
    for state in ("device", "host", "resumed"):
        place: Any = "device" if state == "device" else "host"
        strategy = Strategy(low_memory=LowMemory(state=place), fast=False)
        engine, _ = begin(strategy, device="cuda")
        assert (engine.optimizers["main"].places.host_bytes > 0) == (place == "host")
        for i, (tokens, target) in enumerate(batches(6)):
            if state == "resumed" and i == 3:
                engine.save(directory)
                engine, _ = begin(strategy, device="cuda")
                engine.load(directory)
            engine.step(tokens, target)
        kept = engine.optimizers["main"].state.values()
        tensors = {f"{i}.{name}": value for i, one in enumerate(kept) for name, value in one.items() if name != "step"}
        found[state] = {name: value.cpu() for name, value in tensors.items()}
    return found
