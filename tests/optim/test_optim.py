"""LARS, LAMB and FTRL against a plain numpy reference, and as torch optimizers among others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.optim import FTRL, LAMB, LARS, excluded_names
from echelon.optim.from_torch import lamb_from, lars_from
from echelon.optim.fused import order_of_work

Array = np.ndarray[Any, np.dtype[np.float64]]
SHAPES = [(12, 7), (7,), (3, 2, 5), (4, 4), (9,)]
ZERO_WEIGHT, ZERO_GRAD = 3, 4


# ---- the reference: one parameter, in fp64, straight from the formulas ----


def lars_step(
    w: Array, g: Array, s: dict[str, Any], *, lr: float, momentum: float = 0.9, coeff: float = 0.001,
    weight_decay: float = 0.0005, eps: float = 0.0, excluded: bool = False,
) -> Array:  # fmt: skip
    wd = 0.0 if excluded else weight_decay
    wn, gn = np.linalg.norm(w), np.linalg.norm(g)
    rate = lr
    if wn > 0 and gn > 0 and not excluded:
        rate = lr * coeff * wn / (gn + wd * wn + eps)
    s["v"] = momentum * s.get("v", np.zeros_like(w)) + rate * (g + wd * w)
    return w - s["v"]


def lamb_step(
    w: Array, g: Array, s: dict[str, Any], *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
    weight_decay: float = 0.01, excluded: bool = False,
) -> Array:  # fmt: skip
    s["t"] = s.get("t", 0) + 1
    s["m"] = betas[0] * s.get("m", 0.0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * g * g
    m_hat, v_hat = s["m"] / (1 - betas[0] ** s["t"]), s["v"] / (1 - betas[1] ** s["t"])
    r = m_hat / (np.sqrt(v_hat) + eps) + (0.0 if excluded else weight_decay) * w
    wn, rn = np.linalg.norm(w), np.linalg.norm(r)
    trust = wn / rn if wn > 0 and rn > 0 and not excluded else 1.0
    return w - lr * trust * r


def ftrl_step(
    w: Array, g: Array, s: dict[str, Any], *, lr: float, lr_power: float = -0.5, initial_accumulator: float = 0.1,
    l1: float = 0.0, l2: float = 0.0, excluded: bool = False,
) -> Array:  # fmt: skip
    n = s.get("n", np.full_like(w, initial_accumulator))
    s["n"] = n + g * g
    sigma = (s["n"] ** -lr_power - n**-lr_power) / lr
    s["z"] = z = s.get("z", 0.0) + g - sigma * w
    return np.where(np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / (s["n"] ** -lr_power / lr + 2 * l2))


REFERENCE: dict[type[torch.optim.Optimizer], Callable[..., Array]] = {
    LARS: lars_step, LAMB: lamb_step, FTRL: ftrl_step
}  # fmt: skip
CASES: list[tuple[Any, dict[str, Any]]] = [
    (LARS, {}),
    (LARS, {"coeff": 0.3, "weight_decay": 0.1, "momentum": 0.5, "eps": 0.01}),
    (LARS, {"coeff": 0.02, "weight_decay": 0.0, "momentum": 0.0}),
    (LAMB, {}),
    (LAMB, {"betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.3}),
    (LAMB, {"weight_decay": 0.0}),
    (FTRL, {}),
    (FTRL, {"l1": 0.4, "l2": 0.1}),
    (FTRL, {"lr_power": -0.8, "initial_accumulator": 1.5, "l1": 0.05}),
]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=g) for shape in SHAPES]
    made[ZERO_WEIGHT].zero_()
    return [nn.Parameter(value.to(device, dtype)) for value in made]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=g) * (0.0 if i == ZERO_GRAD and step % 3 == 0 else 1.0)
        param.grad = grad.to(param.device, param.dtype)


def expected(kind: Any, options: dict[str, Any], lrs: list[float], excluded: set[int], steps: int) -> list[Array]:
    params = parameters()
    weights = [param.detach().double().numpy() for param in params]
    states: list[dict[str, Any]] = [{} for _ in weights]
    for step in range(steps):
        set_grads(params, step)
        for i, param in enumerate(params):
            assert param.grad is not None
            grad = param.grad.double().numpy()
            weights[i] = REFERENCE[kind](
                weights[i], grad, states[i], lr=lrs[i], excluded=i in excluded, **options
            )  # fmt: skip
    return weights


def assert_close(params: list[nn.Parameter], weights: list[Array], tolerance: float = 1e-5) -> None:
    for param, weight in zip(params, weights, strict=True):
        np.testing.assert_allclose(param.detach().double().cpu().numpy(), weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_twenty_steps_equal_the_reference(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = kind(params, 0.1, **options)
    for step in range(20):
        set_grads(params, step)
        optimizer.step()
    assert_close(params, expected(kind, options, [0.1] * 5, set(), 20))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_groups_and_exclusions_equal_the_reference(kind: Any) -> None:
    params = parameters()
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.05}]
    optimizer = kind(groups, 0.01, weight_decay=0.05, exclude=[params[1], params[2]])
    for step in range(20):
        set_grads(params, step)
        optimizer.step()
    assert_close(params, expected(kind, {"weight_decay": 0.05}, [0.5, 0.5, 0.01, 0.01, 0.01], {1, 2}, 20))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_lr_of_the_moment_is_used(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = kind(params, 123.0, **options)
    optimizer.param_groups[0]["lr"] = 0.1
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    assert_close(params, expected(kind, options, [0.1] * 5, set(), 3))


def test_ftrl_weights_within_l1_are_exactly_zero() -> None:
    params = parameters()
    optimizer = FTRL(params, 0.1, l1=3.0)
    for step in range(20):
        set_grads(params, step)
        optimizer.step()
    reference = expected(FTRL, {"l1": 3.0}, [0.1] * 5, set(), 20)
    zeros = sum(int((weight == 0).sum()) for weight in reference)
    assert 0 < zeros == sum(int((param == 0).sum()) for param in params) < sum(weight.size for weight in reference)


@pytest.mark.parametrize("kind", [LARS, LAMB, FTRL])
def test_double_is_double(kind: Any) -> None:
    params = parameters(torch.float64)
    optimizer = kind(params, 0.1)
    for step in range(5):
        set_grads(params, step)
        optimizer.step()
    assert_close(params, expected(kind, {}, [0.1] * 5, set(), 5), 1e-13)


@pytest.mark.parametrize("kind", [LARS, LAMB, FTRL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_have_state_in_fp32(kind: Any, dtype: torch.dtype) -> None:
    params, exact = parameters(dtype), [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    ours, theirs = kind(params, 0.1), kind(exact, 0.1)
    set_grads(params, 0)
    for param, twin in zip(params, exact, strict=True):
        assert param.grad is not None
        twin.grad = param.grad.float()
    ours.step()
    theirs.step()
    for param, twin in zip(params, exact, strict=True):
        assert torch.equal(param, twin.to(dtype))  # rounded once, at the end
        for key, value in theirs.state[twin].items():
            assert torch.equal(torch.as_tensor(ours.state[param][key]), torch.as_tensor(value))


# ---- as a torch optimizer ----


@pytest.mark.parametrize("kind", [LARS, LAMB, FTRL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_equal(kind: Any, dtype: torch.dtype) -> None:
    straight, stopped = parameters(dtype), parameters(dtype)
    whole, before = kind(straight, 0.1), kind(stopped, 0.1)
    for step in range(7):
        set_grads(straight, step)
        whole.step()
        if step < 4:
            set_grads(stopped, step)
            before.step()
    after = kind(stopped, 99.0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for step in range(4, 7):
        set_grads(stopped, step)
        after.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True))


def test_a_deep_copy_keeps_its_exclusions() -> None:
    params = parameters()
    twin = copy.deepcopy(LAMB(params, 0.1, exclude=params[:2]))
    copies = twin.param_groups[0]["params"]
    for step in range(3):
        set_grads(copies, step)
        twin.step()
    assert_close(copies, expected(LAMB, {}, [0.1] * 5, {0, 1}, 3))
    assert torch.equal(params[0], parameters()[0])


@pytest.mark.parametrize("kind", [LARS, LAMB, FTRL])
def test_closure_and_missing_gradients(kind: Any) -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = kind([("used", used), ("unused", unused)], 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (used**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert not torch.equal(used, torch.ones(3))
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state


def test_lamb_late_parameter_has_its_own_bias_correction() -> None:
    early, late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = LAMB([early, late], 0.1)
    weights, states = [np.ones(4), np.ones(4)], [{}, {}]
    for step in range(6):
        grad = torch.arange(4.0) - step
        early.grad, late.grad = grad, grad.clone() if step >= 3 else None
        optimizer.step()
        for i in range(2 if step >= 3 else 1):
            weights[i] = lamb_step(weights[i], grad.double().numpy(), states[i], lr=0.1)
    assert_close([early, late], weights)


def refuse(text: str, make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_are_told_in_one_line() -> None:
    params = parameters()
    refuse("LARS(lr=-1.0): expected a number of 0 or more", lambda: LARS(params, -1.0))
    refuse("LARS(momentum=1.0)", lambda: LARS(params, 0.1, momentum=1.0))
    refuse("LARS(coeff=0)", lambda: LARS(params, 0.1, coeff=0))
    refuse("LARS(eps='1')", lambda: LARS(params, 0.1, eps="1"))  # type: ignore[arg-type]
    refuse("LAMB(betas=1.5)", lambda: LAMB(params, 0.1, betas=(0.9, 1.5)).step() or None)
    refuse("expected two numbers", lambda: LAMB(params, 0.1, betas=(0.9,)))  # type: ignore[arg-type]
    refuse("LAMB(weight_decay=-1)", lambda: LAMB([{"params": params, "weight_decay": -1}], 0.1))
    refuse("FTRL(lr=0.0)", lambda: FTRL(params, 0.0))
    refuse("FTRL(lr_power=0.5)", lambda: FTRL(params, 0.1, lr_power=0.5))
    refuse("FTRL(initial_accumulator=0.0)", lambda: FTRL(params, 0.1, initial_accumulator=0.0))
    refuse("empty parameter list", lambda: LARS([], 0.1))
    refuse("not among the optimizer's parameters", lambda: LARS(params, 0.1, exclude=[torch.zeros(2)]))
    refuse("excluded_names()", lambda: LARS(params, 0.1, exclude=["bias"]))  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [LARS, LAMB, FTRL])
def test_sparse_gradients_are_refused_by_name(kind: Any) -> None:
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    refuse("parameter 'weight' has a sparse one", kind(table.named_parameters(), 0.1).step)
    refuse("parameter of shape (10, 3) has a sparse one", kind(table.parameters(), 0.1).step)


def test_ftrl_says_when_a_schedule_ended_at_zero() -> None:
    params = parameters()
    optimizer = FTRL(params, 0.1)
    set_grads(params, 0)
    optimizer.param_groups[0]["lr"] = 0.0
    refuse("let the schedule end above 0", optimizer.step)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_fused_on_a_cpu_is_refused(kind: Any) -> None:
    params = parameters()
    set_grads(params, 0)
    refuse("(fused=True) cannot run: its parameters are on cpu", kind(params, 0.1, fused=True).step)


# ---- whole-parameter norms of shards ----


def train_shard(kind: Any) -> list[list[float]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole = parameters()[0].detach()
    shard = nn.Parameter(whole.chunk(2)[rank].clone())
    optimizer = kind([shard], 0.1)

    def over_ranks(params: list[Tensor], squares: Tensor) -> Tensor:
        assert params[0] is shard
        dist.all_reduce(squares)
        return squares

    optimizer.sum_squares = over_ranks
    source = parameters()
    for step in range(5):
        set_grads(source, step)
        assert source[0].grad is not None
        shard.grad = source[0].grad.chunk(2)[rank].clone()
        optimizer.step()
    return shard.detach().tolist()


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_shards_train_like_the_whole_parameter(kind: Any) -> None:
    halves = run(train_shard, kind, ranks=2)
    np.testing.assert_allclose(np.concatenate(halves), expected(kind, {}, [0.1] * 5, set(), 5)[0], rtol=1e-5, atol=1e-6)


# ---- exclusions by name ----


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.after = nn.LayerNorm(4)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


BIASES = ["conv1.bias", "bn1.bias", "attention.in_proj_bias", "attention.out_proj.bias", "after.bias"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["batch_norm"], ["bn1.weight", "bn1.bias"]),
        (["layer_norm"], ["after.weight", "after.bias"]),
        (["bias"], BIASES),
        ([".b_0"], BIASES),
        (["conv1.w", "layer_norm"], ["conv1.weight", "after.weight", "after.bias"]),
        (["head"], ["embed.weight"]),
        ([], []),
    ],
)
def test_patterns(patterns: list[str], names: list[str]) -> None:
    assert excluded_names(Mixed(), patterns) == names


def test_patterns_that_match_nothing() -> None:
    refuse(
        "'layernorm' matches no parameter; did you mean 'layer_norm'?", lambda: excluded_names(Mixed(), ["layernorm"])
    )
    refuse("'group_norm' matches no parameter", lambda: excluded_names(Mixed(), ["group_norm"]))
    refuse("there are batch_norm, layer_norm, conv1.weight", lambda: excluded_names(Mixed(), ["zzz"]))
    refuse("write ['bias']", lambda: excluded_names(Mixed(), "bias"))
    refuse("part of a name, got ''", lambda: excluded_names(Mixed(), [""]))


# ---- taking an optimizer over ----


def test_lars_from_follows_given_scheduler_without_warnings() -> None:
    """A scheduler on the given optimizer drives the one made from it, without warnings."""
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.4, momentum=0.8, weight_decay=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2, gamma=0.5)
    ours = lars_from(sgd, coeff=0.01, weight_decay=0.1, eps=0.0, exclude=[params[1], torch.zeros(1)])
    assert isinstance(ours, LARS)
    weights = [param.detach().double().numpy().copy() for param in params]
    states: list[dict[str, Any]] = [{} for _ in params]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            set_grads(params, step)
            for i, param in enumerate(params):
                assert param.grad is not None
                weights[i] = lars_step(
                    weights[i], param.grad.double().numpy(), states[i], lr=0.4 * 0.5 ** (step // 2), momentum=0.8,
                    coeff=0.01, weight_decay=0.1, excluded=i == 1,
                )  # fmt: skip
            ours.step()
            scheduler.step()
            sgd.zero_grad()
    assert all(param.grad is None for param in params)
    assert_close(params, weights)


def test_groups_stay_shared_after_a_load_and_for_new_groups() -> None:
    params = parameters()
    adam = torch.optim.AdamW(params[:3], lr=0.3, betas=(0.8, 0.95), weight_decay=7.0)
    ours = lamb_from(adam, weight_decay=0.2, eps=1e-5)
    assert ours.param_groups[0]["betas"] == (0.8, 0.95)
    assert ours.param_groups[0]["weight_decay"] == 0.2
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    adam.param_groups[0]["lr"] = 0.05
    adam.add_param_group({"params": params[3:]})
    assert ours.param_groups is adam.param_groups
    assert ours.param_groups[0]["lr"] == 0.05
    assert ours.param_groups[1]["weight_decay"] == 0.2
    assert ours.param_groups[1]["eps"] == 1e-5


def test_what_cannot_be_taken_over() -> None:
    params = parameters()

    def lars(optimizer: torch.optim.Optimizer) -> Callable[[], LARS]:
        return lambda: lars_from(optimizer, coeff=0.001, weight_decay=0.0, eps=0.0)

    def lamb(optimizer: torch.optim.Optimizer) -> Callable[[], LAMB]:
        return lambda: lamb_from(optimizer, weight_decay=0.0, eps=0.0)

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    refuse("LARS is built on torch.optim.SGD, and the optimizer is a Adam", lars(adam(params)))
    refuse("torch.optim.Adam or torch.optim.AdamW", lamb(sgd(params, lr=0.1)))
    refuse("nesterov=True", lars(sgd(params, lr=0.1, momentum=0.9, nesterov=True)))
    refuse("dampening=0.5", lars(sgd(params, lr=0.1, momentum=0.9, dampening=0.5)))
    refuse("maximize=True", lars(sgd(params, lr=0.1, maximize=True)))
    refuse("amsgrad=True", lamb(adam(params, amsgrad=True)))
    stepped = adam(params)
    set_grads(params, 0)
    stepped.step()
    refuse("has already taken steps", lamb(stepped))
    fresh = sgd(params, lr=0.1)
    refuse("coeff=-1", lambda: lars_from(fresh, coeff=-1, weight_decay=0.5, eps=0.0))
    assert fresh.param_groups[0]["weight_decay"] == 0  # refused, so left as it was
    assert lars(fresh)().param_groups[0]["momentum"] == 0


# ---- the one-kernel step ----


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 30), st.floats(0.5, 16))
def test_work_is_complete_and_waits_only_for_what_came_before(chunks: list[int], lag: int, burst: float) -> None:
    rows = order_of_work(chunks, lag, burst).tolist()
    everything = sorted([2 * t + phase, c] for t, n in enumerate(chunks) for c in range(n) for phase in (0, 1))
    assert sorted(rows) == everything
    measured = dict.fromkeys(range(len(chunks)), 0)
    for code, _ in rows:
        if code % 2:
            assert measured[code // 2] == chunks[code // 2]
        else:
            measured[code // 2] += 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on GPUs only; the same claims hold above")
class TestOnGpu:
    @pytest.mark.parametrize("kind", [LARS, LAMB])
    def test_fused_equals_the_reference(self, kind: Any) -> None:
        params = parameters(device="cuda")
        optimizer = kind(params, 0.1, exclude=[params[1]], fused=True)
        for step in range(20):
            set_grads(params, step)
            optimizer.step()
        assert_close(params, expected(kind, {}, [0.1] * 5, {1}, 20))

    @pytest.mark.parametrize("kind", [LARS, LAMB])
    @pytest.mark.parametrize("shift", [0, 1])  # gradients that begin anywhere, as views of a bucket do
    def test_fused_equals_foreach_at_size_and_repeats_its_bits(self, kind: Any, shift: int) -> None:
        sizes = [3_000_001, 5, 8192, 700_000, 64, 1_000_000, 8191]
        runs = [self.train(kind, sizes, shift, fused) for fused in (True, True, False)]
        for first, again, foreach in zip(*runs, strict=True):
            assert torch.equal(first, again)
            torch.testing.assert_close(first, foreach, rtol=1e-5, atol=1e-5)

    @staticmethod
    def train(kind: Any, sizes: list[int], shift: int, fused: bool) -> list[Tensor]:
        g = torch.Generator("cuda").manual_seed(0)
        params = [nn.Parameter(torch.randn(size, device="cuda", generator=g)) for size in sizes]
        optimizer = kind(params, 0.05, exclude=params[1:2], fused=fused)
        for _ in range(4):
            bucket = torch.randn(shift + sum(sizes), device="cuda", generator=g)
            for param, grad in zip(params, bucket[shift:].split(sizes), strict=True):
                param.grad = grad
            optimizer.step()
        return [param.detach() for param in params]

    @pytest.mark.parametrize("kind", [LARS, LAMB])
    def test_memory_formats(self, kind: Any) -> None:
        weight = torch.randn(8, 4, 3, 3, device="cuda")
        grad = torch.randn(8, 4, 3, 3, device="cuda")
        results = []
        for form in (torch.contiguous_format, torch.channels_last):
            param = nn.Parameter(weight.clone(memory_format=form))
            param.grad = grad.clone(memory_format=form)
            kind([param], 0.1, fused=True).step()
            results.append(param.detach())
        torch.testing.assert_close(*results)
        param.grad = grad.clone()  # another layout than the parameter's: the lists' way
        kind([param], 0.1).step()
        refuse("differ in dtype or memory layout", kind([param], 0.1, fused=True).step)
        column = nn.Parameter(torch.randn(6, 4, device="cuda")[:, 1])
        column.grad = torch.randn(6, 4, device="cuda")[:, 1]
        refuse("is not dense in memory", kind([column], 0.1, fused=True).step)
