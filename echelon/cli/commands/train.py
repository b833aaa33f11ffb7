"""``echelon train``: check the arguments before any process starts, then launch the training processes."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from echelon.base.environment import RECORD_DIR
from echelon.base.errors import UsageError
from echelon.base.option_checks import at_least
from echelon.cli.launcher_options import launch_module, launcher_options
from echelon.zoo.entry import Setting
from echelon.zoo.registry import require_dataset
from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.resolve import TrainConfig, resolve
from echelon.zoo.train.train_arguments import STRATEGY_OPTIONS, sort_words

MODULE = "echelon.zoo.train.run"


def run_train(argv: Sequence[str]) -> int:
    """Launch the training job and return its exit code."""
    if not argv or "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    sorted_words = sort_words(argv, launcher_options())
    if str(procs := sorted_words.launch.get("procs", 1)).lstrip("-").isdigit():
        at_least(1, "--procs", int(procs))
    if isinstance(data := sorted_words.run.get("dataset_name"), str):
        require_dataset(data)
    resolved = resolve(sorted_words)
    _check_names(resolved)
    from echelon.zoo.train.output_dir import forget, output_directory  # imports torch: only after names are checked
    from echelon.zoo.train.rank_checks import check_ranks
    from echelon.zoo.train.strategies import requested_strategy

    requested_strategy(resolved)  # conflicting options raise here, once, and not on each rank
    if resolved["fresh"] and sorted_words.run.pop("fresh", None) is None:  # set in the file, which the ranks read too
        sorted_words.run["fresh"] = "false"

    launch_options = {"log_dir": str(output_directory(resolved)), **resolved.launch}

    def forget_earlier() -> None:
        _write_there(output_directory(resolved))
        if resolved["fresh"]:
            forget(output_directory(resolved))

    return launch_module(
        MODULE, sorted_words.again(), launch_options, forget_earlier, lambda ranks: check_ranks(resolved, ranks)
    )


def _check_names(resolved: TrainConfig) -> None:
    """Raise UsageError if an argument of a user's model or data set has the name of a launcher option."""
    for setting in (*resolved.model.settings, *resolved.dataset.settings):
        if setting.name in launcher_options():
            raise UsageError(
                f"--{setting.name} {setting.meaning}: 'echelon run' has an option of this name; rename the argument"
            )


def _write_there(directory: Path) -> None:
    """Make the launcher write its records to the directory of the ranks' records."""
    os.environ[RECORD_DIR] = str(directory)
    with contextlib.suppress(OSError):  # the ranks report the error in one line
        directory.mkdir(parents=True, exist_ok=True)


def help_text() -> str:
    lines = [
        "usage: echelon train --model_name NAME [--dataset_name NAME] [--name value ...]",
        "",
        "Train a model of the zoo. Parameters come from flags, from a file (--config run.yaml), or both; a model and a",
        "data set may have more of their own: 'echelon zoo show NAME'.",
    ]
    for group, members in groupby(PARAMETERS, key=lambda parameter: parameter.group):
        lines += ["", f"{group}:", *(line for setting in members for line in setting_lines(setting))]
    lines += ["", "strategy (docs/strategies.md):"]
    lines += _wrapped(" ".join(f"--{name}" for name in STRATEGY_OPTIONS))
    lines += ["", "launching, as for 'echelon run':"]
    return "\n".join([*lines, *_wrapped(" ".join(f"--{name.replace('_', '-')}" for name in launcher_options()))])


def setting_lines(setting: Setting) -> list[str]:
    shown = str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
    default = "" if setting.default is None else f" [{shown}]"
    return _wrapped(f"--{setting.name}{default}  {setting.meaning}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="      ")
