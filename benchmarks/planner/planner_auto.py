"""The planner's choice among all plans set by hand, each measured: ranks between hosts with slow links.

    sudo python benchmarks/planner/planner_auto.py [--layouts 2x1 2x2] [--rates 100mbit 1gbit 10gbit]
         [--models vgg transformer] [--rounds 3] [--bench FILE] [--quick] [--out results.json]

Hosts are network namespaces of this machine, as in slow_links.py; 2x2 are two hosts of two ranks, a process of one
thread each. More ranks than cores get equal parts of them, each its own whatever the others do. "By hand" is every mesh
of all ranks, with every schedule, counts of micro-batches, and levels of shard; stages are cut by arithmetic, and where
there are two also one unit to either side.
First every plan is built once and trains for a few steps at every rate; then those within a tenth of the best, and the
planner's choice, take turns for ``--rounds`` more, and the figure is the median of these. Ranks stay on a core each and
run before everything else on the machine. The planner knows of this machine what ``echelon bench`` says, and of the
network its rate; from 1gbit on, where the cores have a part in it, what the same measurement of messages and
collectives says between two hosts. All plans learn from the same batches; the losses of their first steps are compared.
Auto's choice is made as a run makes it: of the plans that it would try (``Auto.trials``, the run without a strategy
among them where that is close), each is built and trained for some steps, in ``--looks`` turns, and the one with the
least median runs. These steps count as auto's, and their seconds are told; the figures that judge it come from other
turns.
"of the best" is the best plan's step time over the choice's: at least 0.97 is wanted; "predicted alone" is the same
without trials.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.data_parallel.slow_links import Contender, ContenderFailed
from benchmarks.planner.planner_auto_choice import Answer, choose, machines
from benchmarks.planner.planner_hand import by_hand
from benchmarks.planner.planner_models import OPTIMIZER, TASKS, Task
from benchmarks.support.cpu_quota import Quotas
from benchmarks.support.network import INTERFACE, UNLIMITED, Network, bits_per_second
from echelon.base.config import build
from echelon.plan.draft import Draft
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.cluster.cluster import Cluster, Link
from echelon.planner.cluster.detect import cores
from echelon.planner.cluster.schema import LinkEntry
from echelon.planner.cost.predict import CostModel
from echelon.planner.profiling.profile import Profile, profile
from echelon.strategy import Auto
from echelon.tools.bench.fit_figures import link_figures

WORKER = Path(__file__).with_name("planner_auto_worker.py")
WANTED = 0.97
NEAR = 1.1  # times the best's step: who is measured again
MOST_FINALISTS = 6
SETTLING = 5  # steps until an engine has its memory: the first ones take up to 1.6 times as long
TURN = 0.3  # seconds of steps, about, that a plan trains for at a time
MEASURED_FROM = 1e8  # bytes/s: below, hosts have time to spare while they send
TOLERANCE = 1e-3  # how far losses may lie apart, in parts of them


@dataclasses.dataclass(frozen=True)
class Layout:
    hosts: int
    each: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        return cls(*map(int, text.split("x")))

    @property
    def ranks(self) -> int:
        return self.hosts * self.each

    def __str__(self) -> str:
        return f"{self.hosts}x{self.each}"


# ---- ranks that train with one plan after another ----


class Crew(Contender):
    """A process for each rank. Unlike its kin it trains with many plans, each built and dropped by request."""

    def __init__(self, network: Network, layout: Layout, task: str, port: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the processes
        command = [sys.executable, "-u", "-W", "ignore", str(WORKER), task]
        self._processes = [
            network.start(rank // layout.each, command, _environment(network, layout, rank, port), self._log)
            for rank in range(layout.ranks)
        ]
        self._quotas = Quotas()
        try:
            self._answers(limit=120)
            if layout.ranks > cores():
                for process in self._processes:
                    self._quotas.give(process.pid, cores() / layout.ranks)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._quotas.close()

    def ask(self, do: str, limit: float = 60, **request: Any) -> list[dict[str, Any]]:
        """Return every rank's answer; raise ContenderFailed if one has none."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
        answers = self._answers(limit)
        failed = next((answer["failed"] for answer in answers if "failed" in answer), None)
        if failed:
            raise ContenderFailed(failed)
        return answers

    def train(self, warm_up: int, steps: int) -> tuple[float, list[float]]:
        """Seconds of a step on the slowest rank, and the losses."""
        answers = self.ask("train", limit=120, warm_up=warm_up, steps=steps)
        return max(statistics.mean(answer["seconds"]) for answer in answers), answers[0]["losses"]


