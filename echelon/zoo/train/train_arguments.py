"""Sort the arguments of ``echelon train`` into those of the launcher, of the strategy and of the run itself.

Names are written with _ or -, values after a space or =. A switch needs no value: --fresh, --amp, --recompute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.base.errors import UsageError
from echelon.strategy import Strategy

#: Options of the Strategy, without those that ``echelon train`` takes in a form of its own: modules to split, and
#: stages beside their micro-batches and schedule.
STRATEGY_OPTIONS = tuple(field.name for field in dataclasses.fields(Strategy) if field.name not in ("split", "stages"))


@dataclass
class TrainArguments:
    """The sorted arguments: text by name, or True for a name without a value."""

    run: dict[str, str | bool] = field(default_factory=dict)
    strategy: dict[str, str | bool] = field(default_factory=dict)
    launch: dict[str, str | bool] = field(default_factory=dict)

    def again(self) -> list[str]:
        """Return the arguments for the launched processes, without those of the launcher."""
        return [_word(name, value) for name, value in {**self.run, **self.strategy}.items()]


def sort_words(words: Sequence[str], of_launcher: Mapping[str, bool]) -> TrainArguments:
    """Sort the arguments; raise UsageError if one is no ``--name`` or is given twice.

    of_launcher: options of the launcher, with True for those that take a value
    """
    sorted_words, rest = TrainArguments(), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UsageError(f"'{word}' is no parameter; write --name value, such as --model_name resnet_v1_50")
        name, given, text = word[2:].partition("=")
        name = name.replace("-", "_")
        value: str | bool = text if given else True
        if not given and rest and not _is_name(rest[0]) and of_launcher.get(name, True):
            value = rest.pop(0)
        _put(_target_of(sorted_words, name, of_launcher), name, value)
    return sorted_words


def _is_name(word: str) -> bool:
    return word.startswith("--") and len(word) > 2  # a negative number begins with one dash


def _target_of(words: TrainArguments, name: str, of_launcher: Collection[str]) -> dict[str, str | bool]:
    if name in of_launcher:
        return words.launch
    return words.strategy if name.partition(".")[0] in STRATEGY_OPTIONS else words.run


def _put(target: dict[str, Any], name: str, value: str | bool) -> None:
    if name in target and target[name] != value:
        raise UsageError(f"--{name} is given twice, as {target[name]} and {value}; keep one")
    target[name] = value


def _word(name: str, value: str | bool) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"
