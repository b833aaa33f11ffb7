"""The fast path in its own precision, beside a plain loop of torch on the same device.

Without a GPU the parts that a CPU has are asked for, so that the tests themselves are tested.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from harness import run
from plain import DEVICE, ON_GPU, Trained, assert_alike, assert_equal, batch_of, train_plainly, train_with_engine
from zoo import QUIET

import echelon
from echelon import Checkpoint, Fast, Strategy
from echelon.fastpath import compile

STEPS = 6


def strategy_of(kind: str, amp: Any = None) -> Strategy | None:
    """Return the strategy of a case: on a GPU the default, with or without 16 bits; on a CPU what that has of it."""
    if ON_GPU:
        return None if amp is None else Strategy(amp=amp)
    return Strategy(fast=Fast(compile=True, channels_last=kind == "images"), amp="bf16" if amp is None else amp)


def switch_on(sixteen_bits: bool) -> None:
    """Undo what the suite does for comparisons in fp32."""
    os.environ.pop("ECHELON_FAST", None)
    torch.backends.cudnn.enabled = sixteen_bits
    if not ON_GPU:
        compile.backend = "aot_eager"  # quicker to start


def quick(kind: str, amp: Any = None) -> Trained:
    switch_on(amp is None)
    batches = [batch_of(kind, step) for step in range(STEPS)]
    return train_with_engine(kind, batches, strategy=strategy_of(kind, amp))


@pytest.mark.parametrize("kind", plain.MODELS)
def test_the_default_equals_a_plain_loop_in_bf16(kind: str) -> None:
    found = run(quick, kind, ranks=1)[0]
    expected = run(train_plainly, kind, STEPS, amp=torch.bfloat16, ranks=1)[0]
    assert_alike(found, expected, kind)
    chosen, said = found.notes["plan"].fast, found.notes["said"]
    assert found.notes["plan"].amp.dtype == "bf16"
    assert chosen.compiled == (("",) if kind == "images" else tuple(f"blocks.{i}" for i in range(3))), chosen.compiled
    assert chosen.channels_last == (kind == "images")
    assert "compiling failed" not in said
    line = next(line for line in said.splitlines() if "fast: compiled" in line)
    assert ("channels last" in line) == (kind == "images")
    if ON_GPU:
        assert "bf16 (Strategy(amp=False) keeps fp32)" in line
        assert chosen.fused == {"main": "SGD"}
        assert "fused SGD" in line
        assert "CUDA graphs where the host limits the step" in line


@pytest.mark.parametrize("kind", plain.MODELS)
def test_compiled_in_fp32_equals_a_plain_loop(kind: str) -> None:
    """Products are those of fp32, sums come in another order: 24 bits, and some of them for sums."""
    found = run(quick, kind, amp=False, ranks=1)[0]
    assert found.notes["plan"].amp is None
    assert found.notes["plan"].fast.compiled
    assert_equal(found, run(train_plainly, kind, STEPS, ranks=1)[0], 1e-5, kind)


def test_two_ranks_in_bf16_equal_a_plain_loop() -> None:
    expected = run(train_plainly, "words", STEPS, amp=torch.bfloat16, ranks=1)[0]
    for found in run(quick, "words", ranks=2):
        assert found.notes["plan"].amp.dtype == "bf16"
        assert_alike(found, expected, "two ranks")


# ---- checkpoints ----


def saved(directory: str) -> Trained:
    return quick_with(directory, "images", STEPS // 2, None)


def quick_with(directory: str, kind: str, steps: int, strategy: Strategy | None, device: str = DEVICE) -> Trained:
    """Train from the checkpoint that is there to ``steps``, and save."""
    switch_on(strategy is None or bool(strategy.amp))
    echelon.init(device=device)
    model = plain.made(kind)
    engine = echelon.distribute(
        model,
        loss=plain.LOSSES[kind],
        optimizer=plain.optimizer_of(model),
        strategy=strategy or strategy_of(kind),
        checkpoint=Checkpoint(dir=directory, asynchronous=False),
        log=QUIET,
    )
    start = plain.in_host_memory(engine.whole_state())
    losses = [float(engine.step(*batch_of(kind, step))) for step in range(engine.steps, steps)]
    judged = engine.evaluate(batch_of(kind, 99), batch_size=8)["loss"]
    if losses:
        engine.save()
    notes = {"start": start, "judged": judged, "device": str(engine.world.device.type)}
    weights = plain.in_host_memory(engine.whole_state())
    engine.close()
    return Trained(losses, weights, notes=notes)


def test_fast_path_checkpoint_loads_without_it_and_on_cpu(tmp_path: Path) -> None:
    """A checkpoint of the fast path is read without the fast path and on the CPU; the run then continues unchanged."""
    kept = run(saved, str(tmp_path), ranks=1)[0]
    half = STEPS // 2
    on_cpu = run(quick_with, str(tmp_path), "images", half, Strategy(fast=False), "cpu", ranks=1)[0]
    plainly = run(quick_with, str(tmp_path), "images", half, Strategy(fast=False), ranks=1)[0]
    for found in (on_cpu, plainly):
        assert not found.losses
        torch.testing.assert_close(found.notes["start"], kept.weights, rtol=0, atol=0)
        assert found.notes["judged"] == pytest.approx(kept.notes["judged"], rel=2**-6)  # bf16 there, fp32 here
    assert on_cpu.notes["device"] == "cpu"
    assert on_cpu.notes["judged"] == pytest.approx(plainly.notes["judged"], rel=1e-5)
    # back to the fast path: the run goes on as one that nothing has stopped
    run(quick_with, str(tmp_path), "images", half + 1, Strategy(fast=False, amp="bf16"), ranks=1)
    end = run(quick_with, str(tmp_path), "images", STEPS, None, ranks=1)[0]
    expected = run(train_plainly, "images", STEPS, amp=torch.bfloat16, ranks=1)[0]
    assert_alike(Trained(expected.losses[: half + 1] + end.losses, end.weights), expected, "resumed")
