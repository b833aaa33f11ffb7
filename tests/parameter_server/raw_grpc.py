"""gRPC spoken by hand, so that a test can say what no library would: half frames, lying lengths, garbage."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import pyarrow as pa

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"
ACTION = "/arrow.flight.protocol.FlightService/DoAction"


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame; ``length`` is what it claims to hold."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str, token: str | None) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    fields += [("authorization", f"Bearer {token}")] if token is not None else []
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127
    return bytes([len(raw)]) + raw


def message(body: bytes, length: int | None = None) -> bytes:
    """A gRPC message; ``length`` is what it claims to hold."""
    return b"\x00" + struct.pack(">I", len(body) if length is None else length) + body


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def flight_data(header: bytes, body: bytes = b"", path: bytes | None = None) -> bytes:
    """Flight's message: an Arrow message's metadata, its body, and on the first one the stream's name."""
    descriptor = _field(1, b"\x08\x01" + _field(3, path)) if path is not None else b""
    return descriptor + _field(2, header) + _field(1000, body)


def arrow_parts(serialized: pa.Buffer) -> tuple[bytes, bytes]:
    """Metadata and body of one Arrow IPC message."""
    raw = serialized.to_pybytes()
    size = struct.unpack_from("<i", raw, 4)[0]
    return raw[8 : 8 + size], raw[8 + size :]


class Caller:
    """One connection with one call on it."""

    def __init__(self, endpoint: str, path: str = EXCHANGE, token: str | None = None) -> None:
        host, port = endpoint.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self.raw(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, headers(path, token)))

    def raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send(self, messages: Sequence[bytes], end: bool = True) -> None:
        data = b"".join(messages)
        pieces = [data[at : at + 16384] for at in range(0, len(data), 16384)] or [b""]
        for piece in pieces[:-1]:
            self.raw(frame(DATA, 0, 1, piece))
        self.raw(frame(DATA, END_STREAM if end else 0, 1, pieces[-1]))

    def drain(self, seconds: float = 60.0) -> bytes:
        """Read until the call is over, or the server hangs up."""
        self._socket.settimeout(seconds)
        heard = b""
        try:
            while b"grpc-status" not in heard and (piece := self._socket.recv(65536)):
                heard += piece
        except OSError:
            pass
        return heard

    def close(self) -> None:
        self._socket.close()
