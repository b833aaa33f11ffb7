"""Messages on a stream of bytes: their sizes, the JSON head, and the bytes of the arrays.

Sizes are checked before memory is allocated. Nothing is compressed, so what a message takes in memory is what was sent.
If both ends share memory, the arrays of long messages lie there, and the stream says where.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.parameter_server.protocol.byte_stream import ByteStream
from echelon.parameter_server.protocol.message import (
    MAX_ARRAYS,
    MAX_BYTES,
    MAX_HEAD,
    WireMessage,
    WireMessageError,
    pack,
    unpack,
)

#: Bytes of the head, number of arrays, bytes of each array.
_SIZES = struct.Struct(f"<II{MAX_ARRAYS}Q")
#: With shared memory, before that: the offset of the arrays there, or -1, and how many messages are done with.
_SHARED = struct.Struct("<qQ")


@dataclass
class PackedMessage:
    """A message as buffers; its arrays must stay unchanged until it is sent."""

    buffers: list[Any]
    nbytes: int

    @classmethod
    def of(cls, frame: WireMessage) -> PackedMessage:
        head, bodies = pack(frame)
        sizes = [body.nbytes for body in bodies]
        prefix = _SIZES.pack(len(head), len(bodies), *sizes, *[0] * (MAX_ARRAYS - len(sizes)))
        return cls([prefix + head, *(body for body in bodies if body.nbytes)], _SIZES.size + len(head) + sum(sizes))


@dataclass
class ReceivedMessage:
    """The bytes of a message, which may be invalid."""

    head: bytes
    bodies: list[Any]
    nbytes: int

    def unpacked(self) -> WireMessage:
        """Return the message. Raises ``WireMessageError`` if it is invalid."""
        return unpack(self.head, self.bodies)


def send(stream: ByteStream, message: PackedMessage) -> None:
    memory, buffers = stream.memory, message.buffers
    if memory is not None:
        offset = memory.put(buffers[1:])
        buffers = [_SHARED.pack(offset, memory.done()), *(buffers if offset < 0 else buffers[:1])]
    stream.send(buffers)


def receive(stream: ByteStream) -> ReceivedMessage:
    """Return the next message. Raises ``WireMessageError`` for sizes beyond the limits, with nothing more to read."""
    memory, where, prefix = stream.memory, bytearray(_SHARED.size), bytearray(_SIZES.size)
    stream.receive_into([prefix] if memory is None else [where, prefix])
    head_bytes, count, *sizes = _SIZES.unpack(prefix)
    if head_bytes > MAX_HEAD or count > MAX_ARRAYS or sum(sizes) > MAX_BYTES:
        raise WireMessageError(
            f"a message of {count} arrays, {head_bytes} and {sum(sizes)} bytes is over the limits "
            f"({MAX_ARRAYS} arrays, {MAX_HEAD} and {MAX_BYTES} bytes)"
        )
    head, offset = bytearray(head_bytes), -1
    if memory is not None:
        offset, done = _SHARED.unpack(where)
        memory.release(done)
    if memory is None or offset < 0:
        bodies = [np.empty(size, np.uint8) for size in sizes[:count]]
        stream.receive_into([head, *bodies])
    else:
        stream.receive_into([head])
        bodies = memory.take(offset, sizes[:count])
    return ReceivedMessage(bytes(head), [body.data for body in bodies], _SIZES.size + head_bytes + sum(sizes))
