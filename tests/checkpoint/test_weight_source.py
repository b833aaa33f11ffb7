"""A weight source gives a region of one tensor, and says what it does not have."""

import pytest
import torch

from echelon.checkpoint import CheckpointError
from echelon.checkpoint.weight_source import MappedWeights, WeightSource
from echelon.distributed.tensor_region import TensorRegion


def test_mapped_weights_return_regions():
    whole = torch.arange(24.0).reshape(4, 6).to(torch.bfloat16)
    source: WeightSource = MappedWeights({"weight": whole.t().contiguous().t(), "scale": torch.tensor(3.0)})
    assert set(source.names()) == {"weight", "scale"}
    assert (source.shape("weight"), source.dtype("weight")) == ((4, 6), torch.bfloat16)
    part = source.read("weight", TensorRegion("other", torch.float32, (4, 6), (1, 2), (2, 3)))
    assert torch.equal(part, whole[1:3, 2:5])
    assert part.is_contiguous()
    assert part.dtype == torch.bfloat16
    part.zero_()
    assert torch.equal(source.read("weight", TensorRegion("w", torch.bfloat16, (4, 6), (0, 0), (4, 6))), whole)
    assert source.read("scale", TensorRegion("scale", torch.float32, (), (), ())).item() == 3.0


def test_mapped_weights_refuse_misfits():
    source = MappedWeights({"weight": torch.zeros(4, 6)})
    with pytest.raises(CheckpointError, match="no tensor 'bias'"):
        source.shape("bias")
    with pytest.raises(CheckpointError, match=r"'weight' is \[4, 6\] in the given weights and \[4, 7\] in the model"):
        source.read("weight", TensorRegion("weight", torch.float32, (4, 7), (0, 0), (4, 7)))
