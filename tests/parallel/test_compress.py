"""Deep gradient compression on one rank, against the algorithm written down in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.base.errors import CheckpointError, UsageError
from echelon.parallel.data.compressor import Compressor, apply_sparse, schedule_sparsity

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WIRES = [None, torch.float16, torch.bfloat16]
SHAPES = {"conv": (8, 6, 3, 3), "matrix": (40, 30), "bias": (7,), "long": (3000,)}
WARM_UP = [0.75, 0.9375, 0.984375, 0.996, 0.999]


# ---- the reference: fp32 numpy, one array a parameter, everything sorted, every loop in the open


def as_sent(value: np.ndarray, wire: torch.dtype | None) -> np.ndarray:
    """Round fp32 values as the wire dtype does, and return them in fp32."""
    if wire is None:
        return value.copy()
    if wire == torch.float16:
        return np.clip(value, -65504, 65504).astype(np.float16).astype(np.float32)
    bits = value.view(np.uint32)
    nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
    return (nearest_even & np.uint32(0xFFFF0000)).view(np.float32)


class Reference:
    def __init__(self) -> None:
        self.u = {name: np.zeros(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}
        self.v = {name: np.zeros(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}

    def step(
        self, grads: dict[str, np.ndarray], mu: float, nesterov: bool, sparsity: float, wire: torch.dtype | None
    ) -> dict[int, float]:
        sent, base = {}, 0
        for name in SHAPES:
            g, u, v = grads[name].reshape(-1), self.u[name], self.v[name]
            if nesterov:
                u[:] = np.float32(mu) * (u + g)
                v[:] = v + (u + g)
            else:
                u[:] = np.float32(mu) * u + g
                v[:] = v + u
            k = max(1, round(v.size * (1 - sparsity)))
            chosen = np.argsort(-np.abs(v), kind="stable")[:k]
            values = as_sent(v[chosen], wire)
            u[chosen] = 0
            v[chosen] = v[chosen] - values
            sent.update(zip((base + chosen).tolist(), values.tolist(), strict=True))
            base += v.size
        return sent


def compressor(shapes: dict[str, tuple[int, ...]] = SHAPES, device: str = "cpu") -> Compressor:
    return Compressor(list(shapes), [int(np.prod(shape)) for shape in shapes.values()], device)


def as_torch(name: str, grad: np.ndarray) -> Tensor:
    """The same gradient in an awkward memory layout."""
    tensor = torch.from_numpy(grad)
    if name == "conv":
        return tensor.to(memory_format=torch.channels_last)
    return tensor.t().contiguous().t() if name == "matrix" else tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_twenty_steps_equal_the_reference(nesterov: bool, wire: torch.dtype | None, device: str) -> None:
    rng = np.random.default_rng(3)
    ours, reference = compressor(device=device), Reference()
    total, expected_total = np.zeros(sum(ours.sizes)), np.zeros(sum(ours.sizes))
    for step in range(20):
        sparsity = schedule_sparsity(step, 0, 15, WARM_UP)
        assert sparsity is not None
        grads = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
        for index, name in enumerate(SHAPES):
            ours.accumulate(index, as_torch(name, grads[name]).to(device), 0.9, nesterov)
        indices, values = ours.select(sparsity, wire)
        expected = reference.step(grads, 0.9, nesterov, sparsity, wire)
        assert indices.dtype == torch.int32
        assert values.dtype == (wire or torch.float32)
        sent = dict(zip(indices.tolist(), values.tolist(), strict=True))
        assert sent.keys() == expected.keys()
        assert len(sent) == indices.numel() == ours.count(sparsity)
        chosen = list(sent)
        total[chosen] += [sent[i] for i in chosen]
        expected_total[chosen] += [expected[i] for i in chosen]
        # fp32 numbers a rounding apart may become neighbours in 16 bits; what is sent and what is left add up.
        np.testing.assert_allclose([sent[i] for i in chosen], [expected[i] for i in chosen], rtol=SPACING[wire])
        v, expected_v = state(ours, "v"), np.concatenate(list(reference.v.values()))
        np.testing.assert_allclose(total + v, expected_total + expected_v, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(state(ours, "u"), np.concatenate(list(reference.u.values())), rtol=1e-6, atol=1e-6)
        assert (np.abs(v[chosen]) <= LEFT[wire] * np.abs([sent[i] for i in chosen])).all()


SPACING = {None: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # of neighbouring numbers, relative
LEFT = {None: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # behind a value that was sent, relative


def test_each_parameter_sends_its_own_share_in_order() -> None:
    ours = compressor()
    for index, shape in enumerate(SHAPES.values()):
        ours.accumulate(index, torch.randn(shape, generator=torch.Generator().manual_seed(index)), 0.0)
    indices, _ = ours.select(0.99)
    assert ours.counts(0.99) == [4, 12, 1, 30]
    for offset, size, part in zip(ours.offsets, ours.sizes, indices.split(ours.counts(0.99)), strict=True):
        assert int(part.min()) >= offset
        assert int(part.max()) < offset + size


@pytest.mark.parametrize("wire", WIRES)
def test_many_entries_leave_as_few_do(wire: torch.dtype | None) -> None:
    ours = Compressor(["a", "b"], [400_000, 50_000], "cpu")
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator) for size in ours.sizes]
    for index, grad in enumerate(grads):
        ours.accumulate(index, grad, 0.9)
    indices, values = ours.select(0.25, wire)
    chosen, grad = np.zeros(450_000, bool), torch.cat(grads).numpy()
    chosen[indices.numpy()] = True
    for part in (slice(0, 400_000), slice(400_000, None)):
        assert chosen[part].sum() == round(0.75 * grad[part].size)
        assert np.abs(grad[part][chosen[part]]).min() >= np.abs(grad[part][~chosen[part]]).max()
    np.testing.assert_array_equal(state(ours, "u"), np.where(chosen, 0.0, grad))
    sent = np.zeros(450_000, np.float32)
    sent[indices.numpy()] = values.float().numpy()
    np.testing.assert_array_equal(sent, np.where(chosen, as_sent(grad, wire), 0.0))
    np.testing.assert_array_equal(state(ours, "v"), (grad - sent).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_dtype_enter_in_fp32(dtype: torch.dtype) -> None:
    grad = torch.randn(300, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    states = []
    for given_as in (grad, grad.float(), grad.t().contiguous().t()):
        ours = Compressor(["w"], [grad.numel()], "cpu")
        for _ in range(3):
            ours.accumulate(0, given_as, 0.9)
        states.append(ours.tensors())
    for state in states[1:]:
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, states[0][key], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(states[0]["u.w"], grad.reshape(-1).float() * 2.71, rtol=1e-5)


# ---- nothing is lost


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[np.ndarray], list[float]]:
    """Some steps of gradients for two parameters in one row, and the sparsity of each step."""
    steps = draw(st.integers(1, 12))
    scale = 10.0 ** draw(st.integers(-6, 6))  # fp16 overflows at the top of it, and sees only zeros at the bottom
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from(["normal", "heavy", "rare"]))
    grads = [rng.standard_normal(600) * scale for _ in range(steps)]
    if shape == "heavy":
        grads = [g * np.minimum(np.abs(rng.standard_cauchy(600)), 100) for g in grads]
    if shape == "rare":
        grads = [g * (rng.random(600) < 0.01) for g in grads]
    sparsities = draw(st.lists(st.floats(0.0, 1.0), min_size=steps, max_size=steps))
    return [g.astype(np.float32) for g in grads], sparsities


def run_history(
    ours: Compressor, history: tuple[list[np.ndarray], list[float]], momentum: float, nesterov: bool, wire: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All that was sent, all that was added to v, and the momentum that masking discarded: in fp64, entry by entry."""
    sent, added, discarded = np.zeros(600), np.zeros(600), np.zeros(600)
    for grad, sparsity in zip(*history, strict=True):
        before = state(ours, "v")
        for index, part in enumerate(np.split(grad, [500])):
            ours.accumulate(index, torch.from_numpy(part), momentum, nesterov)
        added += state(ours, "v") - before
        discarded += state(ours, "u")
        indices, values = ours.select(sparsity, wire)
        assert bool(values.isfinite().all())
        sent[indices.numpy()] += values.double().numpy()
        discarded -= state(ours, "u")
    return sent, added, discarded


