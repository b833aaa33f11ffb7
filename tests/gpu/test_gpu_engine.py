"""The engine on a GPU in fp32: one rank, and ranks that share the GPU, beside a plain loop of torch on it."""

from __future__ import annotations

from typing import Any

import plain
import pytest
import torch
from harness import errors, run
from plain import DEVICE, ON_GPU, Trained, assert_alike, assert_equal, batch_of, train_plainly
from zoo import QUIET

import echelon
from echelon import Amp, Strategy

STEPS, DECAY = 6, 0.9
HALF = "fp16" if ON_GPU else "bf16"  # few CPUs compute in fp16

#: By name: the engine's options, and the plain loop's.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gradient merge": ({"gradient_merge": 2}, {"merge": 2}),
    "recompute": ({"recompute": True}, {}),
    "shard 1": ({"shard": 1}, {}),
    "shard 2": ({"shard": 2}, {}),
    "shard 3": ({"shard": 3}, {}),
    "shard 3, recompute": ({"shard": 3, "recompute": True}, {}),
    "16 bits with a loss scale": (
        {"amp": Amp(dtype=HALF, loss_scale="dynamic", init_scale=2.0**12)},
        {"amp": torch.float16 if ON_GPU else torch.bfloat16},
    ),
}


def engines(kind: str) -> dict[str, Trained]:
    """Train every case on this rank."""
    echelon.init(device=DEVICE)
    batches = [batch_of(kind, step) for step in range(STEPS)]
    return {
        name: plain.train_with_engine(kind, batches, strategy=Strategy(fast=False, **mine))
        for name, (mine, _) in CASES.items()
    }


def loops(kind: str) -> dict[str, Trained]:
    return {name: train_plainly(kind, STEPS, **theirs) for name, (_, theirs) in CASES.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Trained]]:
    return {kind: run(loops, kind, ranks=1)[0] for kind in plain.MODELS}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", plain.MODELS)
def test_ranks_on_one_device_equal_a_plain_loop(kind: str, ranks: int, expected: dict[str, dict[str, Trained]]) -> None:
    shared = ranks > torch.cuda.device_count()
    for found in run(engines, kind, ranks=ranks):
        for name, trained in found.items():
            assert trained.notes["devices"] == {DEVICE}
            if ranks > 1:
                assert trained.notes["backend"] == ("gloo" if shared or not ON_GPU else "nccl")
            compare = assert_alike if "amp" in CASES[name][0] else assert_equal
            compare(trained, expected[kind][name], where=f"{kind}, {name}")


def in_other_ways() -> dict[str, Any]:
    """Batches of a loader, an average of weights, and evaluation."""
    world = echelon.init(device=DEVICE)
    model = plain.made("images")
    optimizer = plain.optimizer_of(model)
    engine = echelon.distribute(
        model, loss=plain.LOSSES["images"], optimizer=optimizer, strategy=Strategy(fast=False), log=QUIET
    )
    engine.ema(DECAY)
    data = tuple(torch.cat(parts) for parts in zip(*(batch_of("images", step) for step in range(STEPS)), strict=True))
    places, losses = set(), []
    for batch in engine.loader(data, global_batch=plain.ROWS, shuffle=False):
        places |= {part.device for part in batch}
        losses.append(float(engine.step(*batch)))
    averages = plain.in_host_memory(engine.ema.whole_state())
    judged = engine.evaluate(data, batch_size=5, metrics=["accuracy"])
    averaged = engine.evaluate(data, batch_size=5, ema=True)["loss"]
    return {
        "places": places == {world.device}, "losses": losses, "averages": averages, "judged": judged,
        "averaged": averaged, "weights": plain.in_host_memory(engine.whole_state()), "data": data,
    }  # fmt: skip


def judged_plainly(both: list[dict[str, torch.Tensor]], data: tuple[torch.Tensor, ...]) -> list[tuple[float, float]]:
    """Return loss and accuracy of each of these weights, all samples at once."""
    model, found = plain.made("images").to(DEVICE).eval(), []
    x, y = (part.to(DEVICE) for part in data)
    for weights in both:
        model.load_state_dict(weights)
        with torch.no_grad():
            output = model(x)
        found.append((float(plain.LOSSES["images"](output, y)), float((output.argmax(1) == y).float().mean())))
    return found


def test_loader_average_and_evaluation_equal_a_plain_loop() -> None:
    one = run(train_plainly, "images", STEPS, ranks=1)[0]
    average = run(train_plainly, "images", STEPS, decay=DECAY, ranks=1)[0]
    for found in run(in_other_ways, ranks=2):
        assert found["places"], "the loader left a batch in host memory"
        assert_equal(Trained(found["losses"], found["weights"]), one)
        for name, expected in average.weights.items():
            torch.testing.assert_close(found["averages"][name], expected, rtol=1e-5, atol=1e-5)
        both = [found["weights"], found["averages"]]
        (loss, accuracy), (averaged, _) = run(judged_plainly, both, found["data"], ranks=1)[0]
        assert found["judged"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["judged"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert found["averaged"] == pytest.approx(averaged, rel=1e-5)


def own_loop() -> Trained:
    """A loop that calls the model, backward() and update() itself."""
    world = echelon.init(device=DEVICE)
    model, losses = plain.made("words"), []
    engine = echelon.distribute(model, optimizer=plain.optimizer_of(model), strategy=Strategy(fast=False), log=QUIET)
    for step in range(STEPS):
        x, y = (part.to(world.device) for part in plain.my_share(batch_of("words", step)))
        loss = plain.LOSSES["words"](model(x), y)
        engine.backward(loss)
        engine.update()
        total = loss.detach().clone()
        if world.size > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / world.size)
    return Trained(losses, plain.in_host_memory(engine.whole_state()))


def test_a_loop_of_ones_own_equals_a_plain_loop() -> None:
    one = run(train_plainly, "words", STEPS, ranks=1)[0]
    for found in run(own_loop, ranks=2):
        assert_equal(found, one)


# ---- the device ----


def devices(asked: list[Any]) -> list[str]:
    found = []
    for device in asked:
        found.append(str(echelon.init(device=device).device))
        echelon.distributed.world.shutdown()
    return found


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_device_is_taken_as_it_was_asked() -> None:
    asked = [None, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), "cpu"]
    assert run(devices, asked, ranks=1)[0] == ["cuda:0"] * 5 + ["cpu"]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_gpu_that_is_not_there_is_one_line() -> None:
    assert "device 'cuda:99' was asked for, but torch sees only" in errors(devices, ["cuda:99"], ranks=1)[0]


def backend_of() -> tuple[str, int]:
    world = echelon.init()
    total = torch.ones(4, device=world.device)
    torch.distributed.all_reduce(total)
    return world.backend, int(total.sum())


def test_ranks_that_share_a_gpu_talk_by_gloo() -> None:
    ranks = torch.cuda.device_count() + 1 if ON_GPU else 2
    assert run(backend_of, ranks=ranks) == [("gloo", 4 * ranks)] * ranks


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not ON_GPU, reason="needs two GPUs")
def test_ranks_with_a_gpu_each_talk_by_nccl() -> None:
    assert run(backend_of, ranks=2) == [("nccl", 8)] * 2
