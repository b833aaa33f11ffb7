"""Rows and gradients that travel as bfloat16: the bits of torch's rounding, and steps against a numpy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from serving import served
from shards import DIMS, VOCABULARY, Servers, carried, job

import echelon
from echelon.base.errors import EchelonError, UsageError
from echelon.nn import SparseEmbedding
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.table import narrow, widen


def rounded(values: np.ndarray) -> np.ndarray:
    """The reference: torch's own conversion."""
    return torch.from_numpy(np.array(values)).bfloat16().float().numpy()


def test_rounding_has_the_bits_of_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    edges = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1], np.uint32)
    values = np.concatenate([bits, edges]).view(np.float32)
    found = widen(narrow(values))
    is_nan = np.isnan(values)
    assert (np.isnan(found) == is_nan).all()
    assert (found[~is_nan].view(np.uint32) == rounded(values)[~is_nan].view(np.uint32)).all()


def train(wire: str, mode: str) -> dict[str, Any]:
    """Three steps of one worker on the sum of rows times numbers: gradients that bfloat16 cannot hold."""
    echelon.init(seed=0)
    module = SparseEmbedding(4, name="ids", optimizer=echelon.strategy.sparse_update_rules.Sgd(lr=0.5))
    model = torch.nn.Sequential(module, torch.nn.Flatten(), torch.nn.Linear(8, 1))
    ids = torch.tensor([[3, -7], [3, 2**62], [5, 5]])
    wanted = torch.tensor([[0.3], [-1.7], [2.1]])
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(mode=mode, wire=wire, prefetch=False)),
        log=echelon.Log(console=False),
    )
    losses = [float(engine.step(ids, wanted)) for _ in range(3)]
    engine.synchronize()
    with torch.no_grad():
        rows = module(torch.unique(ids)).numpy().copy()
    dense = [value.detach().numpy().copy() for value in model.parameters()]
    said = list(engine.served.describe())
    engine.close()
    return {"losses": losses, "rows": rows, "dense": dense, "said": said}


def reference() -> dict[str, Any]:
    """The same in numpy: rows are rounded when they are read, gradients when they are sent."""
    from echelon.parameter_server.protocol.job_spec import TableSpec
    from echelon.parameter_server.table import Table
    from echelon.parameter_server.worker.job_description import table_seed

    torch.manual_seed(0)
    weight, bias = (value.detach().numpy().copy() for value in _linear())
    ids = np.array([[3, -7], [3, 2**62], [5, 5]])
    names, index = np.unique(ids, return_inverse=True)
    index = index.reshape(ids.shape)
    rows = Table(TableSpec(name="ids", dim=4, seed=table_seed(0, "ids"))).pull(names).copy()
    wanted, losses = np.array([[0.3], [-1.7], [2.1]], np.float32), []
    for _ in range(3):
        seen = rounded(rows)[index].reshape(3, 8)
        error = seen @ weight.T + bias - wanted
        losses.append(float((error**2).mean()))
        slope = 2 * error / 3
        grad = np.zeros_like(rows)
        np.add.at(grad, index.reshape(-1), (slope @ weight).reshape(6, 4))
        weight, bias = weight - np.float32(0.1) * slope.T @ seen, bias - np.float32(0.1) * slope.sum(0)
        rows = rows - np.float32(0.5) * rounded(grad)
    return {"losses": losses, "rows": rounded(rows), "dense": [weight, bias]}


def _linear() -> list[torch.Tensor]:
    import random

    random.seed(0)
    return list(torch.nn.Linear(8, 1).parameters())


def test_steps_with_narrow_rows_equal_the_reference() -> None:
    """Two servers; the dense part stays float32, and the run says that the wire is inexact and no use on one host."""
    (found,) = served(train, "bfloat16", "sync", servers=2, workers=1)
    wanted = reference()
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["rows"], wanted["rows"], rtol=1e-2)  # a rounding may fall to the other side
    assert (np.abs(found["rows"] - wanted["rows"]) > 1e-6).mean() < 0.1
    for value, expected in zip(found["dense"], wanted["dense"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
    assert (found["rows"] == rounded(found["rows"])).all()
    assert "parameter server: sync (inexact)" in found["said"][-1]
    assert "wire='bfloat16' only costs time on one host" in found["said"][-2]


def test_a_push_takes_narrow_rows_and_nothing_else_narrow() -> None:
    servers = Servers(1)
    servers.all({"op": "open", "worker": 0, "job": job(mode="async", blocks=()).to_json()})
    ids = VOCABULARY[:3]
    head = {"op": "pull", "worker": 0, "step": 0, "tables": {"users": 3}, "peek": True}
    wide = servers.say(0, head, ids).arrays[0]
    thin = servers.say(0, {**head, "narrow": True}, ids).arrays[0]
    assert thin.dtype == np.uint16
    assert (widen(thin) == rounded(wide)).all()
    grad = np.linspace(-1, 1, 3 * DIMS["users"], dtype=np.float32)
    push = {"op": "push", "worker": 0, "seq": 0, "tables": {"users": 3}, "has": ["ids", "rows"]}
    with pytest.raises(EchelonError, match="ids are uint16, expected int64"):
        servers.say(0, push, narrow(grad)[:3], grad)
    with pytest.raises(EchelonError, match="gradient of table 'users' that is NaN"):
        servers.say(0, push, ids, narrow(np.full_like(grad, np.nan)))
    servers.say(0, push, ids, narrow(grad))
    moved = servers.say(0, head, ids).arrays[0]
    np.testing.assert_allclose(moved, wide - np.float32(0.1) * rounded(grad), rtol=1e-6)
    assert carried(WireMessage({}, [thin])).arrays[0].dtype == np.uint16


def test_narrow_wire_is_refused_in_geo_mode() -> None:
    with pytest.raises(UsageError, match=r"wire.*'float32' with mode='geo'"):
        echelon.ParameterServer(mode="geo", wire="bfloat16")