def _environment(network: Network, layout: Layout, rank: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.ranks),
        "LOCAL_RANK": str(rank % layout.each),
        "LOCAL_WORLD_SIZE": str(layout.each),
        "GROUP_RANK": str(rank // layout.each),
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


# ---- measuring ----


class Trial:
    """All plans of one task in one layout, at every rate."""

    def __init__(self, layout: Layout, name: str, found: Profile) -> None:
        self.layout, self.name, self.profile = layout, name, found
        self.seconds: dict[str, dict[Draft, list[float]]] = {}
        self.looks: dict[str, dict[Draft, list[float]]] = {}  # of auto's own trials
        self.spent = 0.0  # seconds of auto's own trials, at all rates
        self.losses: dict[Draft, list[float]] = {}
        self.failed: dict[Draft, str] = {}
        self._ports = itertools.count(29600)
        self._crew: Crew | None = None

    def open(self, network: Network) -> None:
        self._network = network
        self._crew = Crew(network, self.layout, self.name, next(self._ports))

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()

    def visit(self, draft: Draft, rates: list[str], look: bool = False) -> None:
        """Build it, train some steps at each of the rates, drop it. A plan that fails is not asked again.

        look: True if this is one of auto's own trials
        """
        if draft in self.failed:
            return
        begin = time.monotonic()
        try:
            self._visit(draft, rates, self.looks if look else self.seconds)
            self.spent += (time.monotonic() - begin) * look
        except (ContenderFailed, OSError) as error:
            self.failed[draft] = str(error)
            self.close()  # ranks may wait for each other: others take their place
            self.open(self._network)

    def _visit(self, draft: Draft, rates: list[str], into: dict[str, dict[Draft, list[float]]]) -> None:
        crew = self._crew
        assert crew is not None
        self._network.limit(UNLIMITED)  # to hand out weights and to connect
        saved = make_saved_plan(draft, self.profile, model=TASKS[self.name].start()[0])
        crew.ask("build", plan=json.loads(saved.to_json()))
        _, self.losses[draft] = crew.train(warm_up=SETTLING, steps=2)
        for rate in rates:
            self._network.limit(rate)
            seconds, _ = crew.train(warm_up=1, steps=1)
            if seconds < TURN:
                seconds, _ = crew.train(warm_up=0, steps=max(2, min(12, math.ceil(TURN / seconds))))
            into.setdefault(rate, {}).setdefault(draft, []).append(seconds)
        crew.ask("drop")

    def quickest(self, rate: str, answer: Answer) -> Draft:
        """Return the plan that auto runs: of its candidates, the one with the least median of its own trials."""
        found = self.looks.get(rate, {})
        tried = [draft for draft in answer.candidates if draft in found]
        return min(tried, key=lambda draft: statistics.median(found[draft]), default=answer.predicted)

    def finalists(self, rate: str, chosen: Iterable[Draft]) -> list[Draft]:
        found = {draft: seconds[0] for draft, seconds in self.seconds[rate].items()}
        best = min(found.values())
        near = [draft for draft in sorted(found, key=found.__getitem__) if found[draft] <= NEAR * best]
        return list(dict.fromkeys([*near[:MOST_FINALISTS], *(draft for draft in chosen if draft in found)]))

    def settled(self, rate: str, finalists: list[Draft]) -> dict[Draft, float]:
        """Seconds of a step: of finalists from the rounds that they had together, of others from the first look."""
        found = self.seconds[rate]
        last = {draft: statistics.median(found[draft][1:] or found[draft]) for draft in finalists if draft in found}
        return {draft: last.get(draft, seconds[0]) for draft, seconds in found.items()}

    def difference(self) -> float:
        """Return the largest relative difference of all plans' losses from the first one's, in the first steps."""
        first, *others = self.losses.values()
        return max((abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True)), default=0.0)


# ---- the verdict ----


def links(network: Network, hosts: int, rates: list[str]) -> dict[str, Link]:
    """Measure one rank per host at every rate. If bytes wait for the network alone, its rate says all."""
    crew = Crew(network, Layout(hosts, 1), next(iter(TASKS)), 29599)
    try:
        return {rate: _link(crew, network, rate) for rate in rates}
    finally:
        crew.close()


