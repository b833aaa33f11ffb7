"""A job of ranks on this machine, whose results come back."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def job(script: str, ranks: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results that the ranks of ``script --worker`` print."""
    command = [sys.executable, "-m", "echelon", "run", "--procs", str(ranks), "--log-dir", "log/bench", script]
    command += ["--worker", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT ")]
    if output.returncode or not lines:
        sys.exit(f"{ranks} ranks failed:\n{output.stdout}\n{output.stderr}")
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]
