"""Streams optimizer state between host and device: prefetches it before its gradient, writes it back after the update.

Copies in both directions run on separate streams and overlap with backward. The prefetch order is the order of the last
backward; if it is wrong, the right piece is fetched on demand and the device waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from echelon.parallel.low_memory.formats import BLOCK, LowMemoryState

PIECE = 1 << 25  # entries per piece, updated at once: 135 MB of state
SLOTS = 8  # device buffers for pieces from the host


@dataclass(eq=False)
class StateChunk:
    """A range of entries of one parameter, and its state.

    number: global index of the piece; seeds the stochastic rounding
    state:  the state in its permanent memory, on host or device
    left:   event of the last copy from device to host; None before the first
    """

    number: int
    begin: int
    end: int
    state: LowMemoryState
    on_host: bool
    left: torch.cuda.Event | None = None


@dataclass(eq=False)
class RingSlot:
    """A device buffer for the state of one piece."""

    state: LowMemoryState
    received: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    free: torch.cuda.Event | None = None  # event after which its last content has been copied to the host

    def holding(self, piece: StateChunk) -> LowMemoryState:
        return LowMemoryState(*(place[: there.numel()] for place, there in _pairs(self.state, piece.state)))


class HostStateRing:
    """A ring of device buffers through which state from host memory passes."""

    def __init__(self, device: torch.device, longest: int) -> None:
        self._device = device
        self._inward, self._outward = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._free = deque(RingSlot(_empty(min(longest, PIECE), device)) for _ in range(SLOTS))
        self._coming: deque[tuple[StateChunk, RingSlot]] = deque()
        self._expected: deque[StateChunk] = deque()

    def expect(self, pieces: Iterable[StateChunk]) -> None:
        """Start to prefetch these pieces, which will be taken in this order."""
        self.forget()
        self._expected = deque(pieces)
        self._fetch_ahead()

    def forget(self) -> None:
        """Drop all prefetched and expected pieces."""
        self._expected.clear()
        while self._coming:
            self._free.append(self._coming.popleft()[1])

    def take(self, piece: StateChunk) -> RingSlot:
        """Return the slot with this piece's state, and make the current stream wait for it."""
        if not self._coming or self._coming[0][0] is not piece:
            self.forget()
            self._fetch(piece)
        _, slot = self._coming.popleft()
        torch.cuda.current_stream(self._device).wait_event(slot.received)
        return slot

    def give_back(self, piece: StateChunk, slot: RingSlot) -> None:
        """Copy the piece's state back to the host after the current stream has updated it, and free the slot."""
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            for here, there in _pairs(slot.holding(piece), piece.state):
                there.copy_(here, non_blocking=True)
        piece.left = slot.free = self._outward.record_event()
        self._free.append(slot)
        self._fetch_ahead()

    def wait(self) -> None:
        """Wait until all state has been copied back to the host."""
        self._outward.synchronize()

    def _fetch_ahead(self) -> None:
        while self._expected and self._free:
            self._fetch(self._expected.popleft())

    def _fetch(self, piece: StateChunk) -> None:
        slot = self._free.popleft()
        for before in (slot.free, piece.left):
            if before is not None:
                self._inward.wait_event(before)
        with torch.cuda.stream(self._inward):
            for here, there in _pairs(slot.holding(piece), piece.state):
                here.copy_(there, non_blocking=True)
        slot.received.record(self._inward)
        self._coming.append((piece, slot))


def _pairs(one: LowMemoryState, other: LowMemoryState) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    return zip(one.tensors(), other.tensors(), strict=True)


def _empty(entries: int, device: torch.device) -> LowMemoryState:
    blocks = -(-entries // BLOCK)
    kinds = ((entries, torch.int16), (entries, torch.int8), (entries, torch.uint8))
    codes = [torch.empty(count, dtype=dtype, device=device) for count, dtype in kinds]
    return LowMemoryState(*codes, *(torch.empty(blocks, device=device) for _ in range(2)))