def _link(crew: Crew, network: Network, rate: str) -> Link:
    bandwidth = bits_per_second(rate) / 8
    network.limit(rate if bandwidth >= MEASURED_FROM else UNLIMITED)
    figures = link_figures(crew.ask("network", limit=120)[0], rate)
    found = build(LinkEntry, figures).on(Link(rate, 1.0, 0.0), "measured", rate)
    if bandwidth < MEASURED_FROM:
        return Link(rate, bandwidth, found.latency, origin="given", skew=found.skew)
    size, seconds = found.tables["p2p", 2][-1]
    return dataclasses.replace(found, bandwidth=min(bandwidth, size / seconds))


def pair_order(measured: list[float], foretold: list[float]) -> float:
    """Part of the pairs, of those that differ by 3 % or more, that are foretold in the right order."""
    pairs = [
        (a < b) == (c < d)
        for (a, c), (b, d) in itertools.combinations(zip(measured, foretold, strict=True), 2)
        if max(a, b) / min(a, b) >= 1.03
    ]
    return sum(pairs) / max(1, len(pairs))


# ---- one layout, one model ----


def compete(layout: Layout, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    task = TASKS[name]
    found = _profiled(task, name)
    trial = Trial(layout, name, found)
    with Network(layout.hosts) as network:
        network.acknowledge_at_once()
        try:
            if layout.hosts not in args.links:
                args.links[layout.hosts] = links(network, layout.hosts, args.rates)
            trial.open(network)
            return _competed(trial, task, args.links[layout.hosts], args)
        finally:
            trial.close()


def _competed(
    trial: Trial, task: Task, measured_links: dict[str, Link], args: argparse.Namespace
) -> list[dict[str, Any]]:
    clusters = {
        rate: machines(trial.layout.hosts, trial.layout.each, args.bench, link) for rate, link in measured_links.items()
    }
    answers = {rate: choose(trial.profile, cluster, task.rows, args.trials) for rate, cluster in clusters.items()}
    for _ in range(args.looks):
        for rate, answer in answers.items():
            for draft in answer.candidates:
                trial.visit(draft, [rate], look=True)
    chosen = {rate: trial.quickest(rate, answer) for rate, answer in answers.items()}
    own = dict.fromkeys(draft for answer in answers.values() for draft in (answer.predicted, *answer.candidates))
    drafts = list(dict.fromkeys(by_hand(trial.profile, trial.layout.ranks, task.rows)))[: args.most]
    for draft in dict.fromkeys([*drafts, *own]):
        trial.visit(draft, args.rates)
    finalists = {rate: trial.finalists(rate, (chosen[rate], answers[rate].predicted)) for rate in args.rates}
    everyone = list(dict.fromkeys(itertools.chain.from_iterable(finalists.values())))
    for turn in range(args.rounds):
        for draft in reversed(everyone) if turn % 2 else everyone:
            trial.visit(draft, [rate for rate in args.rates if draft in finalists[rate]])
    return [judged(trial, rate, answers[rate], finalists[rate], clusters[rate]) for rate in args.rates]


def _profiled(task: Task, name: str) -> Profile:
    model, _ = task.start()
    x, y = task.sample()
    return profile(model, (x, y), loss=task.loss, name=name)


def judged(trial: Trial, rate: str, answer: Answer, finalists: list[Draft], cluster: Cluster) -> dict[str, Any]:
    measured = trial.settled(rate, finalists)
    chosen, predicted = trial.quickest(rate, answer), answer.predicted
    costs = CostModel(trial.profile, cluster, optimizer=OPTIMIZER)
    foretold = {draft: costs.predict(draft, memory=False).seconds for draft in measured}
    best = min(measured, key=measured.__getitem__)
    order = sorted(measured, key=measured.__getitem__)
    errors = [abs(foretold[draft] / measured[draft] - 1) for draft in measured]
    return {
        "layout": str(trial.layout),
        "model": trial.name,
        "rate": rate,
        "plans": len(measured),
        "chosen": str(chosen),
        "chosen_cuts": chosen.cuts,
        "chosen_ms": round(1e3 * measured[chosen], 2) if chosen in measured else None,
        "best": str(best),
        "best_cuts": best.cuts,
        "best_ms": round(1e3 * measured[best], 2),
        "of_the_best": round(measured[best] / measured[chosen], 4) if chosen in measured else 0.0,
        "predicted": str(predicted),
        "predicted_alone": round(measured[best] / measured[predicted], 4) if predicted in measured else 0.0,
        "tried": [[str(d), d.cuts, [round(1e3 * s, 2) for s in each]] for d, each in trial.looks.get(rate, {}).items()],
        "trial_seconds": round(trial.spent / max(1, len(trial.looks)), 1),
        "place": 1 + order.index(chosen) if chosen in measured else None,
        "pair_order": round(pair_order(list(measured.values()), list(foretold.values())), 3),
        "mean_error": round(statistics.mean(errors), 3),
        "losses_differ_by": trial.difference(),
        "network": {"latency_us": round(1e6 * cluster.network.latency, 1), "mb_s": cluster.network.bandwidth / 1e6},
        "all": [[str(d), d.cuts, round(1e3 * measured[d], 2), round(1e3 * foretold[d], 2)] for d in order],
        "failed": {str(draft): why for draft, why in trial.failed.items()},
    }


# ---- what is told ----


def show(result: dict[str, Any], most: int = 8) -> None:
    print(f"\n{result['model']}, {result['layout']}, {result['rate']}: {result['plans']} plans")
    print(f"  {'plan':58} {'cuts':>12} {'measured ms':>11} {'foretold':>9}")
    rows = result["all"]
    for place, (words, cuts, measured, foretold) in enumerate(rows):
        is_chosen = (words, tuple(cuts)) == (result["chosen"], tuple(result["chosen_cuts"]))
        if place < most or is_chosen or place == len(rows) - 1:
            mark = "<- chosen" if is_chosen else ""
            print(f"  {words:58} {_listed(cuts):>12} {measured:11.1f} {foretold:9.1f} {mark}")
    for words, why in result["failed"].items():
        print(f"  {words}: failed: {why}")
    print(
        f"  the choice is {result['of_the_best']:.3f} of the best, place {result['place']}, after "
        f"{len(result['tried'])} trials of {result['trial_seconds']:.0f} s in all; "
        f"predicted alone {result['predicted_alone']:.3f}; "
        f"pairs in order {result['pair_order']:.0%}, mean error {result['mean_error']:.0%}; "
        f"losses {result['losses_differ_by']:.0e} apart"
    )


def _listed(cuts: tuple[int, ...]) -> str:
    return ",".join(map(str, cuts))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", type=Layout.parse, default=[Layout(2, 1), Layout(2, 2)])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3, help="of the best plans and the choice")
    parser.add_argument("--trials", type=int, default=Auto().trials, help="plans that auto measures before it runs one")
    parser.add_argument("--looks", type=int, default=2, help="turns of auto's own trials")
    parser.add_argument("--bench", type=Path, help="of 'echelon bench --procs N'; else it is measured first")
    parser.add_argument("--most", type=int, default=1000, help="measure only so many plans")
    parser.add_argument("--quick", action="store_true", help="one layout, one rate, few plans: to see that all runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.layouts, args.rates, args.rounds, args.most = args.layouts[:1], args.rates[1:2], 1, 4
    if os.geteuid() != 0:
        parser.error("making hosts needs root")
    return args


def measured_bench(ranks: int, folder: str) -> Path:
    path = Path(folder) / f"bench-{ranks}.json"
    command = [sys.executable, "-m", "echelon", "bench", "--procs", str(ranks), "--out", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return path


def keep(results: list[dict[str, Any]], begin: float, out: Path | None) -> None:
    minutes = round((time.monotonic() - begin) / 60, 1)
    told = {"cores": os.cpu_count(), "torch": torch.__version__, "minutes": minutes, "results": results}
    if out:
        out.write_text(json.dumps(told, indent=1) + "\n")


def main() -> None:
    args, begin = arguments(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # as Ctrl-C does: an orderly end
    results, given, args.links = [], args.bench, {}
    with tempfile.TemporaryDirectory() as folder:
        for layout in args.layouts:
            args.bench = given or measured_bench(layout.ranks, folder)
            for name in args.models:
                found = compete(layout, name, args)
                results += found
                for result in found:
                    show(result)
                keep(results, begin, args.out)  # the next one takes minutes
    minutes = (time.monotonic() - begin) / 60
    print(
        f"\n{'model':12} {'layout':>6} {'rate':>8} {'of the best':>12} {'predicted alone':>16} {'pairs in order':>15}"
    )
    for r in results:
        print(
            f"{r['model']:12} {r['layout']:>6} {r['rate']:>8} {r['of_the_best']:12.3f} {r['predicted_alone']:16.3f} "
            f"{r['pair_order']:15.0%}"
        )
    reached = sum(r["of_the_best"] >= WANTED for r in results)
    print(f"{reached} of {len(results)} at least {WANTED}; {os.cpu_count()} cores, {minutes:.1f} minutes")
    if any(result["losses_differ_by"] > TOLERANCE for result in results):
        sys.exit("plans have not learned the same")


if __name__ == "__main__":
    main()
