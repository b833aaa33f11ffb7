"""``TableOperations``: what a device table asks of its kernels, in torch or in Triton."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from echelon.parameter_server.device_table.device_index import DeviceIndex
from echelon.parameter_server.device_table.device_rows import DeviceRows
from echelon.parameter_server.device_table.first_rows import FirstRows
from echelon.parameter_server.device_table.row_update import RowsToUpdate
from echelon.parameter_server.device_table.torch_operations import TorchOperations
from echelon.strategy.sparse_update_rules import Rule


class TableOperations(Protocol):
    """Interface of the kernels; ``TorchOperations`` describes each."""

    @property
    def name(self) -> str: ...
    def locate(self, index: DeviceIndex, ids: Tensor) -> Tensor: ...
    def find(self, index: DeviceIndex, ids: Tensor) -> Tensor: ...
    def claim(self, index: DeviceIndex, table: DeviceRows, ids: Tensor) -> Tensor: ...
    def gather(self, table: DeviceRows, ids: Tensor, slots: Tensor, width: int) -> Tensor: ...
    def update(self, table: DeviceRows, work: RowsToUpdate) -> None: ...


def operations_of(device: torch.device, first: FirstRows, rule: Rule) -> TableOperations:
    """Return Triton's kernels for a GPU where Triton can be imported, else torch's operations."""
    if device.type == "cuda":
        try:
            from echelon.parameter_server.device_table.triton_operations import TritonOperations
        except ImportError:
            pass
        else:
            return TritonOperations(first, rule)
    return TorchOperations(first, rule)