def state(ours: Compressor, kind: str) -> np.ndarray:
    tensors = ours.tensors()
    return np.concatenate([tensors[f"{kind}.{name}"].double().cpu().numpy() for name in ours.names])


def rounding(history: tuple[list[np.ndarray], list[float]], momentum: float) -> np.ndarray:
    """Return the error of fp32 sums: a few roundings a step, each of no more than the sum of all magnitudes."""
    magnitudes = np.sum([np.abs(g.astype(np.float64)) for g in history[0]], axis=0) / (1 - momentum)
    return 4 * len(history[0]) * 2.0**-24 * magnitudes + 1e-44


@given(history=histories(), wire=st.sampled_from(WIRES))
@settings(max_examples=150)
def test_what_was_sent_and_what_is_left_are_what_was_produced(
    history: tuple[list[np.ndarray], list[float]], wire: torch.dtype | None
) -> None:
    ours = Compressor(["a", "b"], [500, 100], "cpu")
    sent, _, _ = run_history(ours, history, 0.0, False, wire)
    produced = np.sum([g.astype(np.float64) for g in history[0]], axis=0)
    assert (np.abs(sent + state(ours, "v") - produced) <= rounding(history, 0.0)).all()


@given(history=histories(), wire=st.sampled_from(WIRES), nesterov=st.booleans(), momentum=st.sampled_from([0.5, 0.9]))
@settings(max_examples=150)
def test_with_momentum_the_account_balances_too(
    history: tuple[list[np.ndarray], list[float]], wire: torch.dtype | None, nesterov: bool, momentum: float
) -> None:
    ours = Compressor(["a", "b"], [500, 100], "cpu")
    sent, added, discarded = run_history(ours, history, momentum, nesterov, wire)
    u, v = state(ours, "u"), state(ours, "v")
    slack = 2 * rounding(history, momentum)  # Nesterov counts each gradient once more
    assert (np.abs(sent + v - added) <= slack).all()
    produced = np.sum([g.astype(np.float64) for g in history[0]], axis=0)
    balance = (1 - momentum) * (sent + v) + momentum * (u + discarded)
    assert (np.abs(balance - produced) <= slack).all()


