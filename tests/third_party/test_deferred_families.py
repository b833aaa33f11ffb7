"""Models of transformers built in ``deferred()`` begin with the weights and buffers of a plain construction."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, LAYOUTS
from harness import run
from zoo import QUIET

import echelon
from echelon import Strategy


def differences(layout: str) -> list[str]:
    echelon.init()
    return [f"{name}: {what}" for name in FAMILIES for what in differences_of(name, layout)]


def differences_of(name: str, layout: str) -> list[str]:
    family = FAMILIES[name]
    torch.manual_seed(3)
    plain = family.make()
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    drawn = torch.rand(2)
    torch.manual_seed(3)
    with echelon.deferred():
        model = family.make()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.rand(2), drawn)
    different = [key for key, value in plain.named_buffers() if not torch.equal(value, model.get_buffer(key))]
    engine = echelon.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sample=family.batches(0), log=QUIET,
        strategy=Strategy(fast=False, **LAYOUTS[layout]),
    )  # fmt: skip
    found = engine.whole_state()
    engine.close()
    assert found.keys() == expected.keys()
    return different + [key for key, value in expected.items() if not torch.equal(found[key], value)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_weights_are_those_of_a_plain_construction(layout: str) -> None:
    assert run(differences, layout, ranks=4, timeout=600) == [[]] * 4
