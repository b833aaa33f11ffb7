"""Operations on tensors that are read later: the values of the operations, and reads of no more than they need."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from echelon.base.errors import CheckpointError
from echelon.checkpoint.region_tensor import RegionTensor, RegionWeights, region_tensors
from echelon.checkpoint.weight_source import MappedWeights
from echelon.distributed.tensor_region import TensorRegion, narrow

DRAWS = torch.Generator().manual_seed(0)
EXPERTS = {f"experts.{i}": torch.randn(6, 8, generator=DRAWS) for i in range(4)}


class CountedWeights(MappedWeights):
    """Weights that note the elements read of each tensor."""

    def __init__(self) -> None:
        super().__init__(EXPERTS)
        self.elements: dict[str, int] = {}

    def read(self, name: str, region: TensorRegion) -> Tensor:
        values = super().read(name, region)
        self.elements[name] = self.elements.get(name, 0) + values.numel()
        return values


def _conversions(given: Mapping[str, Tensor]) -> list[Tensor]:
    stacked = torch.stack(list(given.values()))
    rounded = torch.stack([value.to(torch.bfloat16).float() for value in given.values()])
    fused = torch.cat([stacked, rounded], 1)
    return [
        fused,
        fused.transpose(1, 2).contiguous(),
        fused.permute(2, 0, 1),
        *fused.chunk(3, 1),
        *fused.unbind(),
        *torch.split(stacked, [1, 3]),
        fused[1:3, 2],
        fused[..., 1:],
        fused[-1],
        fused.narrow(2, 3, 2),
        fused[:, ::2],
        stacked.reshape(2, 2, 6, 8).transpose(0, 1).reshape(4, 6, 8),  # needs its operand whole
        stacked.view(24, 8).t(),
        stacked[0].unsqueeze(0).squeeze(0),
        stacked * rounded + 1,
        torch.nn.Parameter(stacked).detach(),
    ]


def test_region_of_a_result_equals_the_operation() -> None:
    lazy = _conversions(region_tensors(MappedWeights(EXPERTS)))
    for expected, found in zip(_conversions(EXPERTS), lazy, strict=True):
        assert isinstance(found, RegionTensor)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        for _ in range(6):
            begins = [int(torch.randint(0, size, (), generator=DRAWS)) for size in expected.shape]
            sizes = [
                int(torch.randint(1, size - begin + 1, (), generator=DRAWS))
                for begin, size in zip(begins, expected.shape, strict=True)
            ]
            assert torch.equal(found.read_region(tuple(begins), tuple(sizes)), narrow(expected, begins, sizes))


def test_region_reads_only_what_it_needs() -> None:
    source = CountedWeights()
    weights = RegionWeights({"fused": _conversions(region_tensors(source))[0], "bias": torch.ones(3)})
    assert not source.elements
    region = TensorRegion("fused", torch.float32, weights.shape("fused"), (2, 1, 4), (1, 7, 3))
    assert torch.equal(weights.read("fused", region), region.view_of(_conversions(EXPERTS)[0]))
    assert source.elements == {"experts.2": 5 * 3 + 2 * 3}
    assert torch.equal(weights.read("bias", TensorRegion("bias", torch.float32, (3,), (1,), (2,))), torch.ones(2))


def test_values_are_read_where_an_operation_asks() -> None:
    lazy = region_tensors(MappedWeights(EXPERTS))["experts.1"]
    assert lazy.sum().item() == EXPERTS["experts.1"].sum().item()
    assert torch.equal(lazy, EXPERTS["experts.1"])


def test_writing_to_weights_in_files_is_refused() -> None:
    lazy = region_tensors(MappedWeights(EXPERTS))["experts.1"]
    for weights in (lazy, lazy.t(), lazy.view(48), (lazy + 1)[2]):
        with pytest.raises(CheckpointError, match="would change weights that are kept in files"):
            weights.mul_(2)


def test_writing_to_a_result_changes_it() -> None:
    result = region_tensors(MappedWeights(EXPERTS))["experts.1"] + 1
    row = result[2]
    result.mul_(2).sub_(1)
    expected = (EXPERTS["experts.1"] + 1) * 2 - 1
    assert torch.equal(result, expected)
    assert torch.equal(row, expected[2])