def test_what_fp16_cannot_say_leaves_in_parts() -> None:
    ours = Compressor(["w"], [3], "cpu")
    ours.accumulate(0, torch.tensor([150_000.0, -65_510.0, 1e-9]), 0.0)
    received = torch.zeros(3)
    for _ in range(4):
        indices, values = ours.select(0.0, torch.float16)
        assert float(values.abs().max()) <= 65504
        received[indices.long()] += values.float()
    assert received.tolist() == [150_000.0, -65_510.0, 0.0]
    assert ours.tensors()["v.w"].tolist() == [0.0, 0.0, torch.tensor(1e-9).item()]


def test_bf16_of_the_largest_fp32_is_finite() -> None:
    ours = Compressor(["w"], [1], "cpu")
    ours.accumulate(0, torch.tensor([torch.finfo(torch.float32).max]), 0.0)
    _, values = ours.select(0.0, torch.bfloat16)
    assert values.item() == torch.finfo(torch.bfloat16).max
    assert ours.tensors()["v.w"].item() == torch.finfo(torch.float32).max - torch.finfo(torch.bfloat16).max


# ---- landing


def in_layout(kind: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    tensor = torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if kind == "channels_last":
        return tensor.to(memory_format=torch.channels_last)
    if kind == "transposed":
        return tensor.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    if kind == "every other":
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], dim=-1)[..., 0]
    return tensor


