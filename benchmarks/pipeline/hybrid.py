"""Pipelines and split heads beside data parallel between hosts with slow links, and beside torch's own pipelining.

    sudo python benchmarks/pipeline/hybrid.py a|b|c [--quick] [--cases bert,...] [--hosts 2,4]
         [--rates 100mbit,1gbit,...] [--rounds 3] [--steps 3] [--out results.json]

a: a BERT-like transformer, data parallel (torch DDP, Echelon) and as a pipeline, at one global batch
b: classification with 100,000 classes, data parallel and with the head split; with 1,000,000 under a memory limit
c: Echelon's pipelines beside torch.distributed.pipelining: the same cuts, schedules and micro-batches

Hosts are made as in slow_links.py: network namespaces of this machine, a process of one thread each, contenders taking
turns within a round. They share this machine's cores, so more hosts than cores do not compute faster. A ratio is that
of two step times of one round; figures are medians over rounds. "sent" is what a host's interface counted in a step,
the mean over hosts and the busiest one. All contenders of a case train on the same global batches from the same
weights, and their losses are compared step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.data_parallel.slow_links import Contender, ContenderFailed, rounds_at
from benchmarks.support.network import UNLIMITED, Network

NAMES = {
    "ddp": "torch DDP",
    "dp": "Echelon, data parallel",
    "split": "Echelon, split head",
    "gpipe": "Echelon, gpipe",
    "1f1b": "Echelon, 1f1b",
    "interleaved": "Echelon, interleaved",
    "zero-bubble": "Echelon, zero-bubble",
    "torch-gpipe": "torch, GPipe",
    "torch-1f1b": "torch, 1F1B",
    "torch-interleaved": "torch, Interleaved1F1B",
}
#: Largest relative difference between losses: sums of another order, and AdamW's division by small numbers.
TOLERANCE = 1e-4


class Runner(Contender):
    """A contender of this benchmark: also knows what every host sent and how much memory it had."""

    worker = Path(__file__).with_name("hybrid_worker.py")

    def __init__(self, network: Network, name: str, case: str, port: int) -> None:
        self.busiest: dict[str, float] = {}
        self.peak = 0.0
        super().__init__(network, name, case, port, sys.executable)

    def turn(self, rate: str, warm_up: int, steps: int) -> None:
        try:
            super().turn(rate, warm_up, steps)
        except BrokenPipeError:  # gone before its turn
            raise ContenderFailed(self._last_words()) from None

    def _note(self, rate: str, steps: int, answers: list[dict[str, Any]]) -> None:
        super()._note(rate, steps, answers)
        self.busiest[rate] = max(answer["sent"] for answer in answers) / steps
        self.peak = max(answer["peak"] for answer in answers)

    def _last_words(self) -> str:
        """Return the line of a host that ran out of memory, if there is one: others only say that it is gone."""
        return next((line for line in self._said() if "memory" in line.lower()), super()._last_words())


@dataclass(frozen=True)
class Setting:
    """Contenders on one case between so many hosts. ``bars``: whom each is compared with."""

    case: str
    hosts: int
    peers: tuple[str, ...]
    bars: tuple[str, ...]
    rates: tuple[str, ...]
    steps: int


@dataclass
class Race:
    """Result of a setting."""

    setting: Setting
    runners: list[Runner] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int) -> None:
        setting = self.setting
        with Network(setting.hosts) as network, contextlib.ExitStack() as stack:
            for number, name in enumerate(setting.peers):
                with self._noting_failure(name):
                    runner = Runner(network, name, setting.case, 29500 + number)
                    stack.callback(runner.close)
                    self.runners.append(runner)
            self._round(UNLIMITED, 0, warm_up=2, steps=1)  # first steps allocate, connect, and cut the model
            for runner in self.runners:
                runner.seconds.clear()
            for rate in setting.rates:
                network.limit(rate)
                for turn in range(rounds_at(rate, rounds)):
                    self._round(rate, turn, warm_up=1, steps=setting.steps)
                _progress(f"{setting.case}, {setting.hosts} hosts, {rate}: done")

    def results(self) -> dict[str, Any]:
        rows = [self._row(runner, rate) for rate in self.setting.rates for runner in self.runners]
        steps = len(self.runners[0].losses) if self.runners else 0
        return {
            "case": self.setting.case,
            "hosts": self.setting.hosts,
            "parameters": self.runners[0].parameters if self.runners else None,
            "steps": steps,
            "losses_differ_by": self.difference(),
            "last_losses": {each.name: round(each.losses[-1], 6) for each in self.runners},
            "rows": rows,
            "failed": self.failed,
        }

    def difference(self) -> float:
        """Return the largest relative difference of all contenders' losses from the first one's, at any step."""
        if len(self.runners) < 2:
            return 0.0
        first, *others = (runner.losses for runner in self.runners)
        return max(abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True))

    def _round(self, rate: str, turn: int, warm_up: int, steps: int) -> None:
        for runner in list(reversed(self.runners) if turn % 2 else self.runners):
            with self._noting_failure(runner.name):
                runner.turn(rate, warm_up, steps)

    @contextlib.contextmanager
    def _noting_failure(self, name: str) -> Any:
        try:
            yield
        except (ContenderFailed, OSError) as error:
            self.failed[name] = str(error)
            for runner in [each for each in self.runners if each.name == name]:
                runner.close()  # its other hosts' memory is wanted
                self.runners.remove(runner)
            _progress(f"{self.setting.case}, {self.setting.hosts} hosts: {NAMES[name]} failed: {error}")

    def _row(self, runner: Runner, rate: str) -> dict[str, Any]:
        seconds = runner.seconds[rate]
        bars = [each for each in self.runners if each.name in self._bars_of(runner.name)]
        ratios = {bar.name: [a / b for a, b in zip(bar.seconds[rate], seconds, strict=True)] for bar in bars}
        return {
            "rate": rate,
            "contender": runner.name,
            "step_ms": round(1000 * statistics.median(seconds), 2),
            "step_ms_spread": [round(1000 * min(seconds), 2), round(1000 * max(seconds), 2)],
            "times": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
            "times_spread": {name: [round(min(each), 3), round(max(each), 3)] for name, each in ratios.items()},
            "sent_mb": round(runner.sent[rate] / 1e6, 3),
            "busiest_sent_mb": round(runner.busiest[rate] / 1e6, 3),
            "peak_gb": round(runner.peak / 1e9, 2),
        }

    def _bars_of(self, name: str) -> tuple[str, ...]:
        """A pipeline of ours is compared with torch's of the same schedule."""
        return tuple(bar for bar in self.setting.bars if not bar.startswith("torch-") or bar == f"torch-{name}")


