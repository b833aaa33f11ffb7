"""Examples a second and loss of work C with parameter servers: Echelon beside Paddle, TensorFlow and TorchRec.

    python benchmarks/parameter_server/ctr.py [--rounds 3] [--steps 180] [--warmup 20] [--only echelon-async,...]
         [--peers DIR] [--environments DIR] [--out results.json]

Work C is in ``ctr_work.py``: two workers with batches of 512, one thread each, Adagrad for rows (row-wise where a
contender has it) and SGD for the network. Contenders take turns within a round on the same cores; a contender's speed
is the sum over its workers of examples a second after the warm-up, and ratios are medians over rounds of the ratio
within a round. The loss is the mean of the last 5 batches of each worker, after equally many examples for everyone.

"bound" is the network alone on both cores at once: rows are there for nothing, but their gradient is computed, as any
training must. "from-file" reads the same rows as text through ``CtrFiles``. TensorFlow's script trains all workers on
worker 0's batches, so that each is seen twice; the loss to put beside its own is that of "same-data". "cpu" is
processor time for one batch of one worker, servers included: neighbours on the machine move it less than the clock.

``--peers`` names a directory with the peers' scripts (run_paddle_ps.py, bench_tf_ps.py, bench_torchrec.py),
``--environments`` one with a virtual environment for each (paddle300, tf, torchrec); without them Echelon runs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parameter_server.ctr_work import write_criteo

HERE = Path(__file__).resolve().parent
WORKERS = 2
PEERS = ("paddle", "tf", "torchrec")
#: what each must reach, as a multiple of which peer's speed
TARGETS = {
    "echelon-async": {"paddle": 2.0, "tf": 3.0},
    "echelon-hybrid": {"paddle": 2.0, "tf": 3.0},
    "echelon-collective": {"torchrec": 1.5},
}


@dataclass
class Run:
    """One turn of one contender."""

    ex_s: float
    workers: list[dict[str, Any]]
    wall_s: float

    def mean(self, name: str) -> float | None:
        values = [worker[name] for worker in self.workers if worker.get(name) is not None]
        return round(statistics.fmean(values), 4) if values else None

    @property
    def cpu(self) -> float:
        """Processor milliseconds for one batch of one worker, servers included."""
        workers = self.mean("cpu_ms_step_all") or self.mean("cpu_ms_step") or 0.0
        return round(workers + (self.mean("servers_cpu_ms_step") or 0.0), 2)


@dataclass
class Contender:
    name: str
    start: Callable[[Path], str]  # runs in a directory of its own; everything that was printed
    runs: list[Run | None] = field(default_factory=list)

    def turn(self) -> Run | None:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ctr-") as folder:
            printed = self.start(Path(folder))
        found = results(printed)
        if not found:
            print(f"{self.name} gave no result: ...{' | '.join(printed.split(chr(10))[-12:])[-1200:]}", flush=True)
            self.runs.append(None)
            return None
        speed = sum(worker.get("ex_s_total", worker.get("ex_s", 0.0)) for worker in found)
        self.runs.append(Run(round(speed, 1), found, round(time.monotonic() - begin, 1)))
        return self.runs[-1]


def results(printed: str) -> list[dict[str, Any]]:
    """Parse the text after each RESULT, once for each worker; two workers may share a line."""
    found: dict[Any, dict[str, Any]] = {}
    for match in re.finditer(r"RESULT (?=\{)", printed):
        try:
            value, _ = json.JSONDecoder().raw_decode(printed, match.end())
        except ValueError:
            continue
        found[value.get("worker", value.get("rank", 0))] = value
    return list(found.values())


def execute(command: list[str], *, cwd: Path, timeout: float = 240, **environment: str) -> str:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env = {**os.environ, **threads, **environment}
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.communicate()[0] + f"\nstopped after {timeout:.0f} s"


def ours(name: str, mode: str, servers: int, given: argparse.Namespace, *more: str) -> Contender:
    def start(folder: Path) -> str:
        roles = ["--servers", str(servers), "--workers", str(WORKERS)] if servers else ["--procs", str(WORKERS)]
        launcher = [sys.executable, "-m", "echelon", "run", *roles]
        amount = ["--steps", str(given.steps), "--warmup", str(given.warmup)]
        worker = [str(HERE / "ctr_worker.py"), "--mode", mode, "--meet", str(folder), *amount, *more]
        printed = execute([*launcher, "--max-restarts", "0", "--log-dir", str(folder / "log"), *worker], cwd=folder)
        return printed + "".join(log.read_text(errors="replace") for log in sorted(folder.glob("log/**/*.log")))

    return Contender(name, start)


def bound(given: argparse.Namespace) -> Contender:
    def start(folder: Path) -> str:
        amount = ["--steps", str(2 * given.steps), "--warmup", str(given.warmup)]
        command = [sys.executable, str(HERE / "ctr_worker.py"), "--mode", "bound", *amount]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        both = [
            subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)
        ]
        printed = [process.communicate()[0] for process in both]
        lines = [
            line.replace("{", f'{{"worker": {n}, ', 1) for n, out in enumerate(printed) for line in out.splitlines()
        ]
        return "\n".join(line for line in lines if "without" not in line)

    return Contender("bound", start)


def paddle(given: argparse.Namespace) -> Contender:
    """Its native reader for the speed; the loss of the same number of steps from a second run, fed from Python."""
    losses: list[dict[str, Any]] = []

    def once(how: str) -> str:
        command = [sys.executable, "run_paddle_ps.py", "paddle300", "1", str(WORKERS), "async", how]
        return execute([*command, str(given.steps), str(given.warmup)], cwd=given.peers, PEERS=str(given.environments))

    def start(folder: Path) -> str:
        if not losses:
            losses.extend(results(once("run")))
        known = {worker["rank"]: worker for worker in losses}
        printed = once("dataset")
        found, servers = results(printed), re.search(r"SERVERS (\{.*\})", printed)
        seconds = sum(json.loads(servers[1])["cpu_s"]) if servers else 0.0  # since they started
        for worker in found:
            fed = known.get(worker["rank"], {})
            worker.update({name: fed.get(name) for name in ("loss_first", "loss_last")}, ex_s_fed=fed.get("ex_s"))
            worker["servers_cpu_ms_step"] = 1e3 * seconds / (given.steps + given.warmup) / WORKERS
        return "\n".join("RESULT " + json.dumps(worker) for worker in found)

    return Contender("paddle", start)


def tensorflow(given: argparse.Namespace) -> Contender:
    def start(folder: Path) -> str:
        python = str(given.environments / "tf" / "bin" / "python")
        amount = [str(given.steps), str(WORKERS * given.warmup)]  # it counts the warm-up over all workers
        command = [python, "bench_tf_ps.py", "1", str(WORKERS), *amount]
        return execute(command, cwd=given.peers, PEERS=str(folder))

    return Contender("tf", start)


def torchrec(given: argparse.Namespace) -> Contender:
    def start(folder: Path) -> str:
        launcher = [str(given.environments / "torchrec" / "bin" / "torchrun"), "--standalone", "--nproc_per_node", "2"]
        return execute([*launcher, "bench_torchrec.py", str(given.steps), str(given.warmup)], cwd=given.peers)

    return Contender("torchrec", start)


def contenders(given: argparse.Namespace) -> list[Contender]:
    all_of_them = [bound(given)]
    if given.peers:
        all_of_them += [paddle(given), tensorflow(given), torchrec(given)]
    all_of_them.append(ours("echelon-collective", "collective", 0, given))
    for mode in ("async", "hybrid", "sync"):
        all_of_them.append(ours(f"echelon-{mode}", mode, 1, given))
    all_of_them += [
        ours("echelon-async-2-servers", "async", 2, given),
        ours("echelon-async-no-journal", "async", 1, given, "--no-journal"),
        ours("echelon-async-same-data", "async", 1, given, "--same-data"),
        ours("echelon-async-from-file", "async", 1, given, "--files", str(given.file)),
    ]
    wanted = given.only.split(",") if given.only else []
    return [c for c in all_of_them if not wanted or c.name in wanted or c.name == "bound"]


def ratio(one: Contender, other: Contender) -> float | None:
    pairs = [(a.ex_s, b.ex_s) for a, b in zip(one.runs, other.runs, strict=True) if a and b]
    return round(statistics.median(a / b for a, b in pairs), 3) if pairs else None


def by_cpu(one: Contender, other: Contender) -> float | None:
    """Return the work of one over that of the other with the same processor time."""
    pairs = [(a.cpu, b.cpu) for a, b in zip(one.runs, other.runs, strict=True) if a and b]
    return round(statistics.median(b / a for a, b in pairs), 3) if pairs else None


def summary(one: Contender, everyone: dict[str, Contender]) -> dict[str, Any]:
    runs = [run for run in one.runs if run]
    if not runs:
        return {"contender": one.name, "failed": True}
    losses = [loss for run in runs if (loss := run.mean("loss_last")) is not None]
    last = runs[-1]
    trips = {name: last.workers[0][name] for name in ("pull_ms", "push_ms") if name in last.workers[0]}
    return {
        "contender": one.name,
        "ex_s": round(statistics.median(run.ex_s for run in runs)),
        "ex_s_rounds": [run.ex_s for run in runs],
        "share_of_bound": ratio(one, everyone["bound"]),
        "times": {name: ratio(one, everyone[name]) for name in PEERS if name in everyone},
        "loss_first": last.mean("loss_first"),
        "loss_last": round(statistics.median(losses), 4) if losses else None,
        "cpu_ms": round(statistics.median(run.cpu for run in runs), 2),
        "cpu_ms_servers": last.mean("servers_cpu_ms_step"),
        "times_by_cpu": {name: by_cpu(one, everyone[name]) for name in ("bound", *PEERS) if name in everyone},
        **trips,
    }


def show(rows: list[dict[str, Any]]) -> None:
    heads = ["examples/s", "of bound", *(f"x {peer}" for peer in PEERS), "loss", "cpu ms"]
    print("\n" + " " * 26 + "".join(f"{head:>12}" for head in heads) + "   pull p50/p99, push p50/p99")
    for row in rows:
        if row.get("failed"):
            print(f"{row['contender']:26} failed")
            continue
        cells = [row["share_of_bound"], *(row["times"].get(peer) for peer in PEERS), row["loss_last"], row["cpu_ms"]]
        shown = [str(row["ex_s"]), *("-" if value is None else f"{value:.3f}" for value in cells)]
        trips = [f"{row[name]['p50']}/{row[name]['p99']} ms" for name in ("pull_ms", "push_ms") if name in row]
        print(f"{row['contender']:26}" + "".join(f"{cell:>12}" for cell in shown) + "   " + ", ".join(trips))


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Return True for each target that was reached, at the same or better loss."""
    by_name = {row["contender"]: row for row in rows if not row.get("failed")}
    lines = []
    for name, targets in TARGETS.items():
        for peer, wanted in targets.items():
            if name not in by_name or peer not in by_name:
                continue
            alike = by_name.get("echelon-async-same-data", by_name[name]) if peer == "tf" else by_name[name]
            got, losses = by_name[name]["times"][peer], (alike["loss_last"], by_name[peer]["loss_last"])
            word = "reached" if got >= wanted else "MISSED"
            lines.append(f"{name}: {got:.2f}x {peer}, wanted {wanted}x: {word}; loss {losses[0]} beside {losses[1]}")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("steps", 180), ("warmup", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="contenders by name; the bound is always there")
    parser.add_argument("--peers", type=Path, help="directory of the peers' scripts")
    parser.add_argument("--environments", type=Path, help="directory of their virtual environments; default: --peers")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.peers:
        given.peers = given.peers.resolve()
        given.environments = (given.environments or given.peers).resolve()
    return given


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="ctr-") as folder:
        given.file = Path(folder) / "day.tsv"
        race(given)


def race(given: argparse.Namespace) -> None:
    everyone = {contender.name: contender for contender in contenders(given)}
    if "echelon-async-from-file" in everyone:
        write_criteo(given.file, WORKERS)
    for turn in range(given.rounds):
        for contender in everyone.values():
            if run := contender.turn():
                cpu = f"cpu {run.cpu} ms, {run.mean('servers_cpu_ms_step')} of it servers"
                told = f"{run.ex_s:10.0f} ex/s, loss {run.mean('loss_last')}, {cpu}, {run.wall_s} s"
                print(f"round {turn} {contender.name:26} {told}", flush=True)
    rows = [summary(contender, everyone) for contender in everyone.values()]
    show(rows)
    print("\n".join(["", *verdicts(rows)]))
    if given.out:
        facts = {"what": "ctr", "cores": os.cpu_count(), "rounds": given.rounds, "steps": given.steps}
        given.out.write_text(json.dumps({**facts, "contenders": rows, "targets": verdicts(rows)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
