"""Tables in device memory through the engine: in one process, in several workers, and from and to checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ON_GPU, errors, run, tolerance_of
from serving import served
from torch import Tensor, nn

import echelon
from echelon.base.errors import UsageError
from echelon.nn import SparseEmbedding

STEPS, BATCH = 6, 16


class Model(nn.Module):
    """Plain rows, bags, a table that two modules share, and one in host memory."""

    def __init__(self, location: Any) -> None:
        super().__init__()
        place: dict[str, Any] = {"location": location} | ({"cache_rows": 64} if location == "cached" else {})
        self.plain = SparseEmbedding(4, optimizer="row_adagrad", **place)
        self.bag = SparseEmbedding(3, optimizer="adam", combiner="mean", padding_id=0, **place)
        self.one = SparseEmbedding(2, name="shared", optimizer="sgd", **place)
        self.other = SparseEmbedding(2, name="shared", optimizer="sgd", **place)
        self.host = SparseEmbedding(2, optimizer="sgd")
        self.net = nn.Linear(3 * 4 + 3 + 2 * 2 + 2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        shared = self.one(ids[:, 0]), self.other(ids[:, 1] * 3)
        parts = [self.plain(ids).flatten(1), self.bag(ids), *shared, self.host(ids[:, 2])]
        return self.net(torch.cat(parts, 1)).squeeze(1)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-90, 300, (STEPS * BATCH, 3), generator=generator) * 2**40
    ids[::5, 1] = 0
    return ids, torch.randn(STEPS * BATCH, generator=generator)


def train(location: str, directory: str | None = None, steps: int = STEPS, **strategy: Any) -> dict[str, Any]:
    echelon.init(seed=0)
    model = Model(location)
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(**strategy),
        checkpoint=echelon.Checkpoint(dir=directory, asynchronous=False) if directory else None,
        log=echelon.Log(console=False),
    )
    losses = []
    for batch in engine.loader(data(), global_batch=BATCH, shuffle=False):
        losses.append(float(engine.step(*batch)))
        if directory and engine.steps == steps:
            engine.save()
            break
    engine.synchronize()
    ids = data()[0].reshape(-1).unique()
    with torch.no_grad():
        rows = {
            name: getattr(model, name)(ids.view(-1, 1)).flatten(1).cpu().numpy()
            for name in ("plain", "bag", "one", "host")
        }
    stats = engine.served.stats()
    engine.close()
    return {"losses": losses, "rows": rows, "stats": stats, "net": model.net.weight.detach().cpu().numpy().copy()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    count = len(found["losses"])
    np.testing.assert_allclose(found["losses"], expected["losses"][-count:], atol=tolerance)
    np.testing.assert_allclose(found["net"], expected["net"], atol=tolerance)
    for name, rows in expected["rows"].items():
        np.testing.assert_allclose(found["rows"][name], rows, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("location", ["device", "cached"])
def test_rows_on_the_device_equal_rows_of_the_host(location: str) -> None:
    """A cache of 64 rows holds a batch, and a third of the table."""
    expected, found = run(train, "host", ranks=1)[0], run(train, location, ranks=1)[0]
    assert_equal(found, expected, tolerance_of(1e-6))
    for name in ("plain", "host") if not ON_GPU else ():  # one lookup a step: the sums have one order, also in backward
        np.testing.assert_array_equal(found["rows"][name], expected["rows"][name])
    assert found["stats"][0]["rows"] == expected["stats"][0]["rows"]
    assert found["stats"][0]["steps"] == expected["stats"][0]["steps"]


def test_merged_gradients_equal_those_of_the_host() -> None:
    expected = run(train, "host", ranks=1, gradient_merge=2)[0]
    assert_equal(run(train, "device", ranks=1, gradient_merge=2)[0], expected, tolerance_of(1e-6))


@pytest.mark.parametrize("location", ["device", "cached"])
def test_workers_with_rows_on_their_devices_equal_one_process(location: str) -> None:
    expected = run(train, "host", ranks=1)[0]
    for found in run(train, location, ranks=2):
        assert_equal(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("first", "then"),
    [(("device", 1), ("host", 2)), (("host", 2), ("cached", 1)), (("cached", 2), ("device", 1))],
)
def test_checkpoints_go_on_in_other_memory(first: Any, then: Any, tmp_path: Path) -> None:
    run(train, first[0], str(tmp_path), 3, ranks=first[1])
    for found in run(train, then[0], str(tmp_path), ranks=then[1]):
        assert len(found["losses"]) == STEPS - 3
        assert_equal(found, run(train, "host", ranks=1)[0], 1e-5)


def diverge() -> None:
    echelon.init(seed=0)
    engine = distributed("device")
    engine.model.plain.register_forward_hook(lambda module, args, rows: rows + 0 * (rows * 0).sqrt())
    for _ in range(3):
        engine.step(*(part[:BATCH] for part in data()))


def test_a_gradient_that_is_not_finite_is_named() -> None:
    for line in errors(diverge, ranks=1):
        assert "the gradient of table 'plain' in step 1 is NaN or infinite; nothing of it was applied" in line


def distributed(location: str) -> Any:
    model = Model(location)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return echelon.distribute(model, loss=F.mse_loss, optimizer=optimizer, log=echelon.Log(console=False))


def refuse_and_train() -> str:
    echelon.init(seed=0)
    with pytest.raises(UsageError) as caught:
        distributed("device")
    engine = distributed("host")
    engine.step(*(part[:BATCH] for part in data()))
    engine.close()
    return str(caught.value)


def test_servers_refuse_rows_on_the_device() -> None:
    line = served(refuse_and_train, servers=1, workers=1)[0]
    assert "location='device' keeps rows in the workers, and this job's tables lie on servers; start it with" in line


def test_unknown_locations_are_refused() -> None:
    with pytest.raises(UsageError, match="expected 'host', 'device' or 'cached'"):
        SparseEmbedding(4, location="gpu")  # type: ignore[arg-type]
    for options in ({"location": "cached"}, {"cache_rows": 10}, {"location": "device", "cache_rows": 10}):
        with pytest.raises(UsageError, match="go together; give both or neither"):
            SparseEmbedding(4, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cache_rows=0\): expected 1 or more"):
        SparseEmbedding(4, location="cached", cache_rows=0)
