"""Placement of remainders and moments: on the device as far as they fit, the rest in pinned host memory."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.base.formatting import size
from echelon.base.quantities import quantity
from echelon.checkpoint.in_memory.snapshot_buffer import free_memory
from echelon.parallel.low_memory.formats import BLOCK, LowMemoryState
from echelon.strategy import LowMemory

SMALL = 1 << 20  # number of entries below which moving a parameter's state costs more than it saves
MARGIN = 8e9  # bytes of host memory left to other processes
THREADS = 8  # threads that pin host memory in parallel: 17 GB in 0.7 to 1.4 s on the host of an H200
_ALIGNMENT = 256
_DTYPES = (torch.int16, torch.int8, torch.uint8, torch.float32, torch.float32)


def state_bytes(entries: int) -> int:
    """Return the bytes of the state of ``entries`` weights, with alignment."""
    return sum(-(-each // _ALIGNMENT) * _ALIGNMENT for each in tensor_bytes(entries))


def tensor_bytes(entries: int) -> list[int]:
    """Return the bytes of each tensor of the state: remainder, two moments and their scales."""
    scales = 4 * -(-entries // BLOCK)
    return [2 * entries, entries, entries, scales, scales]


@dataclass(frozen=True)
class StatePlacement:
    """Placement of each parameter's state (True: host memory), and the bytes on device and host."""

    on_host: tuple[bool, ...]
    device_bytes: int
    host_bytes: int

    def __str__(self) -> str:
        here = f"{size(self.device_bytes)} of remainders and moments beside the weights"
        return f"{here}, {size(self.host_bytes)} in host memory" if self.host_bytes else here


def choose(entries: Sequence[int], settings: LowMemory, device: torch.device) -> StatePlacement:
    """Return the placement for parameters of these sizes; raise UsageError if host memory is too small."""
    sizes = [state_bytes(each) for each in entries]
    movable = [each >= (1 if settings.state == "host" else SMALL) for each in entries]
    total = sum(of for of, may in zip(sizes, movable, strict=True) if may)
    away = spread(sizes, movable, _share_on_host(sum(sizes), total, settings, device))
    there = sum(of for of, moves in zip(sizes, away, strict=True) if moves)
    if there > 0 and there > (free := free_memory() - MARGIN):
        raise UsageError(
            f"low_memory: {size(there)} of remainders and moments do not fit the device and would go to host memory, "
            f"which has {size(max(0, free))} to spare; take a smaller model, or a smaller LowMemory(reserve=...)"
        )
    return StatePlacement(tuple(away), sum(sizes) - there, there)


def spread(sizes: Sequence[int], movable: Sequence[bool], share: float) -> list[bool]:
    """Return which parameters to move, so that at least ``share`` of the movable bytes move.

    The moved parameters are spread evenly over the model, so that their copies overlap with the computation of the
    others.
    """
    moved, owed = [], 0.0
    for of, may in zip(sizes, movable, strict=True):
        owed += of * share if may else 0.0
        moved.append(may and owed > 0)
        owed -= of if moved[-1] else 0
    return moved


def _share_on_host(total: int, movable: int, settings: LowMemory, device: torch.device) -> float:
    if device.type != "cuda" or settings.state == "device" or not movable:
        return 0.0
    if settings.state == "host":
        return 1.0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    room = free - quantity(settings.reserve, "bytes", "LowMemory(reserve=)")
    return min(1.0, max(0.0, (total - room) / movable))


def on_device(like: Tensor) -> LowMemoryState:
    """Allocate a zero state on the device of these weights."""
    area = torch.zeros(state_bytes(like.numel()), dtype=torch.uint8, device=like.device)
    return _laid_out(area, like)


def on_host(weights: Sequence[Tensor], owner: object) -> list[LowMemoryState]:
    """Allocate zero states in pinned host memory, one area per weight; they are unpinned when ``owner`` is freed."""
    areas = [_untouched(state_bytes(each.numel())) for each in weights]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(_make_reachable, areas))
    weakref.finalize(owner, _let_go, [area.data_ptr() for area in areas]).atexit = False
    return [_laid_out(area, each) for area, each in zip(areas, weights, strict=True)]


def _untouched(nbytes: int) -> Tensor:
    """Allocate host memory with mmap: torch's pinned allocator rounds up to powers of two, up to twice the size."""
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _make_reachable(area: Tensor) -> None:
    area.zero_()  # the page faults happen here, on several threads
    error = torch.cuda.cudart().cudaHostRegister(area.data_ptr(), area.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise UsageError(
            f"low_memory: {size(area.numel())} of host memory cannot be pinned (CUDA error {int(error)}); take a "
            "smaller LowMemory(reserve=...), or LowMemory(state='device')"
        )


def _let_go(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _laid_out(area: Tensor, like: Tensor) -> LowMemoryState:
    """Return the state tensors in an area; those with one entry per weight have the weight's shape and strides."""
    result, start = [], 0
    for nbytes, dtype in zip(tensor_bytes(like.numel()), _DTYPES, strict=True):
        flat = area[start : start + nbytes].view(dtype)
        result.append(flat if dtype == torch.float32 else flat.as_strided(like.shape, like.stride()))
        start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return LowMemoryState(*result)
