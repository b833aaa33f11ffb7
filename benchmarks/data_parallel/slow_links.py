"""Step time and loss of Echelon's ways to send less, beside torch's and Horovod's, between hosts with slow links.

    sudo python benchmarks/data_parallel/slow_links.py [--hosts 2,4] [--rates 100mbit,1gbit,10gbit]
         [--models vgg,compute] [--peers ddp,dense,...] [--rounds 3] [--steps 8] [--horovod-python PATH]
         [--quick] [--out results.json]

Hosts are network namespaces of this machine, one process of one thread each; they share its cores, so "alone" shows
what a step costs without the network. Contenders take turns within a round, and all others are stopped. A
turn's step time is the mean over its steps (LocalSGD's are not alike) of the slowest host; figures are medians over
rounds. All train on the same batches from the same weights; the loss is the mean of the last 5 steps over all hosts,
after the same number of steps for everyone. "sent" is what a host's interface counted in a step: with every packet's
headers below 1gbit, where the shaper sees single packets, and with one header for up to 64 KB above.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.support.network import INTERFACE, UNLIMITED, Network, bits_per_second

LOCAL_STEPS = 8  # a turn must hold whole rounds of LocalSGD
NAMES = {
    "alone": "alone (no exchange)",
    "ddp": "torch DDP",
    "ddp-fp16": "torch DDP, fp16 hook",
    "powersgd": "torch DDP, PowerSGD rank 2",
    "horovod": "Horovod",
    "horovod-fp16": "Horovod, fp16",
    "dense": "Echelon",
    "dense-2": "Echelon, 2 communicators",
    "fp16": "Echelon, fp16_allreduce",
    "dgc": "Echelon, dgc 99.9 %",
    "dgc-99": "Echelon, dgc 99 %",
    "localsgd": "Echelon, localsgd k=8",
}
#: Horovod's fp16 is run only if named.
DEFAULT_PEERS = ",".join(name for name in NAMES if name not in ("alone", "horovod-fp16"))


class ContenderFailed(Exception):
    """A contender's process ended, or said nothing for too long; the message is the end of its log."""


