"""Predict how the time of a step changes with the network, latency, memory, devices and batch."""

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

#: A function that returns the best plan for a cluster and a global batch.
Ask = Callable[[Cluster, int], SearchResult]

#: CPU seconds that all searches together may take; later cases are predicted for the chosen plan, without a search.
PATIENCE = 8.0


@dataclass(frozen=True)
class SensitivityCase:
    """A change and its description; ``cluster`` and ``batch`` have the changed values."""

    what: str
    cluster: Cluster
    batch: int


def cases(cluster: Cluster, batch: int) -> Iterator[SensitivityCase]:
    """Yield the cases that apply to the cluster: one host has no network, one device has no links."""
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
    """Return the cluster with half the latency, between hosts and inside them."""
    inside = tuple((count, Host(host.devices, host.link.faster(1.0, 0.5))) for count, host in cluster.hosts)
    return dataclasses.replace(cluster.with_(latency=0.5), hosts=inside)


@dataclass
class SensitivitySearch:
    """Searches while time is left; after that, predicts the chosen plan without a search.

    search:   returns the best plan
    same:     returns the chosen plan, with more or fewer replicas if needed
    costs:    CPU seconds of the last search
    patience: CPU seconds left for searches
    """

    search: Ask
    same: Ask
    costs: float = 0.0
    patience: float = PATIENCE

    def __call__(self, cluster: Cluster, batch: int) -> SearchResult:
        if self.costs > self.patience:
            return self.same(cluster, batch)
        begin = time.process_time()  # CPU time, not wall time: the load of the machine must not change the report
        answer = self.search(cluster, batch)
        self.costs = time.process_time() - begin
        self.patience -= self.costs
        return answer


def sensitivities(choice: PlanChoice, cluster: Cluster, ask: Ask) -> tuple[PlanAlternative, ...]:
    """Return the predicted time of a step for each case."""
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
    """Return the time of a step of the same batch on 1/4, 1/2, 1, 2 and 4 times the devices."""
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
    """Return the plan with the number of replicas that fills ``ranks``, and micro-batches of about the same size.

    The result is None if the ranks or the batch cannot be divided evenly.
    """
    replicas, left = divmod(draft.replicate * ranks, draft.ranks)
    if left or not replicas or batch % replicas:
        return None
    share = batch // replicas
    most = max(1, round(share / draft.micro_batch))
    micro_batches = next(count for count in range(min(most, share), 0, -1) if share % count == 0)
    kept = {} if replicas == draft.replicate else {"shares": (), "order": (), "shard": draft.shard * (replicas > 1)}
    return draft.replaced(batch=batch, replicate=replicas, micro_batches=micro_batches, **kept)


def resized(cluster: Cluster, times: float) -> Cluster | None:
    """Return the cluster with ``times`` the devices, or None if there is no such cluster.

    The number of hosts of each kind is multiplied. If that does not give whole numbers, and all hosts are of one kind,
    the result is one host with fewer devices.
    """
    counts = [count * times for count, _ in cluster.hosts]
    if all(count == int(count) for count in counts):
        groups = tuple((int(count), host) for count, (_, host) in zip(counts, cluster.hosts, strict=True))
        return dataclasses.replace(cluster, hosts=groups, name="")
    count, host = cluster.hosts[0]
    devices = count * len(host.devices) * times
    if len(cluster.hosts) > 1 or devices != int(devices) or devices > len(host.devices):
        return None
    return dataclasses.replace(cluster, hosts=((1, Host(host.devices[: int(devices)], host.link)),), name="")
