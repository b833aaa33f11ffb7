"""Batches arrive on the device that was asked for, whatever their shape, with the same contents."""

from collections import namedtuple

import pytest
import torch

from echelon.data import Loader

Pair = namedtuple("Pair", "left right")
GPUS = ["cuda"] if torch.cuda.is_available() else []


def nested(samples):
    numbers = torch.tensor(samples)
    return {"pair": Pair(numbers, [numbers * 2]), "names": [str(n) for n in samples], "count": len(samples)}


@pytest.mark.parametrize("device", ["meta", *GPUS])
def test_every_tensor_of_a_nested_batch_is_moved(device):
    for batch in Loader(list(range(10)), batch_size=4, collate=nested, device=torch.device(device)):
        assert batch["pair"].left.device.type == batch["pair"].right[0].device.type == device
        assert len(batch["names"]) == batch["count"]


def test_on_the_cpu_the_tensors_are_handed_out_as_they_are():
    made = []

    def collate(samples):
        made.append(torch.tensor(samples))
        return made[-1]

    for batch in Loader(list(range(10)), batch_size=4, collate=collate, device=torch.device("cpu")):
        assert batch is made[-1]


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_complete_and_uncounted(workers):
    """Batches copied ahead to the device are complete, and the state counts only those handed out."""
    data = torch.randn(64, 1 << 18)
    here, shares = Loader((data,), batch_size=4), []
    there = Loader((data,), batch_size=4, device=torch.device("cuda"), workers=workers, on_share=shares.append)
    for step, (a, b) in enumerate(zip(here, there, strict=True), start=1):
        busy = torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
        assert there.position == len(shares) == step
        assert torch.equal((b[0] + 0 * busy[0, 0]).cpu(), a[0])
