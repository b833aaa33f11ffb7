"""The device of a rank, for machines with any number of GPUs."""

from __future__ import annotations

import pytest
import torch

from echelon.base.environment import RankInfo, detect_rank_info
from echelon.base.errors import UsageError
from echelon.distributed.device_choice import choose_device


def place(local_rank: int) -> RankInfo:
    names = {"RANK": local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 8}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return detect_rank_info({name: str(value) for name, value in names.items()} | meeting)


@pytest.mark.parametrize(
    ("asked", "gpus", "local_rank", "expected"),
    [
        (None, 0, 1, "cpu"),
        (None, 4, 1, "cuda:1"),
        (None, 1, 3, "cuda:0"),
        ("cuda", 4, 2, "cuda:2"),
        (torch.device("cuda"), 2, 3, "cuda:1"),
        ("cuda:1", 4, 0, "cuda:1"),
        ("cpu", 4, 2, "cpu"),
    ],
)
def test_choose_device(asked: str | torch.device | None, gpus: int, local_rank: int, expected: str) -> None:
    assert choose_device(place(local_rank), asked, gpus) == torch.device(expected)


@pytest.mark.parametrize(
    ("asked", "gpus", "line"),
    [
        ("cuda", 0, "torch sees no GPU here; use device='cpu'"),
        ("cuda:3", 2, "device 'cuda:3' was asked for, but torch sees only cuda:0 to cuda:1 here; use device='cuda'"),
        ("gpu", 2, "device='gpu': torch knows no such device; use 'cuda', 'cuda:0' or 'cpu'"),
        (3.5, 2, "torch knows no such device"),
    ],
)
def test_choose_device_refuses(asked: str, gpus: int, line: str) -> None:
    with pytest.raises(UsageError) as told:
        choose_device(place(0), asked, gpus)
    assert line in str(told.value)