def selections(sizes: Sequence[int], counts: Sequence[int], ranks: int) -> tuple[Tensor, Tensor]:
    """Return messages that ``ranks`` ranks could have sent: most entries named by several of them."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(ranks):
        offset, row = 0, []
        for size, count in zip(sizes, counts, strict=True):
            row.append(offset + rng.permutation(size)[:count])
            offset += size
        rows.append(np.concatenate(row))
    indices = torch.from_numpy(np.stack(rows).astype(np.int32))
    return indices, torch.from_numpy(rng.standard_normal(indices.shape).astype(np.float32))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "transposed", "every other"])
@pytest.mark.parametrize("device", DEVICES)
def test_all_ranks_selections_land_in_any_parameter(
    kind: str, dtype: torch.dtype, wire: torch.dtype, device: str
) -> None:
    parameter, vector = in_layout(kind, dtype, device), torch.arange(50.0, dtype=dtype, device=device)
    counts, alphas = [200, 20], [-0.1, -0.7]
    indices, values = selections([360, 50], counts, ranks=4)
    values = values.to(wire)
    before = torch.cat([parameter.reshape(-1), vector]).cpu()
    summed = np.zeros(410)
    for row, change in zip(indices.numpy(), values.double().numpy(), strict=True):
        summed[row] += change
    summed[:360] *= alphas[0]
    summed[360:] *= alphas[1]
    expected = torch.from_numpy(before.double().numpy() + summed).to(dtype)
    apply_sparse([parameter, vector], [0, 360], counts, indices.to(device), values.to(device), alphas)
    after = torch.cat([parameter.reshape(-1), vector]).cpu()
    # One rounding to the parameter's dtype; where fp32 sums and fp64 sums part, its neighbour.
    eps = max(torch.finfo(dtype).eps, 2.0**-22 if dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(after, expected, rtol=eps, atol=eps)
    untouched = np.setdiff1d(np.arange(410), indices.numpy())
    assert torch.equal(after[untouched], before[untouched])
    if kind == "every other":
        assert parameter._base is not None
        assert bool((parameter._base[..., 1] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_the_layout(dtype: torch.dtype, device: str) -> None:
    indices, values = (part.to(device) for part in selections([360], [200], ranks=4))
    results = []
    for kind in ("contiguous", "channels_last", "transposed", "every other", "contiguous"):
        parameter = in_layout(kind, dtype, device)
        apply_sparse([parameter], [0], [200], indices, values, [-0.1])
        results.append(parameter.contiguous())
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_apply_sparse_small_bf16_changes_sum_before_rounding() -> None:
    """Changes of several ranks, each too small for bf16 alone, are summed before they are rounded."""
    parameter = torch.ones(10, dtype=torch.bfloat16)
    indices = torch.full((8, 1), 4, dtype=torch.int32)
    apply_sparse([parameter], [0], [1], indices, torch.full((8, 1), 1.0), [2.0**-10])  # each alone rounds to nothing
    assert parameter.tolist() == [1.0] * 4 + [1.0 + 2.0**-7] + [1.0] * 5


class Largest(TorchDispatchMode):
    """The most entries of any tensor that came to be, views of ``known`` memory aside."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known, self.most = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.most = max(self.most, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_landing_makes_nothing_of_the_parameters_size(dtype: torch.dtype) -> None:
    parameter = torch.zeros(40, 25, 10, 10, dtype=dtype).to(memory_format=torch.channels_last)
    indices, values = selections([100_000], [100], ranks=3)
    with Largest([parameter]) as watch:
        apply_sparse([parameter], [0], [100], indices, values, [1.0])
    assert 0 < watch.most <= 300


def test_three_ranks_that_send_everything_do_plain_momentum_sgd() -> None:
    shapes = {"conv": (8, 6, 3, 3), "bias": (7,)}
    ranks = [compressor(shapes) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=generator) for shape in shapes.values()]
    mine[0] = mine[0].to(memory_format=torch.channels_last)
    theirs = [p.clone() for p in mine]
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=0.0)
    for _ in range(5):
        grads = [[torch.randn(p.shape, generator=generator) for p in mine] for _ in ranks]
        for rank, local in zip(ranks, grads, strict=True):
            for index, grad in enumerate(local):
                rank.accumulate(index, grad, 0.9)
        rows = [rank.select(0.0) for rank in ranks]
        indices, values = torch.stack([i for i, _ in rows]), torch.stack([v for _, v in rows])
        apply_sparse(mine, ranks[0].offsets, ranks[0].counts(0.0), indices, values, [-0.1 / 3] * 2)
        for index, parameter in enumerate(theirs):
            parameter.grad = sum((local[index] for local in grads), torch.zeros_like(parameter)) / 3
        optimizer.step()  # masking clears all momentum when all is sent, so SGD has none either
    for parameter, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-6)


