"""``RankStatus``, the report that a rank sends about once a second, and ``RankObservation``, the detector's view."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.base.json_head import parse_object
from echelon.distributed.activity import parse_ranks

_LONGEST = 300  # most characters of one text, because it is printed on consoles


@dataclass(frozen=True)
class RankWait:
    """A wait of one rank for others.

    number:  ordinal of this wait among those in the same call with the same ranks
    seconds: duration so far
    """

    call: str
    what: str
    ranks: str
    number: int
    seconds: float

    @property
    def key(self) -> str:
        return f"{self.call}|{self.ranks}"


@dataclass(frozen=True)
class RankStatus:
    """The report of one rank.

    beat:    number of reports so far
    phase:   current phase
    seconds: seconds in this phase
    call:    current engine call; '' in user code
    counts:  number of waits by call and ranks
    cpu:     CPU seconds of the process and its children
    io:      bytes read and written
    busy:    seconds of the rank's own work by phase, in ``steps`` steps
    alike:   ranks with equal work
    left:    True if its script has ended
    """

    rank: int
    host: str
    pid: int
    beat: int
    step: int
    phase: str
    seconds: float
    call: str
    wait: RankWait | None
    counts: dict[str, int]
    cpu: float
    io: int
    busy: dict[str, float]
    steps: int
    alike: str
    left: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankStatus:
        """Parse a report. Raises ``ValueError`` for text that ``to_json`` did not write."""
        try:
            given = parse_object(text)
            wait = given.pop("wait")
            status = RankStatus(**given, wait=None if wait is None else RankWait(**wait))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError("not a rank's report") from error
        if not isinstance(status.counts, dict) or not isinstance(status.busy, dict) or not _well_typed(status):
            raise ValueError("not a rank's report")
        return status


@dataclass(frozen=True)
class RankObservation:
    """The stall detector's view of one rank.

    status:  last report; None before the first
    silent:  seconds since the last report
    lost:    True if ``silent`` is too long
    process: state of its process (see proc(5)); '' if unknown
    works:   True if it uses the CPU, reads or writes
    """

    rank: int
    status: RankStatus | None = None
    silent: float = 0.0
    lost: bool = False
    process: str = ""
    works: bool = False

    @property
    def wait(self) -> RankWait | None:
        """The wait of the rank, including the time since its report; None if it does not wait."""
        if self.status is None or self.status.left or self.status.wait is None:
            return None
        return replace(self.status.wait, seconds=self.status.wait.seconds + self.silent)

    @property
    def name(self) -> str:
        status = self.status
        return f"rank {self.rank} (host {status.host}, pid {status.pid})" if status else f"rank {self.rank}"


def circle_of(wait: RankWait, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a wait; empty if they cannot be parsed."""
    try:
        return tuple(rank for rank in parse_ranks(wait.ranks, world_size) if 0 <= rank < world_size)
    except ValueError:
        return ()


def _well_typed(status: RankStatus) -> bool:
    numbers = [status.seconds, status.cpu, *status.busy.values()]
    texts = [status.host, status.phase, status.call, status.alike]
    counts = [status.rank, status.pid, status.beat, status.step, status.io, status.steps, *status.counts.values()]
    if status.wait is not None:
        numbers.append(status.wait.seconds)
        texts += [status.wait.call, status.wait.what, status.wait.ranks]
        counts.append(status.wait.number)
    return (
        all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        and all(isinstance(text, str) and text.isprintable() and len(text) <= _LONGEST for text in texts)
        and all(isinstance(count, int) for count in counts)
        and isinstance(status.left, bool)
    )


def printable(what: Any) -> str:
    """Return ``str(what)`` as one printable line of limited length."""
    text = " ".join(str(what).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
