"""The lines about processes that have not come: when they are printed, whom they name, how long the wait will be."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch
from harness import run

import echelon
from echelon.base.environment import RankInfo
from echelon.base.errors import PeerLost
from echelon.base.wait_notice import AFTER, WaitNotice, name_ranks
from echelon.distributed.join_ranks import join_ranks


def test_wait_notice_after_five_seconds_repeats_only_if_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line comes after five seconds, and again only if it changed."""
    assert AFTER == 5.0
    now, said = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.delenv("ECHELON_WAIT_NOTICE", raising=False)
    notice = WaitNotice("rank 0", 300, "start it", say=lambda line, awaited: said.append(line))
    for second, awaited in ((4.9, "rank 1"), (5, "rank 1"), (8, "rank 2"), (11, "rank 1"), (12, "rank 2"), (90, "")):
        now[0] = 100.0 + second
        notice.poll(awaited)
    assert said == [
        "join: rank 0 has waited 5 s for rank 1; it gives up after 300 s; start it",
        "join: rank 0 has waited 12 s for rank 2; it gives up after 300 s; start it",
    ]


def test_many_ranks_are_named_by_the_first_and_their_number() -> None:
    assert name_ranks({3}) == "rank 3"
    assert name_ranks({4, 2}, "worker") == "workers 2, 4"
    assert name_ranks(set(range(5)), most=2) == "ranks 0, 1 and 3 more"


def join_late(rank: int, meeting: Path) -> str:
    """Return what this rank printed while it waited for ``rank``, which comes a second after the others."""
    os.environ["ECHELON_WAIT_NOTICE"] = "0.4"
    if os.environ["RANK"] == str(rank):
        while len(list(meeting.iterdir())) < int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(0.01)
        time.sleep(1.5)
    (meeting / os.environ["RANK"]).touch()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        echelon.init(timeout=90)
    return re.sub(r"waited \d+ s", "waited N s", printed.getvalue())


def test_a_rank_that_waits_for_another_names_it(tmp_path: Path) -> None:
    line = "echelon: join: rank {} has waited N s for {}; it gives up after 90 s{}\n"
    remedy = "; start the missing processes, or look at their logs"
    late = "rank 2 of 3 to call echelon.init()"
    (three := tmp_path / "three").mkdir()
    assert run(join_late, 2, three, ranks=3) == [line.format(0, late, remedy), line.format(1, late, remedy), ""]
    (two := tmp_path / "two").mkdir()
    first, second = run(join_late, 0, two, ranks=2)
    assert first == ""
    assert second.startswith("echelon: join: rank 1 has waited N s for rank 0 at 127.0.0.1:")
    assert second.endswith(", where nothing listens yet; it gives up after 90 s\n")


def test_join_with_other_program_at_port_fails_in_time() -> None:
    """torch's own call would wait for its answer for ever."""
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        place = RankInfo(1, 2, 1, 2, 0, *foreign.getsockname(), "torchrun")
        with pytest.raises(PeerLost, match=r"^rank 1 could not join rank 0 at .*: the program that listens there"):
            join_ranks(place, torch.device("cpu"), "gloo", 0.5)
