"""Removal of private data from a report: secrets in variables, passwords in addresses, the home directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from echelon.base.environment import BOUND_MARK, DOCTOR_RESULT, LEAVE_MARK, LOG_DIR, MEMORY, STALL_JUDGE

MASK = "***"
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_SHOWN = ("GLOO_", "NCCL_", "OMP_", "TORCH_", "MKL_", "KMP_", "CUDA_", "ECHELON_", "UCX_")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
#: Internal variables between launcher and ranks, which are not shown.
_OURS = (DOCTOR_RESULT, LOG_DIR, LEAVE_MARK, BOUND_MARK, MEMORY, STALL_JUDGE)
_PASSWORD = re.compile(r"://[^/@\s]*@")


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect computation or communication of ranks, with secrets masked."""
    shown = (name for name in env if name.startswith(_SHOWN) or name.upper() in _PROXIES)
    shown = (name for name in shown if name not in _OURS)
    return {name: masked(name, env[name]) for name in sorted(shown)}


def masked(name: str, value: str) -> str:
    if any(word in name.upper() for word in _SECRET):
        return MASK
    return without_home(_PASSWORD.sub(f"://{MASK}@", value))


def without_home(text: str) -> str:
    """Replace the home directory, which contains the user's name, by ``~``."""
    home = os.environ.get("HOME") or str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
