"""What a rank says of itself about once a second, as JSON, and what is known of it beside."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.distributed.activity import parse_ranks

_LONGEST = 300  # characters of one text: it ends on consoles


@dataclass(frozen=True)
class RankWait:
    """number: the how-manieth wait in this call with these ranks; seconds: for how long now"""

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
    """One rank.

    beat:   how many reports it has made
    phase:  what it does, and ``seconds`` since when
    call:   the engine's call it is in, '' in the user's code
    counts: by call and ranks, how often it has waited there
    cpu:    seconds of processor time that it and its children have used; ``io``: bytes read and written
    busy:   seconds of its own work by phase, in ``steps`` steps; ``alike``: ranks that do the like
    left:   its script has ended
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
        """Raises ``ValueError`` for anything that ``to_json`` did not write."""
        try:
            given = json.loads(text)
            wait = given.pop("wait")
            status = RankStatus(**given, wait=None if wait is None else RankWait(**wait))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError("not the report of a rank") from error
        if not _well_typed(status):
            raise ValueError("not the report of a rank")
        return status


@dataclass(frozen=True)
class RankObservation:
    """A rank as whoever judges sees it.

    silent:  seconds since its last report; ``lost``: that is too long
    process: the state of its process as its host sees it (see proc(5)), '' where nobody looked
    works:   it uses its processor, reads or writes
    """

    rank: int
    status: RankStatus | None = None
    silent: float = 0.0
    lost: bool = False
    process: str = ""
    works: bool = False

    @property
    def wait(self) -> RankWait | None:
        """What it waits in, the time since its report included."""
        if self.status is None or self.status.left or self.status.wait is None:
            return None
        return replace(self.status.wait, seconds=self.status.wait.seconds + self.silent)

    @property
    def name(self) -> str:
        status = self.status
        return f"rank {self.rank} (host {status.host}, pid {status.pid})" if status else f"rank {self.rank}"


def circle_of(wait: RankWait, world_size: int) -> tuple[int, ...]:
    """The ranks that a wait is for; none where they make no sense."""
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
    """``str(what)``, fit for one line of a console."""
    text = " ".join(str(what).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
