"""Workers on a GPU with parameter servers, whose dense blocks lie in host memory or on the GPU."""

from __future__ import annotations

from typing import Any

import plain
import pytest
from harness import run
from plain import DEVICE, Trained, assert_equal, batch_of, train_plainly
from serving import served
from zoo import QUIET

import echelon
from echelon import ParameterServer, Strategy

STEPS = 6


def work(settings: dict[str, Any]) -> Trained:
    """Train on this worker's share of each batch."""
    world = echelon.init(device=DEVICE)
    model = plain.made("words")
    servers = ParameterServer(min_block_size=256, **settings)
    engine = echelon.distribute(
        model,
        loss=plain.LOSSES["words"],
        optimizer=plain.optimizer_of(model),
        strategy=Strategy(fast=False, ps=servers),
        log=QUIET,
    )
    devices = {parameter.device.type for parameter in model.parameters()}
    losses = [float(engine.step(*plain.my_share(batch_of("words", step)))) for step in range(STEPS)]
    engine.synchronize()
    weights = plain.in_host_memory(dict(model.state_dict()))
    engine.close()
    return Trained(losses, weights, notes={"devices": devices, "device": world.device.type})


@pytest.mark.parametrize("server_device", dict.fromkeys(["cpu", DEVICE]))
def test_workers_on_a_gpu_equal_a_plain_loop(server_device: str) -> None:
    expected = run(train_plainly, "words", STEPS, ranks=1)[0]
    found = served(work, {"server_device": server_device}, servers=2, workers=2)
    for trained in found:
        assert trained.notes == {"devices": {DEVICE}, "device": DEVICE}
        for name, value in expected.weights.items():
            assert (trained.weights[name] - value).abs().max() <= 1e-5, name
    mean = [sum(losses) / 2 for losses in zip(*(trained.losses for trained in found), strict=True)]
    assert_equal(Trained(mean, found[0].weights), expected)
