"""The weight of a loss: backward begins with it, in place of a multiplication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.parallel.data.gradients import backward_of


class Marked(Tensor):
    """A tensor of a kind of its own, whose backward is called by its name."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [1.0, 0.3, 0.0, 1e39, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("kind", [Tensor, Marked])
def test_it_is_backward_of_the_product(dtype: torch.dtype, weight: Tensor | float, kind: type[Tensor]) -> None:
    found = []
    for plainly in (True, False):
        x = torch.tensor([0.5, -2.0], dtype=dtype, requires_grad=True)
        loss = x.square().sum().as_subclass(kind)
        if plainly:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        else:
            backward_of(loss, weight)
        found.append(x.grad)
    assert found[1].dtype is dtype
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
