"""How a rank ended, which failure was the first cause, and how to say so in one line."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from echelon.base.user_traceback import in_brackets

_LONGEST_LINE = 500
_LONGEST_TRACE = 60_000  # what travels between hosts; the log keeps all of it
#: The kind of a failure that nobody raised: the rank did not come to where others waited for it.
STALLED = "Stalled"
#: Of one that we killed because it was stopped and stayed so.
STANDSTILL = "Standstill"


@dataclass(frozen=True)
class Failure:
    """The end of one rank; of a whole host when ``rank`` is negative."""

    rank: int
    world_size: int
    host: str
    pid: int
    #: as subprocess gives it: negative for a signal
    exit_code: int
    time: float
    log: str = ""
    #: the exception's class, '' when none was raised
    kind: str = ""
    message: str = ""
    #: of an error of ours: ``train.py:41``, the user's innermost frame
    place: str = ""
    #: an error of ours, which one line explains; its traceback is there only if it was asked for
    ours: bool = False
    traceback: str = ""
    #: failed only because another rank had gone
    secondary: bool = False
    #: what the process was: "rank", or in a job with parameter servers "worker" or "server"
    role: str = "rank"

    @property
    def how(self) -> str:
        """``was killed by SIGKILL``, ``failed with exit code 3``, ``raised ValueError: ...``."""
        if self.kind == STANDSTILL:
            return f"stood still {self.message}"
        if self.exit_code < 0 and self.rank >= 0:
            return f"was killed by {signal_name(-self.exit_code)}"
        if self.kind or self.rank < 0:
            said = " ".join(self.message.split())
            said = said if len(said) <= _LONGEST_LINE else said[:_LONGEST_LINE] + " ..."
            if self.kind == STALLED:
                return f"stalled: {said}"
            told = f"{said}{in_brackets(self.place)}"
            return told if self.rank < 0 else f"raised {self.kind}{': ' if said else ''}{told}"
        return f"failed with exit code {self.exit_code}"

    @property
    def who(self) -> str:
        return f"{self.role} {self.rank}" if self.rank >= 0 else f"host {self.host}"

    @property
    def of_rank(self) -> int | None:
        """The rank of those that train; None for a host or a server."""
        return self.rank if self.rank >= 0 and self.role != "server" else None

    @property
    def line(self) -> str:
        if self.rank < 0:
            return f"{self.who} {self.how}"
        return f"{self.who} of {self.world_size} (host {self.host}, pid {self.pid}) {self.how}"

    @property
    def explained(self) -> bool:
        """Ended by an error that is explained in one line, and that would come again: see worker.py's records."""
        return bool(self.kind) and self.kind not in (STALLED, STANDSTILL) and (self.ours or not self.traceback)

    @property
    def status(self) -> int:
        """The launcher's own exit code, signals as a shell tells them."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"traceback": self.traceback[-_LONGEST_TRACE:]})

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """Raises ``ValueError`` for anything that ``to_json`` did not write: it may come from the network."""
        given = json.loads(text)
        kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
        if not isinstance(given, dict) or set(given) != {field.name for field in fields(Failure)}:
            raise ValueError("not the record of a failure")
        if not all(isinstance(given[field.name], kinds[str(field.type)]) for field in fields(Failure)):
            raise ValueError("not the record of a failure")
        return Failure(**given)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure to blame: never one that only followed, a violent death before an exception, then the earliest.

    SIGABRT does not count as violent: it is how NCCL's own watchdog ends a rank that waited for a lost peer.
    """
    return min(
        failures,
        key=lambda end: (end.secondary, end.exit_code >= 0 or end.exit_code == -signal.SIGABRT, end.time),
    )


def read_record(path: Path) -> dict[str, Any]:
    """What the rank itself wrote about its end (see worker.py); empty when it could not."""
    try:
        record = json.loads(path.read_text())
        return {
            "kind": str(record["kind"]),
            "message": str(record["message"]),
            "place": str(record["place"]),
            "ours": bool(record["ours"]),
            "traceback": str(record["traceback"]),
            "secondary": bool(record["secondary"]),
            "time": float(record["time"]),
        }
    except (OSError, ValueError, TypeError, KeyError):
        return {"time": time.time()}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