# ---- the three parts ----


def part_a(args: argparse.Namespace) -> list[Setting]:
    if args.quick:
        return [Setting("bert-tiny", 2, ("ddp", "dp", "1f1b", "zero-bubble"), ("dp", "ddp"), ("1gbit",), 2)]
    peers, rates = ("ddp", "dp", "1f1b", "zero-bubble"), args.rates or ("100mbit", "1gbit", "10gbit")
    found = [Setting("bert", hosts, peers, ("dp", "ddp"), rates, args.steps) for hosts in args.hosts]
    return [*found, Setting("bert-tied", 2, ("dp", "1f1b"), ("dp",), ("1gbit",), args.steps)]


def part_b(args: argparse.Namespace) -> list[Setting]:
    peers, bars = ("ddp", "dp", "split"), ("dp", "ddp")
    if args.quick:
        return [Setting("classes-1000", 4, peers, bars, ("1gbit",), 2)]
    rates = args.rates or ("1gbit", "10gbit", UNLIMITED)
    return [
        Setting("classes-100k", 4, peers, bars, rates, args.steps),
        Setting("classes-1m-limited", 4, peers, bars, (UNLIMITED,), 2),
        Setting("classes-1m", 4, ("dp", "split"), ("dp",), (UNLIMITED,), 2),
    ]