class Contender:
    """One process on each host, which trains only while it is this contender's turn."""

    worker = Path(__file__).with_name("slow_links_worker.py")

    def __init__(self, network: Network, name: str, model: str, port: int, python: str) -> None:
        self.name = name
        self.losses: list[float] = []
        self.seconds: dict[str, list[float]] = {}  # by rate, one figure a round
        self.sent: dict[str, float] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the processes
        command = [python, "-u", "-W", "ignore", str(self.worker), name, model]
        self._processes = [
            network.start(host, command, _environment(network, host, port), self._log)
            for host in range(len(network.addresses))
        ]
        try:
            self.parameters = int(self._answers(limit=180)[0]["parameters"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def turn(self, rate: str, warm_up: int, steps: int) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"warm_up": warm_up, "steps": steps}).encode() + b"\n")
        answers = self._answers(limit=600)
        self._signal(signal.SIGSTOP)
        self._note(rate, steps, answers)

    def _note(self, rate: str, steps: int, answers: list[dict[str, Any]]) -> None:
        self.seconds.setdefault(rate, []).append(max(sum(answer["seconds"]) for answer in answers) / steps)
        self.sent[rate] = statistics.mean(answer["sent"] for answer in answers) / steps
        self.losses += [statistics.mean(each) for each in zip(*(answer["losses"] for answer in answers), strict=True)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _answers(self, limit: float) -> list[dict[str, Any]]:
        """A line from each host; as soon as one is gone there is no point in waiting for the others."""
        waiting = {process.stdout: host for host, process in enumerate(self._processes) if process.stdout}
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise ContenderFailed(f"no answer for {limit:.0f} s; {self._last_words()}")
            for pipe in ready:
                line = pipe.readline()
                if not line:
                    raise ContenderFailed(self._last_words())
                answers[waiting.pop(pipe)] = json.loads(line)
        return [answers[host] for host in sorted(answers)]

    def _last_words(self) -> str:
        lines = self._said()
        return lines[-1] if lines else "it ended without a word"

    def _said(self) -> list[str]:
        """Without a seek: the processes write where the file stands, and some may still be writing."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace").strip().splitlines()


def _environment(network: Network, host: int, port: int) -> dict[str, str]:
    """Make the environment that torchrun makes for one process on each host."""
    return {
        **os.environ,
        "RANK": str(host),
        "WORLD_SIZE": str(len(network.addresses)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(host),
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@dataclass
class Comparison:
    """All contenders on one model between so many hosts."""

    hosts: int
    model: str
    contenders: list[Contender] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, args: argparse.Namespace) -> None:
        with Network(self.hosts) as network, contextlib.ExitStack() as stack:
            for number, name in enumerate(["alone", *args.peers]):
                python = args.horovod_python if name.startswith("horovod") else sys.executable
                with self._noting_failure(name):
                    contender = Contender(network, name, self.model, 29500 + number, python)
                    stack.callback(contender.close)
                    self.contenders.append(contender)
            self._round(UNLIMITED, 0, warm_up=3, steps=2)  # first steps allocate, connect and start PowerSGD
            for rate in args.rates:
                network.limit(rate)
                for turn in range(rounds_at(rate, args.rounds)):
                    self._round(rate, turn, warm_up=1, steps=args.steps)
                _progress(f"{self.model}, {self.hosts} hosts, {rate}: done")

    def results(self, rates: list[str]) -> list[dict[str, Any]]:
        reference = next((each for each in self.contenders if each.name == "ddp"), None)
        return [self._result(each, rate, reference) for rate in rates for each in self.contenders]

    def _round(self, rate: str, turn: int, warm_up: int, steps: int) -> None:
        for contender in list(reversed(self.contenders) if turn % 2 else self.contenders):
            with self._noting_failure(contender.name):
                contender.turn(rate, warm_up, steps)

    @contextlib.contextmanager
    def _noting_failure(self, name: str) -> Any:
        try:
            yield
        except (ContenderFailed, OSError) as error:
            self.failed[name] = str(error)
            self.contenders = [each for each in self.contenders if each.name != name]
            _progress(f"{self.model}, {self.hosts} hosts: {NAMES[name]} failed: {error}")

    def _result(self, contender: Contender, rate: str, reference: Contender | None) -> dict[str, Any]:
        seconds = contender.seconds[rate]
        ratios = [a / b for a, b in zip(reference.seconds[rate], seconds, strict=True)] if reference else []
        learns = contender.name != "alone"
        return {
            "hosts": self.hosts,
            "model": self.model,
            "parameters": contender.parameters,
            "rate": rate,
            "contender": NAMES[contender.name],
            "step_ms": round(1000 * statistics.median(seconds), 2),
            "step_ms_spread": [round(1000 * min(seconds), 2), round(1000 * max(seconds), 2)],
            "times_ddp": round(statistics.median(ratios), 3) if ratios else None,
            "times_ddp_spread": [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None,
            "sent_mb": round(contender.sent[rate] / 1e6, 3),
            "loss": round(statistics.mean(contender.losses[-5:]), 4) if learns else None,
            "steps": len(contender.losses),
        }


def rounds_at(rate: str, rounds: int) -> int:
    """Below 1 Gb/s a step takes seconds, and is steadier for it."""
    return rounds if bits_per_second(rate) >= 1e9 else max(1, rounds // 3)


def show(results: list[dict[str, Any]]) -> None:
    """One table for each model, number of hosts and rate."""
    heading = None
    for row in results:
        case = f"{row['model']} ({row['parameters'] / 1e6:.1f} M parameters), {row['hosts']} hosts, {row['rate']}"
        if case != heading:
            heading = case
            print(f"\n{case}\n  {'':28} {'step ms':>9} {'x DDP':>7} {'spread':>13} {'sent MB':>9} {'loss':>8}")
        ratio = "" if row["times_ddp"] is None else f"{row['times_ddp']:.2f}"
        spread = "" if row["times_ddp"] is None else "{:.2f}-{:.2f}".format(*row["times_ddp_spread"])
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        times = f"{row['step_ms']:9.1f} {ratio:>7} {spread:>13} {row['sent_mb']:9.3f}"
        print(f"  {row['contender']:28} {times} {loss:>8}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit", help=f"also kbit, and {UNLIMITED}")
    parser.add_argument("--models", default="vgg,compute")
    parser.add_argument("--peers", default=DEFAULT_PEERS, help="also horovod-fp16; ddp is always there")
    parser.add_argument("--rounds", type=int, default=3, help="a third of it, at least 1, below 1gbit")
    parser.add_argument("--steps", type=int, default=LOCAL_STEPS, help=f"of a turn, a multiple of {LOCAL_STEPS}")
    parser.add_argument("--horovod-python", default=os.environ.get("HOROVOD_PYTHON"), help="python that has Horovod")
    parser.add_argument("--quick", action="store_true", help="two hosts, 1gbit, vgg, one round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.hosts, args.rates, args.models, args.rounds = "2", "1gbit", "vgg", 1
    args.rates, args.models = args.rates.split(","), args.models.split(",")
    args.hosts = [int(number) for number in args.hosts.split(",")]
    args.peers = ["ddp", *(name for name in args.peers.split(",") if name != "ddp")]
    if args.horovod_python is None:
        _progress("Horovod is left out: name its python with --horovod-python or $HOROVOD_PYTHON")
        args.peers = [name for name in args.peers if not name.startswith("horovod")]
    _refuse_mistakes(parser, args)
    return args


def _refuse_mistakes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    unknown = [name for name in args.peers if name not in NAMES] + [
        name for name in args.models if name not in ("vgg", "compute")
    ]
    if unknown:
        parser.error(f"no such peer or model: {', '.join(unknown)}")
    if args.steps % LOCAL_STEPS or args.steps < LOCAL_STEPS or args.rounds < 1:
        parser.error(f"--steps must be a multiple of {LOCAL_STEPS}, --rounds at least 1")
    try:
        for rate in args.rates:
            bits_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    if os.geteuid() != 0:
        parser.error("making hosts needs root")


def main() -> None:
    args, begin = arguments(), time.monotonic()
    # Ctrl-C: an orderly end. The kernel ends our processes in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    results, failed = [], []
    for model in args.models:
        for hosts in args.hosts:
            comparison = Comparison(hosts, model)
            comparison.run(args)
            results += comparison.results(args.rates)
            failed += [
                {"hosts": hosts, "model": model, "contender": NAMES[name], "error": error}
                for name, error in comparison.failed.items()
            ]
    show(results)
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {minutes:.0f} minutes; above 1 x DDP is faster")
    if args.out:
        report = {"cores": os.cpu_count(), "torch": torch.__version__, "results": results, "failed": failed}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
