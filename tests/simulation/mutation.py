"""Bugs of one line that lives must find: a mutant changes the source of one function of Echelon."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

#: Runs one life, by its seed and the faults that it may have (none given: any); returns its outcome.
Live = Callable[..., Any]


class Mutant(NamedTuple):
    """A change of one function: ``old`` in its source becomes ``new``.

    only:  faults of the lives that look for it; default: any
    """

    owner: Any
    function: str
    old: str
    new: str
    only: tuple[str, ...] = ()


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Put the changed function in place inside the context."""
    held = inspect.getattr_static(mutant.owner, mutant.function)
    function = inspect.unwrap(held)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise LookupError(f"{mutant.function}: {mutant.old!r} stands there {source.count(mutant.old)} times")
    made: dict[str, Any] = {}
    code = compile(source.replace(mutant.old, mutant.new), f"mutant of {mutant.function}", "exec")
    exec(code, function.__globals__, made)
    owners = [mutant.owner] if inspect.isclass(mutant.owner) else _importers(held)
    for owner in owners:
        setattr(owner, mutant.function, made[mutant.function])
    try:
        yield
    finally:
        for owner in owners:
            setattr(owner, mutant.function, held)


def _importers(function: Any) -> list[Any]:
    """Return the modules that know a function by its name."""
    known = [module for name, module in sys.modules.items() if name.startswith("echelon")]
    return [module for module in known if getattr(module, function.__name__, None) is function]


def find(mutant: Mutant, seeds: Iterator[int] | range, live: Live) -> int | None:
    """Return the first seed whose life breaks a law."""
    with mutated(mutant):
        return next((seed for seed in seeds if live(seed, only=mutant.only).violations), None)


def search(mutants: Mapping[str, Mutant], found_by: Mapping[str, int], live: Live) -> int:
    """Look for lives that find the mutants, as the command line says; print their seeds, return the exit code."""
    parser = argparse.ArgumentParser(description="Lives with a bug.")
    parser.add_argument("--lives", type=int, default=200, help="most lives of a mutant; default 200")
    parser.add_argument("words", nargs="*", help="words of the names of mutants; default: all mutants")
    given = parser.parse_args()
    missed = []
    for name, mutant in mutants.items():
        if any(word not in name for word in given.words):
            continue
        began = time.process_time()
        kept = [found_by[name]] if name in found_by else []
        seed = find(mutant, iter([*kept, *range(given.lives)]), live)
        missed += [name] if seed is None else []
        print(f'    "{name}": {seed},  # {time.process_time() - began:.1f} s', flush=True)
    print(f"{len(missed)} not found: {missed}")
    return 1 if missed else 0
