"""``echelon.zoo.load``: a model with its loss, checkpoints and loader in one call, the same on any number of ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from harness import run

import echelon
from echelon import Strategy
from echelon.base.errors import UsageError

STEPS = 4


def train() -> dict[str, Any]:
    """An application as Fleet's users write it."""
    echelon.init(seed=3)
    app = echelon.zoo.load("resnet_v1_18", num_classes=4, image_size=48, width=4, num_sample_per_epoch=64)
    strategy = Strategy(
        recompute=True,
        recompute_configs={"checkpoints": app.checkpoints},
        lars=True,
        lars_configs={"lars_coeff": 0.01},
    )
    engine = echelon.distribute(
        app.model,
        loss=app.loss,
        optimizer=torch.optim.SGD(app.model.parameters(), lr=0.01, momentum=0.9),
        strategy=strategy,
        log=echelon.Log(console=False),
    )
    loader = app.loader(engine, global_batch=16)
    losses = [float(engine.step(*batch)) for batch, _ in zip(loader, range(STEPS), strict=False)]
    judged = engine.evaluate(app.data.test, batch_size=4, metrics=app.metrics)
    weights = {name: value.clone() for name, value in app.model.state_dict().items()}
    return {"losses": losses, "judged": judged, "weights": weights, "checkpoints": app.checkpoints}


def test_two_ranks_equal_one() -> None:
    alone = run(train, ranks=1)[0]
    assert alone["checkpoints"] == ("layers.*",)
    assert len(alone["losses"]) == STEPS
    for mine in run(train, ranks=2):
        assert mine["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert mine["judged"] == pytest.approx(alone["judged"], rel=1e-3)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=1e-3, atol=1e-5, msg=name)


def mistakes() -> list[str]:
    """Return the line of each."""
    echelon.init()
    lines = []
    for name, parameters in [
        ("resnet_v1_5", {}),
        ("lenet", {"image_siz": 3}),
        ("lenet", {"amp": True}),
        ("wide_deep", {"dataset_dir": "."}),
    ]:
        with pytest.raises(UsageError) as raised:
            echelon.zoo.load(name, **parameters)  # type: ignore[arg-type]
        lines.append(str(raised.value))
    return lines


def test_mistakes_are_one_line() -> None:
    model, parameter, strategy, folder = run(mistakes, ranks=1)[0]
    assert "there is no model 'resnet_v1_5'" in model
    assert "did you mean 'image_size'?" in parameter
    assert strategy == "load(amp=...): it belongs to the strategy; write distribute(strategy=Strategy(...))"
    assert "by dataset_name, one of adult, click_log, criteo, csv" in folder


def test_importing_echelon_brings_no_zoo() -> None:
    code = "import sys, echelon; sys.exit('torch' in sys.modules or 'echelon.zoo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
