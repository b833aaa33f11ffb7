"""A JSON object behind its length: the head of safetensors files, of saved training states and of messages with bytes.

8 bytes   length of the text, little-endian
text      JSON, padded with spaces
"""

from __future__ import annotations

import json
from typing import Any

#: Bytes of the length.
PREFIX = 8


class MalformedHeadError(ValueError):
    """The bytes have no JSON object behind a length."""


def write_head(head: dict[str, Any], *, align: int = 1, nbytes: int = 0) -> bytes:
    """Return the length and the text of a JSON object.

    align:  what follows the head begins at a multiple of these bytes
    nbytes: size of the result, if it is longer than the head needs; it is made of spaces
    """
    text = json.dumps(head, separators=(",", ":")).encode().ljust(nbytes - PREFIX)
    text += b" " * (-len(text) % align)
    return len(text).to_bytes(PREFIX, "little") + text


def read_length(prefix: bytes, longest: int) -> int:
    """Return the length that a head begins with; raise MalformedHeadError if it is above ``longest``."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) != PREFIX or length > longest:
        raise MalformedHeadError(f"{length} bytes long")
    return length


def read_head(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the object at the beginning of ``data`` and the offset of what follows."""
    end = PREFIX + read_length(data[:PREFIX], len(data) - PREFIX)
    return parse_object(data[PREFIX:end]), end


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Return the JSON object of a text; raise MalformedHeadError for any other text, also for a very deep one."""
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedHeadError("not JSON") from error
    if not isinstance(result, dict):
        raise MalformedHeadError("not a JSON object")
    return result
