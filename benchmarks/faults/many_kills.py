"""kill -9 of each rank, again and again, in one long run: it must end with the losses and weights of a quiet one.

    python benchmarks/faults/many_kills.py [--kills 100] [--procs 2] [--layouts data pipeline split shard collective]
           [--copies 1] [--seed 1] [--out many_kills.json] [--losses losses.json]

The next rank is killed when training has gone on after the last one, a random moment later; all ranks are killed
equally often. Training lasts until that is done, and the quiet run has as many steps. With --out, kills are added to
those that the file has. With --warm, processes are forked in place of fresh starts, which takes
PYTHONPATH=.:tests/support:tests/launcher.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from benchmarks import ROOT
from benchmarks.faults.faults import same_weights
from benchmarks.faults.many_kills_train import EPOCH

HANGS = 120.0
LAYOUTS = ("data", "pipeline", "split", "shard", "collective")


def start(place: Path, layout: str, pause: float, asked: argparse.Namespace) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("many_kills_train.py")
    options = ["--procs", asked.procs, "--max-restarts", asked.kills, "--copies", asked.copies]
    words = ["run", *map(str, [*options, script, layout, pause])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if asked.warm:
        from forked import Forked

        return cast(subprocess.Popen[bytes], Forked(words, cwd=place, env=environment, warm=True))
    with (place / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "echelon", *words], cwd=place, env=environment, stdout=said, stderr=said
        )


def losses(place: Path, rank: int = 0) -> dict[int, list[str]]:
    """Every loss that the rank has seen at each step: one, or more where a step was made again."""
    found: dict[int, list[str]] = {}
    path = place / f"losses-{rank}"
    for line in path.read_text().splitlines() if path.exists() else ():
        step, _, loss = line.partition(" ")
        found.setdefault(int(step), []).append(loss)
    return found


def until(holds: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < end, "the job stands still"
        assert process.poll() is None, f"the job ended early, with {process.returncode}"
        time.sleep(0.02)


def resumed(place: Path) -> list[int]:
    """Return the step after which training went on, for each restart."""
    events = map(json.loads, next(place.glob("runs/*/events.jsonl")).read_text().splitlines())
    return [int(re.findall(r"after step (\d+)", each["text"])[0]) for each in events if each["kind"] == "resumed"]


def disturb(process: subprocess.Popen[bytes], place: Path, victims: list[int], minutes: float) -> list[float]:
    """Kill these, or as many as there are minutes for; return the seconds until training had gone on, each time."""
    recovery = []
    until(lambda: len(losses(place)) > 2, process)
    end = time.monotonic() + 60 * minutes
    for victim in victims:
        if time.monotonic() > end:
            break
        time.sleep(random.uniform(0.0, 0.5))
        os.kill(int((place / f"pid-{victim}").read_text()), signal.SIGKILL)
        began, before = time.monotonic(), max(losses(place))
        until(lambda seen=before: max(losses(place)) > seen + 1, process)
        recovery.append(time.monotonic() - began)
    (place / "end.part").write_text(str(max(losses(place)) // EPOCH + 2))
    (place / "end.part").rename(place / "end")
    return recovery


def curves(place: Path) -> dict[str, list[float]]:
    """Return the losses of both runs by step, and the steps after which the killed one resumed."""
    found: dict[str, list[float]] = {"resumed after step": list(resumed(place / "killed"))}
    for run in ("quiet", "killed"):
        found[run] = [float(loss[-1]) for _, loss in sorted(losses(place / run).items())]
    return found


def run(place: Path, layout: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run both jobs of a layout and return its line in the table."""
    victims = [kill % asked.procs for kill in range(asked.kills)]
    random.shuffle(victims)
    process = start(place / "killed", layout, 0.05, asked)
    wrong, recovery = [], []
    try:
        recovery = disturb(process, place / "killed", victims, asked.minutes)
        code = process.wait(HANGS)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        wrong.append(str(error))
        process.kill()
        code = process.wait()
    found = [losses(place / "killed", rank) for rank in range(asked.procs)]
    (place / "quiet").mkdir()
    (place / "quiet" / "end").write_text(str(max(found[0]) // EPOCH))
    start(place / "quiet", layout, 0.0, asked).wait()
    expected = losses(place / "quiet")
    # A rank that is killed before it has noted a loss notes none; the weights show that the step was made.
    differ = sorted({step for each in found for step, seen in each.items() if set(seen) != set(expected[step])})
    wrong += [f"exit code {code}"] if code else []
    wrong += [f"losses differ at steps {differ}"] if differ else []
    weights = [place / run / "final.safetensors" for run in ("killed", "quiet")]
    wrong += [] if all(path.exists() for path in weights) and same_weights(*weights) else ["weights differ"]
    return {
        "kills": len(recovery), "steps": len(expected), "wrong": wrong,
        "steps made again": sum(max(len(each.get(step, "1")) for each in found) - 1 for step in expected),
        "seconds until gone on": sorted(round(seconds, 2) for seconds in recovery),
    }  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--kills", type=int, default=100)
    ask.add_argument("--procs", type=int, default=2)
    ask.add_argument("--layouts", nargs="*", default=["data"], choices=LAYOUTS)
    ask.add_argument("--copies", type=int, default=1, help="steps between two copies in memory; default 1")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--warm", action="store_true", help="fork processes in place of fresh starts, to save time")
    ask.add_argument("--minutes", type=float, default=math.inf, help="kill for so long; then the run ends undisturbed")
    ask.add_argument("--out", type=Path)
    ask.add_argument("--losses", type=Path, help="where to write both curves, for the picture in docs/faults.md")
    asked = ask.parse_args()
    random.seed(asked.seed)
    table = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    wrong = 0
    for layout in asked.layouts:
        place = Path(tempfile.mkdtemp(prefix=f"kills-{layout}-"))
        row = run(place, layout, asked)
        wrong += len(row["wrong"])
        times = row["seconds until gone on"] or [math.nan]
        print(f"{layout}: {row}, median {statistics.median(times):.1f} s", flush=True)
        before = table.get(layout, {})
        table[layout] = {name: (before[name] + row[name] if before else row[name]) for name in row}
        table[layout]["seconds until gone on"].sort()
        if asked.out:
            asked.out.write_text(json.dumps(table, indent=1) + "\n")
        if asked.losses:
            asked.losses.write_text(json.dumps(curves(place)) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
