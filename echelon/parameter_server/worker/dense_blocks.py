"""Copies between a worker's dense parameters and the servers' layout: one flat array of blocks per server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.parameter_server.protocol.job_spec import DenseBlock

Floats = NDArray[np.float32]


class DenseBlockBuffers:
    """The dense parameters of a worker, read and written as one flat array per server."""

    def __init__(self, blocks: Sequence[DenseBlock], parameters: Mapping[str, nn.Parameter], servers: int) -> None:
        self._parameters = parameters
        self._homes = [[block for block in blocks if block.server == server] for server in range(servers)]
        self._sizes = [sum(block.length for block in home) for home in self._homes]
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())

    def values(self) -> list[Floats]:
        return self._flat(lambda parameter: parameter.detach())

    def gradients(self) -> list[Floats]:
        """Return the gradients; a parameter without one gets zeros, because servers step all parameters."""
        return self._flat(lambda parameter: parameter.grad)

    def install(self, values: Sequence[Floats]) -> None:
        """Copy the servers' values into the parameters."""
        for home, flat in zip(self._homes, values, strict=True):
            at = 0
            for block in home:
                whole = self._parameters[block.parameter].data.view(-1)
                part, received = whole[block.offset : block.offset + block.length], flat[at : at + block.length]
                if self._on_cpu:
                    np.copyto(part.numpy(), received)
                else:
                    part.copy_(torch.from_numpy(received.copy()))
                at += block.length

    def _flat(self, of: Callable[[nn.Parameter], Tensor | None]) -> list[Floats]:
        return [self._joined(home, size, of) for home, size in zip(self._homes, self._sizes, strict=True)]

    def _joined(self, home: Sequence[DenseBlock], size: int, of: Callable[[nn.Parameter], Tensor | None]) -> Floats:
        flat, at = torch.empty(size), 0
        for block in home:
            value = of(self._parameters[block.parameter])
            part = flat[at : at + block.length]
            if value is None:
                part.zero_()
            else:
                part.copy_(value.reshape(-1)[block.offset : block.offset + block.length])
            at += block.length
        return flat.numpy()


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ``UsageError`` unless all parameters are contiguous float32 tensors, as servers require."""
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise UsageError(
                f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}, but servers hold float32; keep parameters "
                "in float32 (amp='bf16' computes in 16 bits), or ParameterServer(dense='allreduce')"
            )
        if not parameter.is_contiguous():
            raise UsageError(f"'{name}' is not contiguous in memory; call .contiguous() on it before distribute()")
