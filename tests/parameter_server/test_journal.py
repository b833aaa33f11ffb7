"""Records and segments: what was written is read back, and damage is never taken for data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.errors import CheckpointError
from echelon.parameter_server.persistence.file_record import encode, sums
from echelon.parameter_server.persistence.journal import JournalSegment, replay, segment_path
from echelon.parameter_server.protocol.message import WireMessage


def frames(count):
    chance = np.random.default_rng(0)
    return [
        WireMessage(
            {"op": "push", "seq": seq},
            [
                chance.integers(0, 99, seq),
                chance.random((seq, 3)).astype(np.float32),
                np.arange(seq % 7, dtype=np.uint8),
            ],
        )
        for seq in range(count)
    ]


def written(directory, numbers, start=1):
    """Segments with so many records each; the LSN goes on."""
    lsn, made = start, frames(sum(numbers))
    for number, count in enumerate(numbers, start=1):
        segment = JournalSegment(directory, number)
        for _ in range(count):
            segment.append(encode(lsn, made[lsn - start]))
            lsn += 1
        segment.close()
    return made


def same(record, frame):
    assert record.frame.head == frame.head
    for got, expected in zip(record.frame.arrays, frame.arrays, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_records_come_back_in_order_from_several_segments(tmp_path):
    made = written(tmp_path, [3, 0, 4])
    found = list(replay(tmp_path, 1, 0))
    assert [record.lsn for record in found] == list(range(1, 8))
    for record, frame in zip(found, made, strict=True):
        same(record, frame)
    assert [record.lsn for record in replay(tmp_path, 1, 5)] == [6, 7]
    assert [record.lsn for record in replay(tmp_path, 3, 3)] == [4, 5, 6, 7]


@settings(max_examples=200)
@given(st.binary(max_size=70), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_sums_show_every_change_of_one_or_two_bits(content, first, second):
    if not content:
        assert sums(content) == (0, 0)
        return
    bits = len(content) * 8
    changed = int.from_bytes(content, "little") ^ (1 << first % bits)
    for other in {changed, changed ^ (1 << second % bits)} - {int.from_bytes(content, "little")}:
        assert sums(other.to_bytes(len(content), "little")) != sums(content)


def test_the_sums_are_those_of_plain_arithmetic():
    content = np.random.default_rng(1).integers(0, 256, 4 * 1000 + 3).astype(np.uint8).tobytes()
    words = [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)]
    assert sums(content) == (sum(words) % 2**64, sum(i * word for i, word in enumerate(words, 1)) % 2**64)
    # words that trade places keep the sum, but not the weighted one
    assert sums(content[4:8] + content[:4] + content[8:]) != sums(content)


def test_a_tail_torn_at_any_byte_is_cut_off_and_said(tmp_path, capfd):
    written(tmp_path, [2, 3])
    path = segment_path(tmp_path, 2)
    whole = path.read_bytes()
    ends = [record.end for record in replay(tmp_path, 1, 0) if record.lsn > 2]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = [record.lsn for record in replay(tmp_path, 1, 0)]
        assert found == [1, 2, *range(3, 3 + sum(end <= size for end in ends))], size
        cut = size not in (0, *ends)
        said = capfd.readouterr().err
        assert (said.count("\n"), "ended inside a record" in said) == (int(cut), cut)
        assert path.stat().st_size == max([end for end in ends if end <= size], default=0)
    path.write_bytes(whole + bytes(5000))  # what a file system may show of a page that was never written
    assert len(list(replay(tmp_path, 1, 0))) == 5
    assert path.stat().st_size == len(whole)


def test_any_flipped_bit_is_an_error_that_names_the_file(tmp_path):
    written(tmp_path, [3, 2])
    for number in (1, 2):
        path = segment_path(tmp_path, number)
        whole = path.read_bytes()
        for at in range(len(whole)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=path.name) as caught:
                list(replay(tmp_path, 1, 0))
            assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    assert len(list(replay(tmp_path, 1, 0))) == 5


def test_a_segment_that_is_cut_though_others_follow_is_an_error(tmp_path):
    written(tmp_path, [3, 2])
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"journal-00000001.seg is truncated"):
        list(replay(tmp_path, 1, 0))
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"journal-00000002.seg does not go on"):
        list(replay(tmp_path, 1, 0))


def test_a_missing_segment_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"journal-00000004.seg is missing, with all changes since"):
        list(replay(tmp_path, 4, 0))
    written(tmp_path, [2, 2, 2])
    segment_path(tmp_path, 2).unlink()
    with pytest.raises(CheckpointError, match=r"journal-00000002.seg does not go on"):
        list(replay(tmp_path, 1, 0))
    with pytest.raises(CheckpointError, match=r"journal-00000003.seg does not go on"):
        list(replay(tmp_path, 3, 0))
