"""Workers of parameter servers count for the targets of their batches, not for rows."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.nn.functional as F
from serving import served
from torch import Tensor, nn

import echelon
from echelon import Strategy

ROWS, LENGTH, STEPS = 8, 6, 4


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def padded(step: int) -> tuple[Tensor, Tensor]:
    """Rows of which the first half are short."""
    ids = torch.randint(9, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([1] * (ROWS // 2) + [LENGTH] * (ROWS // 2))
    return ids, torch.where(torch.arange(LENGTH) < lengths[:, None], ids, -100)


def train() -> tuple[list[float], dict[str, Tensor], str]:
    echelon.init()
    model, optimizer = build()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = echelon.distribute(model, loss=loss_of, optimizer=optimizer, strategy=Strategy(ps="sync"))
    losses = [float(engine.step(*(part.chunk(2)[engine.world.rank] for part in padded(step)))) for step in range(STEPS)]
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}  # with the last update
    engine.close()
    return losses, weights, said.getvalue()


def test_workers_with_padded_batches_equal_one_process() -> None:
    model, optimizer = build()
    expected = []
    for step in range(STEPS):
        x, y = padded(step)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = served(train, servers=1, workers=2)
    assert "echelon: 2 workers x cpu, 1 server, " in found[0][2]
    assert "replicate" not in found[0][2]
    for losses, mine, _ in found:
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mine, dict(model.state_dict()), rtol=1e-6, atol=1e-6)
