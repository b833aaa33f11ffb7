"""Give parsers damaged and hostile inputs, each made from a seed.

    PYTHONPATH=. python tests/fuzz/fuzzing.py [--minutes 60] [--first 1000] [WORD ...]

A fault is printed with its target and seed, by which it can be repeated. WORDs choose targets by their names.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from targets import TARGETS, Target

#: Seconds and bytes that one input may take, at many times of what a valid one takes.
SLOW, LARGE = 5.0, 64 << 20
LONGEST_LINE = 1000


def faults(target: Target, seeds: Iterable[int], directory: Path) -> Iterator[str]:
    """Yield a line for each seed whose input the parser neither accepts nor refuses as it should."""
    for seed in seeds:
        data = target.mutate(target.sample, Random(f"{target} {seed}"))
        begin = time.process_time()
        tracemalloc.start()
        try:
            target.parse(data, directory)
            problem = ""
        except target.refusals as error:
            line = str(error)
            problem = "" if "\n" not in line and len(line) < LONGEST_LINE else f"refused in a long text: {line[:300]!r}"
        except Exception as error:  # this is what the fuzzing is for
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds = time.process_time() - begin
        if not problem and (seconds > SLOW or peak > LARGE):
            problem = f"{seconds:.1f} s, {peak >> 20} MiB"
        if problem:
            yield f"{target}, seed {seed}: {problem}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--first", type=int, default=1000, help="first seed; the tests have those below 150")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    chosen = [target for target in TARGETS if all(word in target.name for word in given.words)]
    end, tried, found = time.monotonic() + given.minutes * 60, 0, 0
    with TemporaryDirectory() as top:
        for first in itertools.count(given.first, 100):
            for target in chosen:
                directory = Path(top, target.name)
                directory.mkdir(exist_ok=True)
                for fault in faults(target, range(first, first + 100), directory):
                    found += 1
                    print(fault, flush=True)
                tried += 100
            if time.monotonic() > end:
                break
    print(f"{tried:,} inputs of {len(chosen)} parsers, {found} faults")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
