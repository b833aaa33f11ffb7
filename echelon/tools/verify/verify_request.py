"""Communication between ``echelon verify`` and the processes it starts, through files in a directory."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from echelon.base.environment import TRIAL, VERIFY

Role = Literal["plan", "reference"]


@dataclass(frozen=True)
class VerifyRequest:
    """The request to every process of a run.

    directory: directory of the request, the recorded data and the answers
    role:      "plan": train as the script says and record it; "reference": replay the record in one process
    steps:     number of updates after which the process ends
    wide:      True to compute in float64, so that remaining differences are not rounding errors
    passes:    passes per update of one process in a custom loop, if known to differ from the ranks' number; else 0
    """

    directory: str
    role: Role
    steps: int
    wide: bool = False
    passes: int = 0

    def file(self, name: str) -> Path:
        return Path(self.directory, name)

    def ask(self) -> dict[str, str]:
        """Write the request to a file and return the environment variable by which processes find it."""
        path = self.file(f"{self.role}-question.json")
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return {VERIFY: str(path)}

    def answer(self, found: dict[str, Any]) -> None:
        self.file(f"{self.role}.json").write_text(json.dumps(found), encoding="utf-8")

    def answered(self, role: Role) -> dict[str, Any] | None:
        path = self.file(f"{role}.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def note(self, what: str, value: object) -> None:
        """Write a note, such as the number of steps so far, that the command reads if there is no answer."""
        self.file(f"{self.role}-{what}").write_text(str(value), encoding="utf-8")

    def noted(self, what: str) -> str | None:
        path = self.file(f"{self.role}-{what}")
        return path.read_text(encoding="utf-8") if path.exists() else None

    def give_up(self, text: str) -> NoReturn:
        """End this process with the verdict "cannot tell" for the reason ``text``."""
        self.note("unclear", text)
        leave()

    def refuse(self, text: str) -> NoReturn:
        """End this process with exit code 0; the command then fails with ``text`` as its one-line error."""
        self.note("refused", text)
        leave()


def leave() -> NoReturn:
    """End this process at once with exit code 0, without running the rest of the script."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def find_verify_request() -> VerifyRequest | None:
    """Return the request to this process; None outside of ``echelon verify`` and in timing trials of ``auto``."""
    path = os.environ.get(VERIFY)
    if path is None or TRIAL in os.environ:
        return None
    return VerifyRequest(**json.loads(Path(path).read_text(encoding="utf-8")))
