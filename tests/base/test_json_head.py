"""A JSON object behind its length: written, read, and refused where it is something else."""

from __future__ import annotations

import pytest

from echelon.base.json_head import PREFIX, MalformedHeadError, parse_object, read_head, read_length, write_head


@pytest.mark.parametrize("options", [{}, {"align": 8}, {"nbytes": 64}, {"nbytes": 3}, {"align": 8, "nbytes": 61}])
def test_head_is_read_as_it_was_written(options: dict[str, int]) -> None:
    head = {"op": "käse", "list": [1, 2.5, None]}
    data = write_head(head, **options)
    assert read_head(data + b"rest") == (head, len(data))
    assert len(data) >= options.get("nbytes", 0)
    assert (len(data) - PREFIX) % options.get("align", 1) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes long"),
        (b"\x02\0\0\0\0\0\0", "2 bytes long"),
        (b"\xff" * PREFIX + b"{}", "18446744073709551615 bytes long"),
        ((3).to_bytes(PREFIX, "little") + b"{}", "3 bytes long"),
        ((2).to_bytes(PREFIX, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(PREFIX, "little") + b"{,", "not JSON"),
        ((2000).to_bytes(PREFIX, "little") + b"[" * 2000, "not JSON"),
        ((1).to_bytes(PREFIX, "little") + b"\xff", "not JSON"),
    ],
)
def test_malformed_head_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(MalformedHeadError, match=said):
        read_head(data)


def test_length_is_bounded() -> None:
    assert read_length((100).to_bytes(PREFIX, "little"), 100) == 100
    with pytest.raises(MalformedHeadError, match="101 bytes long"):
        read_length((101).to_bytes(PREFIX, "little"), 100)


def test_object_may_be_text_or_bytes() -> None:
    assert parse_object('{"a": 1}') == parse_object(b'{"a": 1}') == {"a": 1}