# ---- the schedule


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, None), (9, None), (10, 0.75), (12, 0.75), (13, 0.9375), (16, 0.984375), (19, 0.996), (21, 0.996), (22, 0.999),
     (24, 0.999), (25, 0.999), (10**9, 0.999)],
)  # fmt: skip
def test_sparsity_ramps_up(step: int, expected: float | None) -> None:
    assert schedule_sparsity(step, 10, 15, WARM_UP) == expected


@given(step=st.integers(0, 10**6), begin=st.integers(0, 1000), ramp=st.integers(1, 10**5), length=st.integers(1, 9))
def test_the_schedule_is_the_formula(step: int, begin: int, ramp: int, length: int) -> None:
    sparsities = [1 - 0.5**i for i in range(length)]
    found = schedule_sparsity(step, begin, ramp, sparsities)
    if step < begin:
        assert found is None
    else:
        assert found == sparsities[min(int((step - begin) * len(sparsities) / ramp), len(sparsities) - 1)]


# ---- keeping


def filled(seed: int) -> Compressor:
    ours = Compressor(["a", "b"], [5, 3], "cpu")
    for tensor in ours.tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return ours


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    first, second = filled(1), filled(2)
    second.load({key: tensor.clone() for key, tensor in first.tensors().items()})
    for ours in (first, second):
        ours.accumulate(0, torch.arange(5.0), 0.9)
        ours.accumulate(1, torch.arange(3.0), 0.9)
    for one, other in zip(first.select(0.5), second.select(0.5), strict=True):
        assert torch.equal(one, other)
    for key, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[key])


def test_one_rank_takes_over_what_all_owed() -> None:
    heir, ranks = filled(0), [filled(seed) for seed in (1, 2, 3)]
    heir.clear()
    for rank in ranks:
        owed = rank.tensors()
        for name in rank.names:
            heir.add(name, owed[f"u.{name}"], owed[f"v.{name}"])
    for key, tensor in heir.tensors().items():
        expected = np.sum([rank.tensors()[key].numpy() for rank in ranks], axis=0)
        np.testing.assert_allclose(tensor, expected, rtol=1e-6)


def test_no_parameters_give_an_empty_message() -> None:
    ours = Compressor([], [], "cpu")
    indices, values = ours.select(0.9)
    assert (indices.numel(), values.numel(), ours.count(0.9)) == (0, 0, 0)
    assert indices.dtype == torch.int32


def line_of(action: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_mistakes_are_named() -> None:
    ours = filled(0)
    sparse = torch.eye(3).to_sparse()
    assert line_of(lambda: ours.accumulate(1, torch.zeros(4), 0.9), UsageError).startswith("'b' got a 4-entry gradient")
    assert line_of(lambda: ours.accumulate(1, sparse, 0.9), UsageError).startswith("'b' got a sparse gradient")
    assert line_of(lambda: ours.select(1.5), UsageError).startswith("the sparsity is 1.5;")
    assert line_of(lambda: schedule_sparsity(0, 0, 0, [0.9]), UsageError).startswith("a sparsity schedule was given")
    assert line_of(lambda: schedule_sparsity(0, 0, 1, []), UsageError).startswith("a sparsity schedule was given")
    kept = {key: tensor.clone() for key, tensor in ours.tensors().items()}
    less = {key: tensor for key, tensor in kept.items() if key != "v.b"}
    assert line_of(lambda: ours.load(less), CheckpointError).startswith("'v.b' is missing from")
    assert line_of(lambda: ours.load(kept | {"u.c": torch.zeros(1)}), CheckpointError).startswith(
        "'u.c' is only in the compression state"
    )
    short = kept | {"u.a": torch.zeros(4)}
    assert "has 4 entries saved and 5 here" in line_of(lambda: ours.load(short), CheckpointError)
    assert line_of(lambda: ours.add("c", torch.zeros(1), torch.zeros(1)), CheckpointError).startswith("'c' has a")
