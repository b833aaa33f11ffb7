"""``Failure``: the end of a rank, the choice of the first cause, and its one-line description."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from echelon.base.json_head import parse_object
from echelon.base.user_traceback import in_brackets

_LONGEST_LINE = 500
_LONGEST_TRACE = 60_000  # characters sent between hosts; the log has all of it
#: The kind of a failure without an exception: the rank did not arrive where others waited for it.
STALLED = "Stalled"
#: The kind of a failure of a process that the launcher killed because it remained stopped.
STANDSTILL = "Standstill"


@dataclass(frozen=True)
class Failure:
    """The end of one rank, or of a whole host if ``rank`` is negative."""

    rank: int
    world_size: int
    host: str
    pid: int
    #: as subprocess returns it: negative for a signal
    exit_code: int
    time: float
    log: str = ""
    #: class of the exception, '' if none was raised
    kind: str = ""
    message: str = ""
    #: for an EchelonError: ``train.py:41``, the innermost user frame
    place: str = ""
    #: True for an EchelonError, which one line explains; its traceback is present only with --traceback
    ours: bool = False
    traceback: str = ""
    #: True if it failed only because another rank was lost
    secondary: bool = False
    #: role of the process: "rank", or in a job with parameter servers "worker" or "server"
    role: str = "rank"
    #: the newest step that the process has begun; 0 if none
    step: int = 0

    @property
    def how(self) -> str:
        """The way it ended: ``was killed by SIGKILL``, ``failed with exit code 3``, ``raised ValueError: ...``."""
        if self.kind == STANDSTILL:
            return f"stood still {self.message}"
        if self.exit_code < 0 and self.rank >= 0:
            return f"was killed by {signal_name(-self.exit_code)}"
        if self.kind or self.rank < 0:
            said = " ".join(self.message.split())
            said = said if len(said) <= _LONGEST_LINE else said[:_LONGEST_LINE] + " ..."
            if self.kind == STALLED:
                return f"stalled: {said}"
            described = f"{said}{in_brackets(self.place)}"
            return described if self.rank < 0 else f"raised {self.kind}{': ' if said else ''}{described}"
        return f"failed with exit code {self.exit_code}"

    @property
    def who(self) -> str:
        return f"{self.role} {self.rank}" if self.rank >= 0 else f"host {self.host}"

    @property
    def of_rank(self) -> int | None:
        """The rank of a training process; None for a host or a server."""
        return self.rank if self.rank >= 0 and self.role != "server" else None

    @property
    def details(self) -> dict[str, Any]:
        """The step, the traceback and the log, as far as they are known, for the event in the run log."""
        result = {"step": self.step, "traceback": self.traceback[-_LONGEST_TRACE:], "log": self.log}
        return {name: value for name, value in result.items() if value}

    @property
    def line(self) -> str:
        if self.rank < 0:
            return f"{self.who} {self.how}"
        return f"{self.who} of {self.world_size} (host {self.host}, pid {self.pid}) {self.how}"

    @property
    def explained(self) -> bool:
        """True if an error ended it that one line explains and that a restart would meet again (see rank_main.py)."""
        return bool(self.kind) and self.kind not in (STALLED, STANDSTILL) and (self.ours or not self.traceback)

    @property
    def status(self) -> int:
        """The launcher's own exit code; signals are encoded as in a shell."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"traceback": self.traceback[-_LONGEST_TRACE:]})

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """Parse the result of ``to_json``. Raises ``ValueError`` for anything else, which may come from the network."""
        given = parse_object(text)
        kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
        if set(given) != {field.name for field in fields(Failure)}:
            raise ValueError("not the record of a failure")
        if not all(isinstance(given[field.name], kinds[str(field.type)]) for field in fields(Failure)):
            raise ValueError("not the record of a failure")
        return Failure(**given)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the first cause: never a secondary failure, a death by signal before an exception, then the earliest.

    SIGABRT does not count as a death by signal: NCCL's watchdog uses it to end a rank that waited for a lost peer.
    """
    return min(
        failures,
        key=lambda end: (end.secondary, end.exit_code >= 0 or end.exit_code == -signal.SIGABRT, end.time),
    )


def read_record(path: Path) -> dict[str, Any]:
    """Return the record that the rank wrote about its end (see rank_main.py); only the time if there is none."""
    try:
        record = parse_object(path.read_bytes())
        return {
            "kind": str(record["kind"]),
            "message": str(record["message"]),
            "place": str(record["place"]),
            "ours": bool(record["ours"]),
            "traceback": str(record["traceback"]),
            "secondary": bool(record["secondary"]),
            "step": int(record["step"]),
            "time": float(record["time"]),
        }
    except (OSError, ValueError, TypeError, KeyError):
        return {"time": time.time()}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
