"""What would be on another cluster: how a step's time answers to its network, memory, devices and batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from echelon.base.formatting import percent
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, Host
from echelon.planner.plan_search.search_result import PlanChoice, SearchResult
from echelon.tools.plan_report.report_data import PlanAlternative, ScalingPoint

#: Searches for the best plan of a batch on a cluster.
Ask = Callable[[Cluster, int], SearchResult]

#: Seconds of computing that searches for all these answers may take; the rest is answered for the plan there is.
PATIENCE = 8.0


@dataclass(frozen=True)
class SensitivityCase:
    """What is changed: ``cluster`` and ``batch`` are as they would be then."""

    what: str
    cluster: Cluster
    batch: int


def cases(cluster: Cluster, batch: int) -> Iterator[SensitivityCase]:
    """The questions that make sense: one host has no network, one device has nobody to talk to."""
    if cluster.host_count > 1:
        yield SensitivityCase("twice the network", cluster.with_(network=2.0), batch)
    if any(len(host.devices) > 1 for _, host in cluster.hosts):
        yield SensitivityCase("twice the links inside hosts", cluster.with_(link=2.0), batch)
    if cluster.size > 1:
        yield SensitivityCase("half the latency", half_latency(cluster), batch)
    yield SensitivityCase("devices with 1.5x the memory", cluster.with_(memory=1.5), batch)
    yield SensitivityCase("devices that compute twice as fast", cluster.with_(speed=2.0), batch)
    yield SensitivityCase("twice the devices", cluster.with_(hosts=2 * cluster.host_count), batch)
    if batch > 1:
        yield SensitivityCase("half the batch", cluster, batch // 2)


def half_latency(cluster: Cluster) -> Cluster:
    """Between hosts, and inside them."""
    inside = tuple((count, Host(host.devices, host.link.faster(1.0, 0.5))) for count, host in cluster.hosts)
    return dataclasses.replace(cluster.with_(latency=0.5), hosts=inside)


@dataclass
class SensitivitySearch:
    """Searches, as long as that is quick enough; then asks how the plan there is would do.

    search: the best plan of all
    same:   the same plan, spread over more or fewer replicas where it has to be
    costs:  seconds of a search, as far as is known
    """

    search: Ask
    same: Ask
    costs: float = 0.0
    patience: float = PATIENCE

    def __call__(self, cluster: Cluster, batch: int) -> SearchResult:
        if self.costs > self.patience:
            return self.same(cluster, batch)
        begin = time.process_time()  # not by the clock: a busy machine changes no answer
        answer = self.search(cluster, batch)
        self.costs = time.process_time() - begin
        self.patience -= self.costs
        return answer


def sensitivities(choice: PlanChoice, cluster: Cluster, ask: Ask) -> tuple[PlanAlternative, ...]:
    """How long a step then takes."""
    batch = choice.draft.batch
    return tuple(_remark(case, choice, ask(case.cluster, case.batch)) for case in cases(cluster, batch))


def _remark(case: SensitivityCase, choice: PlanChoice, answer: SearchResult) -> PlanAlternative:
    if not answer.best:
        return PlanAlternative(
            case.what, None, None, answer.nearest.reason if answer.nearest else "another plan would be needed"
        )
    best = answer.best[0]
    why = ""
    if case.batch != choice.draft.batch:
        a_sample = (best.seconds / case.batch) / (choice.seconds / choice.draft.batch) - 1
        why = f"{percent(a_sample, signed=True)} for each sample"
    plan = "the same plan" if best.draft == choice.draft else str(best.draft)
    return PlanAlternative(case.what, best.seconds, best.seconds / choice.seconds - 1, why, plan)


def sizes(choice: PlanChoice, cluster: Cluster, ask: Ask) -> tuple[ScalingPoint, ...]:
    """The same batch on a quarter, half, twice and four times the devices."""
    found = []
    for times in (0.25, 0.5, 1.0, 2.0, 4.0):
        other = resized(cluster, times)
        if times == 1.0:
            found.append(ScalingPoint(cluster.size, choice.seconds, str(choice.draft)))
        elif other is not None:
            best = next(iter(ask(other, choice.draft.batch).best), None)
            found.append(ScalingPoint(other.size, best.seconds if best else None, str(best.draft) if best else ""))
    return tuple(found)


def spread(draft: Draft, ranks: int, batch: int) -> Draft | None:
    """The same plan with as many replicas as there are devices for, and micro-batches of the same size; None where
    that does not come out even."""
    replicas, left = divmod(draft.replicate * ranks, draft.ranks)
    if left or not replicas or batch % replicas:
        return None
    share = batch // replicas
    most = max(1, round(share / draft.micro_batch))
    micro_batches = next(count for count in range(min(most, share), 0, -1) if share % count == 0)
    kept = {} if replicas == draft.replicate else {"shares": (), "order": (), "shard": draft.shard * (replicas > 1)}
    return draft.replaced(batch=batch, replicate=replicas, micro_batches=micro_batches, **kept)


def resized(cluster: Cluster, times: float) -> Cluster | None:
    """So many times the devices: of each kind of host so many, or where there is one, of its devices. None: it has
    no such part."""
    counts = [count * times for count, _ in cluster.hosts]
    if all(count == int(count) for count in counts):
        groups = tuple((int(count), host) for count, (_, host) in zip(counts, cluster.hosts, strict=True))
        return dataclasses.replace(cluster, hosts=groups, name="")
    count, host = cluster.hosts[0]
    devices = count * len(host.devices) * times
    if len(cluster.hosts) > 1 or devices != int(devices) or devices > len(host.devices):
        return None
    return dataclasses.replace(cluster, hosts=((1, Host(host.devices[: int(devices)], host.link)),), name="")
