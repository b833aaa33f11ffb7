"""Host side of the fused LARS and LAMB kernels: availability checks, the tensor table and the list of work items."""

from __future__ import annotations

import functools
import importlib.util
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.optim.foreach import Bundle


@dataclass(frozen=True)
class FusedLaunchConfig:
    """Launch parameters of a kernel, tuned on an H200 with BERT-large's parameters (benchmarks/gpu/optimizers.py).

    chunk:    elements of one work item
    block:    elements that a program processes at once
    warps:    warps of 32 threads per program
    programs: programs per multiprocessor
    lag:      chunks between measuring and applying a parameter, so that no program waits for a trust ratio
    burst:    chunks applied per chunk measured; with a larger value more of them are still in the cache
    """

    chunk: int = 8192
    block: int = 1024
    warps: int = 8
    programs: int = 6
    lag: int = 512
    burst: float = 4.0


LARS_SHAPE = FusedLaunchConfig()
LAMB_SHAPE = FusedLaunchConfig(chunk=4096, programs=8, burst=16.0)
ALIGNMENT = 16  # bytes per vectorized load or store of one thread
HEADER = 32  # the work counter has a cache line to itself; must equal ARRIVED in kernels.py


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not(bundle: Bundle) -> str | None:
    """Return the reason why the fused kernel cannot update this bundle, or None."""
    params = bundle.params
    if not params[0].is_cuda:
        return f"its parameters are on {params[0].device.type}, not on cuda"
    if params[0].dtype != torch.float32:
        return f"its parameters are {params[0].dtype}, not torch.float32"
    if not has_triton():
        return "Triton is not installed"
    for param, grad in zip(params, bundle.grads, strict=True):
        if grad.dtype != torch.float32 or grad.stride() != param.stride():
            shape = tuple(param.shape)
            return f"a parameter of shape {shape} and its gradient differ in dtype or memory layout"
    return None


def scattered(params: list[Tensor], state: list[Tensor]) -> str | None:
    """Return a message about a parameter with gaps or overlaps in memory, or None.

    A state tensor created with ``zeros_like`` does not get the strides of such a parameter.
    """
    for param, like in zip(params, state, strict=True):
        if like.stride() != param.stride():
            return f"a parameter of shape {tuple(param.shape)} is not dense in memory"
    return None


