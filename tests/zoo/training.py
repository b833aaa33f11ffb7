"""``echelon train`` in a rank of the harness: the command without its launcher, which costs seconds of imports."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from echelon.base.environment import PLAN


def train_here(words: Sequence[str], cwd: str, plan: str | None = None) -> str:
    """Return the output of a run. ``plan``: a file, as ``--plan`` names one to the launcher."""
    from echelon.zoo.train.run import main

    os.chdir(cwd)
    if plan is not None:
        os.environ[PLAN] = plan
    sys.argv = ["train", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    return out.getvalue()
