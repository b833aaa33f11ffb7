"""Normalize the spelling of command-line options: underscores, and former names of options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from echelon.base.console import say

#: command -> {former name of an option: present name}; former names still work
RENAMED: Mapping[str, Mapping[str, str]] = {
    "plan": {"--batch": "--global-batch"},
    "memory": {
        "--batch": "--batch-size",
        "--merge": "--gradient-merge",
        "--save": "--log-dir",
        "--lean": "--low-memory",
        "--no-lean": "--no-low-memory",
    },
    "doctor": {"--json": "--save"},
    "explain": {"--ranks": "--procs", "--ranks-per-host": "--procs-per-host"},
    "slurm": {"--nodes": "--nnodes"},
    "k8s": {"--hosts": "--nnodes", "--state": "--state-size"},
    "fetch-data": {"--worker": "--part", "--workers": "--parts"},
}


def dashed(word: str) -> str:
    """Return an option with dashes for underscores in its name: ``--log_dir=a_b`` is ``--log-dir=a_b``."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def option_places(words: Sequence[str], valued: Collection[str], *, script_is_last: bool) -> Iterator[int]:
    """Yield the indices of the command's options in ``words``; options after ``--`` or after a script do not count.

    valued: options that take a value, as ``dashed`` spells them
    """
    at = 0
    while at < len(words) and words[at] != "--":
        if words[at].startswith("-"):
            yield at
        elif script_is_last:
            return
        at += 2 if dashed(words[at]) in valued else 1


def respell(
    words: Sequence[str], command: str, known: Collection[str], valued: Collection[str], *, script_is_last: bool
) -> list[str]:
    """Return the arguments with each known option in its present spelling; print a line for a former name."""
    names, result = RENAMED.get(command, {}), list(words)
    taking = {*valued, *(old for old, new in names.items() if new in valued)}
    for at in option_places(words, taking, script_is_last=script_is_last):
        name, equals, value = dashed(words[at]).partition("=")
        if name in names:
            say(f"{name} is called {names[name]} now")
        if (today := names.get(name, name)) in known:
            result[at] = today + equals + value
    return result
