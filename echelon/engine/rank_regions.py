"""``RankRegions``: the weights of a model of which ranks hold parts, read region by region by one rank at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import CheckpointError
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import gather_json
from echelon.distributed.tensor_layout import Layout, Part, local_tensor
from echelon.distributed.tensor_region import TensorRegion


class _Owned(NamedTuple):
    rank: int
    region: TensorRegion


class RankRegions:
    """A ``WeightSource`` over the parts of all ranks. All ranks call ``read`` together, in the same order.

    The rank ``receiver`` gets the values; the others send what they hold of them, and get a tensor on ``meta``.

    local:       tensors and parts of this rank
    contributes: names that this rank contributes to the whole model; without a group, all
    rank:        position of this process in ``control``
    control:     process group of all ranks; None if ``local`` is complete
    """

    def __init__(
        self,
        local: Mapping[str, Tensor | Part],
        contributes: Collection[str],
        rank: int,
        control: dist.ProcessGroup | None,
    ) -> None:
        self.receiver = rank
        self._rank, self._control = rank, control
        self._views: dict[TensorRegion, Tensor] = {}
        for name, value in local.items():
            if control is None or name in contributes:
                part = value if isinstance(value, Part) else Part(value, Layout(tuple(value.shape)))
                self._views |= dict(part.regions(name))
                if not math.prod(part.layout.shape):
                    self._views[TensorRegion(name, part.tensor.dtype, part.layout.shape, *[part.layout.shape] * 2)] = (
                        local_tensor(part)
                    )
        own = [region.to_json() for region in self._views]
        offers = [own] if control is None else gather_json(own, control)
        self._owners: dict[str, list[_Owned]] = {}
        seen: set[TensorRegion] = set()
        for owner, offer in enumerate(offers):
            for plain in offer:
                region = TensorRegion.from_json(plain)
                if region not in seen:
                    seen.add(region)
                    place = rank if control is None else owner
                    self._owners.setdefault(region.name, []).append(_Owned(place, region))

    def receive(self, rank: int) -> None:
        """Let ``rank`` get the values of the following reads."""
        self.receiver = rank if self._control is not None else self._rank

    def names(self) -> Collection[str]:
        return sorted(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owners[name][0].region.shape

    def dtype(self, name: str) -> torch.dtype:
        return self._owners[name][0].region.dtype

    def read(self, name: str, region: TensorRegion) -> Tensor:
        is_receiver = self._rank == self.receiver
        whole = torch.empty(region.sizes, dtype=self.dtype(name), device="cpu" if is_receiver else "meta")
        filled = 0
        for owner, owned in self._owners[name]:
            common = region._replace(name=name, dtype=owned.dtype).intersection(owned)
            if common is None:
                continue
            filled += math.prod(common.sizes)
            if owner == self._rank:
                view = common.view_of(self._views[owned], owned.offsets)
                if is_receiver:
                    common.view_of(whole, region.offsets).copy_(view)
                else:
                    self._send(name, view)
            elif is_receiver:
                common.view_of(whole, region.offsets).copy_(self._received(name, common, owner))
        if filled != whole.numel():
            raise CheckpointError(f"'{name}': the ranks hold {filled:,} of the {whole.numel():,} values of a region")
        return whole

    def _send(self, name: str, view: Tensor) -> None:
        raw = view.cpu().contiguous().reshape(-1).view(torch.uint8)
        with waiting("weights", name, self._control):
            dist.send(raw, group=self._control, group_dst=self.receiver)

    def _received(self, name: str, region: TensorRegion, owner: int) -> Tensor:
        values = torch.empty(region.sizes, dtype=region.dtype, device="cpu")
        with waiting("weights", name, self._control):
            dist.recv(values.reshape(-1).view(torch.uint8), group=self._control, group_src=owner)
        return values
