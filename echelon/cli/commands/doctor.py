"""``echelon doctor``: run the checks as an ordinary job of the launcher, under the conditions of real jobs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from echelon.base.environment import DOCTOR_RESULT
from echelon.base.errors import UsageError

MODULE = "echelon.tools.doctor.examine"


def run_doctor(argv: Sequence[str], checkpoint: str | None, json: str | None, quick: bool) -> int:
    """Run the checks and return an exit code: 0 if all checks pass, 1 if one fails.

    argv: options of ``echelon run``
    """
    examine = ["--quick"] if quick else []
    if checkpoint is not None:
        examine += ["--checkpoint", str(Path(checkpoint).absolute())]
    if json is not None:
        _check_place(Path(json))
        examine += ["--json", str(Path(json).absolute())]
    logs = tempfile.mkdtemp(prefix="echelon-doctor-")
    result = Path(logs, "result")
    result.touch()  # the file tells ranks that the command waits on their host
    os.environ[DOCTOR_RESULT] = str(result)
    launching = [*argv] if _has_log_dir(argv) else [*argv, "--log-dir", logs]
    failed = False
    try:
        code = _run([*launching, "-m", MODULE, *examine])
        failed = 0 < code < 128  # a signal stopped the job if the code is 128 or more
        return code or int(result.read_text(encoding="ascii") not in ("", "0"))
    finally:
        if not failed or not any(Path(logs).glob("*.log")):  # the message of a failed rank names its log file
            shutil.rmtree(logs, ignore_errors=True)


def _run(argv: list[str]) -> int:
    from echelon.cli.app import run_command

    return int(run_command().main(args=argv, prog_name="echelon doctor", standalone_mode=False) or 0)


def _has_log_dir(argv: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--log-dir" for word in argv)


def _check_place(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save {path}: there is no directory {path.absolute().parent}; make it, or name another")
