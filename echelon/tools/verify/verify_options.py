"""Options of ``echelon verify`` as data, and their checks before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.base.errors import UsageError


@dataclass(frozen=True)
class VerifyOptions:
    """The parsed command line of ``echelon verify``.

    argv: options to pass on to ``echelon run``
    """

    script: str
    args: tuple[str, ...]
    module: bool
    steps: int
    tolerance: float | None
    argv: tuple[str, ...]

    @property
    def is_of_the_zoo(self) -> bool:
        """True for ``echelon verify train -- ARGS``, which verifies the run of ``echelon train ARGS``."""
        return self.script == "train" and not self.module and not Path(self.script).exists()


def check_verify_options(options: VerifyOptions) -> None:
    """Raise ``UsageError`` for options that cannot be compared. The check does not import torch."""
    from echelon.launcher.job import check_program

    if Path(options.script).is_dir() and not options.module:
        raise UsageError(f"'{options.script}' is a directory; give a script")
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps} compares nothing; give 1 or more")
    if options.tolerance is not None and not options.tolerance > 0:
        raise UsageError(
            f"--tolerance {options.tolerance:g} allows no rounding at all; give a number above 0, such as 1e-5"
        )
    if not options.is_of_the_zoo:
        check_program(options.script, options.module)