def order_of_work(chunks: list[int], lag: int, burst: float) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return rows (2 * tensor + phase, chunk) in the order in which programs take them.

    Phase 0 (measure) goes through all chunks in order. Phase 1 (apply) of a tensor begins ``lag`` chunks after the end
    of its phase 0, and goes from its last chunk to its first: the last chunks were read most recently, so the part of
    the tensor that the cache still holds is used.
    """
    counts = np.asarray(chunks)
    tensor = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    chunk = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    measure_at = np.arange(ends[-1], dtype=np.float64)
    apply_at = np.repeat(ends, counts) + lag + (np.repeat(counts, counts) - 1 - chunk) / burst
    order = np.argsort(np.concatenate([measure_at, apply_at]), kind="stable")
    rows = np.stack([np.concatenate([2 * tensor, 2 * tensor + 1]), np.concatenate([chunk, chunk])], 1)
    return np.ascontiguousarray(rows[order], dtype=np.int32)


class FusedTensorTable:
    """Addresses and sizes of a bundle's tensors on the device, the list of work items, and buffers for the norms."""

    def __init__(
        self, params: list[Tensor], states: list[list[Tensor]], adaptive: list[bool], shape: FusedLaunchConfig
    ) -> None:
        self.shape, self.params, self.states, self.adaptive = shape, params, states, adaptive
        self.device = device = params[0].device
        counts = [-(-param.numel() // shape.chunk) for param in params]
        self.addresses, self.grad_addresses = _addresses(params), [0] * len(params)
        held = [_addresses(tensors) for tensors in states] + [self.grad_addresses] * (2 - len(states))
        first = (np.cumsum(counts) - counts).tolist()
        rows = [
            self.addresses,
            self.grad_addresses,
            *held,
            [param.numel() for param in params],
            first,
            counts,
            adaptive,
        ]
        self.rows = torch.tensor(rows, dtype=torch.int64).to(device)
        work = order_of_work(counts, shape.lag, shape.burst)
        self.work, self.items, self.chunks = torch.from_numpy(work).to(device), len(work), sum(counts)
        self.sums = torch.empty(2 * self.chunks + len(params), device=device)
        self.counters = torch.zeros(HEADER + 2 * len(params), dtype=torch.int32, device=device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.programs = max(1, min(processors * shape.programs, self.items))
        self.wide, self.wide_grad = all(map(_aligned, (self.addresses, *held))), False

    def describes(self, params: list[Tensor], states: list[list[Tensor]], adaptive: list[bool]) -> bool:
        """Return True if the table was built from these tensor objects and the parameters have not moved."""
        return (
            len(params) == len(self.params)
            and adaptive == self.adaptive
            and all(map(operator.is_, params, self.params))
            and all(all(map(operator.is_, new, old)) for new, old in zip(states, self.states, strict=True))
            and _addresses(params) == self.addresses
        )

    def point_to(self, grads: list[Tensor]) -> None:
        """Update the gradient addresses in the table; gradients may be new tensors in each step."""
        addresses = _addresses(grads)
        if addresses != self.grad_addresses:
            self.grad_addresses = addresses
            fresh = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.rows.is_cuda)
            self.rows[1].copy_(fresh, non_blocking=True)
            self.wide_grad = _aligned(addresses)


class FusedKernels:
    """Fused steps of one optimizer and their tensor tables. A step returns the reason why it cannot run, or None."""

    def __init__(self) -> None:
        self._tables: dict[Any, FusedTensorTable] = {}

    def lars(self, bundle: Bundle, adaptive: list[bool], shape: FusedLaunchConfig = LARS_SHAPE) -> str | None:
        from echelon.optim import kernels

        group = bundle.group
        settings = [group[name] for name in ("lr", "momentum", "coeff", "weight_decay", "eps")]
        return self._run(kernels.lars, bundle, adaptive, ["momentum_buffer"], settings, shape)

    def lamb(
        self,
        bundle: Bundle,
        adaptive: list[bool],
        corrections: tuple[float, float],
        shape: FusedLaunchConfig = LAMB_SHAPE,
    ) -> str | None:
        from echelon.optim import kernels

        group, betas = bundle.group, bundle.group["betas"]
        rests = [1 - beta for beta in betas]  # computed here in fp64: 1 - 0.999 in fp32 is wrong in the fifth digit
        settings = [group["lr"], *betas, *rests, group["eps"], group["weight_decay"], *(1 / c for c in corrections)]
        return self._run(kernels.lamb, bundle, adaptive, ["exp_avg", "exp_avg_sq"], settings, shape)

    def _run(
        self,
        kernel: Any,
        bundle: Bundle,
        adaptive: list[bool],
        keys: list[str],
        settings: list[Any],
        shape: FusedLaunchConfig,
    ) -> str | None:
        table = self._table(bundle, adaptive, [bundle.state(key) for key in keys], shape)
        if isinstance(table, str):
            return table
        table.point_to(bundle.grads)
        with torch.cuda.device(table.device):
            table.counters.zero_()
            kernel[(table.programs,)](
                table.rows, table.work, table.sums, table.counters, len(table.params), table.chunks, table.items,
                *map(float, settings),
                CHUNK=shape.chunk, BLOCK=shape.block, WIDE=table.wide, WIDE_GRAD=table.wide_grad,
                num_warps=shape.warps,
            )  # fmt: skip
        return None

    def _table(
        self, bundle: Bundle, adaptive: list[bool], states: list[list[Tensor]], shape: FusedLaunchConfig
    ) -> FusedTensorTable | str:
        key = (id(bundle.group), len(bundle.params), id(bundle.params[0]))
        table = self._tables.get(key)
        if table is not None and table.describes(bundle.params, states, adaptive):
            return table
        reason = scattered(bundle.params, states[0])
        if reason is not None:
            return reason
        made = self._tables[key] = FusedTensorTable(bundle.params, states, adaptive, shape)
        return made


def _aligned(addresses: list[int]) -> bool:
    return all(address % ALIGNMENT == 0 for address in addresses)


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
