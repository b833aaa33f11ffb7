"""A rank's parts of a model are not taken for the model."""

from __future__ import annotations

import copy
import io
from typing import Any

import matrix
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import QUIET

import echelon
from echelon import Strategy
from echelon.base.errors import UsageError

PARTS = {
    "split2": "this rank holds its parts of split layers only",
    "1f1b2": "this rank holds the layers of its own stages only",
    "shard3": "shard=3 has whole parameters only while their layer computes",
}
WHOLE = ("dp2", "shard1")


def _train(layout: str) -> tuple[echelon.Engine, nn.Module, AveragedModel]:
    how = matrix.LAYOUTS[layout]
    torch.manual_seed(3)
    model = matrix.UNet()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    echelon.annotate(model, how.marks("unet"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = Strategy(fast=False, shard=how.shard)
    engine = echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer, strategy=strategy, log=QUIET)
    batch = matrix.batch_of("unet", 0)
    engine.step(*matrix.share(batch, engine.world.data_rank, engine.plan.replicas))
    return engine, model, averaged


def _refusal(call: Any, *args: Any) -> str:
    with pytest.raises(UsageError) as refused:
        call(*args)
    return str(refused.value)


def look_at_states() -> dict[str, list[str]]:
    """Return the messages if a script takes ``state_dict()`` of model and layer, or averages weights itself."""
    echelon.init()
    said: dict[str, list[str]] = {}
    for layout in PARTS:
        engine, model, averaged = _train(layout)
        said[layout] = [
            _refusal(lambda model=model: torch.save(model.state_dict(), io.BytesIO())),
            _refusal(copy.deepcopy(model.first).state_dict),
            _refusal(averaged.update_parameters, model),
        ]
        assert set(model.state_dict(keep_vars=True)) == set(engine.whole_state())
        averaged.update_parameters(matrix.UNet())  # another model, which is whole
        engine.close()
    for layout in WHOLE:
        engine, model, averaged = _train(layout)
        averaged.update_parameters(model)
        found = {name: value.clone() for name, value in averaged.module.state_dict().items()}
        torch.testing.assert_close(found, engine.whole_state(), rtol=0, atol=0)
        torch.testing.assert_close(dict(model.state_dict()), engine.whole_state(), rtol=0, atol=0)
        engine.close()
    return said


def test_states_of_parts_are_refused_and_whole_ones_are_not() -> None:
    found = run(look_at_states)
    assert found[0] == found[1]
    whole = "use engine.whole_state() on all ranks: torch.save(state, ...), or save_pretrained(dir, state_dict=state)"
    average = (
        "AveragedModel.update_parameters(): this rank holds parts of the model, which this class cannot average; "
        "use engine.ema(decay=...), which averages each rank's parts"
    )
    for layout, what in PARTS.items():
        model, layer, averaged = found[0][layout]
        assert model == layer == f"state_dict(): {what}; {whole}"
        assert averaged == average
