"""Lives without end, or a range of seeds: make soak SOAK="--seconds 3600 [--first SEED]"

Prints each seed whose life breaks a law (then keep it in ``seeds.py``), and the rate at the end.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from server_life import live, simulated_servers


def main() -> int:
    parser = argparse.ArgumentParser(description="Lives of parameter servers, by seed.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; default 60")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default 0")
    parser.add_argument("--count", type=int, default=10**9, help="most lives")
    given = parser.parse_args()
    began, used = time.monotonic(), time.process_time()
    lives, failed, refused, faults, operations = 0, [], 0, Counter[str](), 0
    with simulated_servers():
        while time.monotonic() - began < given.seconds and lives < given.count:
            seed = given.first + lives
            result = live(seed)
            lives, faults, operations = lives + 1, faults + result.faults, operations + result.operations
            refused += result.refused
            if result.violations:
                failed.append(seed)
                print(f"seed {seed}: {result.violations[0][:300]}  {dict(result.faults)}", flush=True)
    spent = time.process_time() - used
    print(f"{lives} lives in {spent:.0f} s of CPU ({lives / spent:.1f} a second), {operations} disk operations")
    print(f"{sum(faults.values())} faults: {dict(faults)}")
    print(f"{refused} ended by a named loss of state, {len(failed)} broke a law: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