def part_c(args: argparse.Namespace) -> list[Setting]:
    schedules = ("gpipe", "1f1b", "interleaved")
    bars = tuple(f"torch-{name}" for name in schedules)
    cases, hosts = (("narrow",), (2,)) if args.quick else (("narrow", "wide"), args.hosts)
    rates = args.rates or (UNLIMITED,)
    return [Setting(case, count, (*bars, *schedules), bars, rates, args.steps) for case in cases for count in hosts]


PARTS = {"a": part_a, "b": part_b, "c": part_c}


# ---- what is told ----


def show(result: dict[str, Any]) -> None:
    """One table for each rate, and whether all have learned the same."""
    for rate in dict.fromkeys(row["rate"] for row in result["rows"]):
        millions = result["parameters"] / 1e6
        print(f"\n{result['case']} ({millions:.1f} M parameters), {result['hosts']} hosts, {rate}")
        print(f"  {'':24} {'step ms':>9} {'sent MB':>9} {'busiest':>9} {'peak GB':>8}   times as fast as")
        for row in result["rows"]:
            if row["rate"] == rate:
                print(_line(row))
    for name, error in result["failed"].items():
        print(f"  {NAMES[name]:24} failed: {error}")
    if len(result["last_losses"]) > 1:
        word = "the same" if result["losses_differ_by"] <= TOLERANCE else "DIFFERENT"
        print(f"  losses of {result['steps']} steps are {word}: at most {result['losses_differ_by']:.1e} apart")


def _line(row: dict[str, Any]) -> str:
    ratios = [
        "{} {:.2f} ({:.2f}-{:.2f})".format(NAMES[bar], ratio, *row["times_spread"][bar])
        for bar, ratio in row["times"].items()
        if bar != row["contender"]
    ]
    figures = f"{row['step_ms']:9.1f} {row['sent_mb']:9.2f} {row['busiest_sent_mb']:9.2f} {row['peak_gb']:8.2f}"
    return f"  {NAMES[row['contender']]:24} {figures}   {', '.join(ratios)}"


def _keep(path: Path, part: str, result: dict[str, Any]) -> None:
    """Beside the results of other parts and settings, in place of an earlier one of this setting."""
    report = json.loads(path.read_text()) if path.exists() else {}
    others = [
        each for each in report.get(part, []) if (each["case"], each["hosts"]) != (result["case"], result["hosts"])
    ]
    report |= {"cores": os.cpu_count(), "torch": torch.__version__, part: [*others, result]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cases", help="only these, by their names in hybrid_models.py")
    parser.add_argument("--hosts", default="2,4", help="for a and c; b has 4")
    parser.add_argument("--rates", help="such as 100mbit,1gbit,unlimited; by default what suits the part")
    parser.add_argument("--rounds", type=int, default=3, help="a third of it, at least 1, below 1gbit")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round: to see that all runs")
    parser.add_argument("--out", type=Path, help="JSON, to which the part's results are added")
    args = parser.parse_args()
    args.hosts = tuple(int(number) for number in args.hosts.split(","))
    args.rates = tuple(args.rates.split(",")) if args.rates else None
    args.rounds = 1 if args.quick else args.rounds
    if os.geteuid() != 0:
        parser.error("making hosts needs root")
    return args


def main() -> None:
    args, begin = arguments(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # as Ctrl-C does: an orderly end
    results = []
    for setting in PARTS[args.part](args):
        if args.cases and setting.case not in args.cases.split(","):
            continue
        race = Race(setting)
        race.run(args.rounds)
        results.append(race.results())
        show(results[-1])
        if args.out:
            _keep(args.out, args.part, results[-1])
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {minutes:.0f} minutes; above 1 is faster")
    if any(result["losses_differ_by"] > TOLERANCE for result in results):
        sys.exit("contenders have not learned the same")


if __name__ == "__main__":
    main()
