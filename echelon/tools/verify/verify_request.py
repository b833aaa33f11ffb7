"""What the command and the processes it starts tell each other, through a directory."""

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
    """Asked of every process of a run, and where its answers lie.

    role:  "plan": train as the script says and write it down; "reference": one process, to be compared with that
    steps: updates after which it ends
    wide:  compute in 64 bits, so that what is left between the two runs is no rounding
    passes: of one process for an update in a loop of its own, once they are known not to be as many as on the ranks
    """

    directory: str
    role: Role
    steps: int
    wide: bool = False
    passes: int = 0

    def file(self, name: str) -> Path:
        return Path(self.directory, name)

    def ask(self) -> dict[str, str]:
        """The variable by which processes find it."""
        path = self.file(f"{self.role}-question.json")
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return {VERIFY: str(path)}

    def answer(self, found: dict[str, Any]) -> None:
        self.file(f"{self.role}.json").write_text(json.dumps(found), encoding="utf-8")

    def answered(self, role: Role) -> dict[str, Any] | None:
        path = self.file(f"{role}.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def note(self, what: str, value: object) -> None:
        """How far it has come, for who finds no answer."""
        self.file(f"{self.role}-{what}").write_text(str(value), encoding="utf-8")

    def noted(self, what: str) -> str | None:
        path = self.file(f"{self.role}-{what}")
        return path.read_text(encoding="utf-8") if path.exists() else None

    def give_up(self, text: str) -> NoReturn:
        """End with the verdict that it cannot be told."""
        self.note("unclear", text)
        leave()

    def refuse(self, text: str) -> NoReturn:
        """What cannot be verified is the command's one line, and not a rank's failure."""
        self.note("refused", text)
        leave()


def leave() -> NoReturn:
    """End this process: the script is not to go on, whatever it would do next."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def find_verify_request() -> VerifyRequest | None:
    """The question that this process is to answer; none in one that times a candidate of ``auto``."""
    path = os.environ.get(VERIFY)
    if path is None or TRIAL in os.environ:
        return None
    return VerifyRequest(**json.loads(Path(path).read_text(encoding="utf-8")))
