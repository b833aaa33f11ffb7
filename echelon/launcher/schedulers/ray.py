"""``echelon run --on ray --nnodes 2 --procs 2 train.py``: runs a launcher on each of several nodes of a Ray cluster.

A placement group reserves a bundle on each of these nodes, in which an actor runs the ordinary launcher. Launchers
meet, watch one another and restart ranks by themselves, as on any hosts. This module shows their output, forwards
signals, and replaces a launcher whose node was lost.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from echelon.base.console import say
from echelon.base.environment import TOKEN, TOKEN_FILE
from echelon.base.errors import PeerLost, UsageError
from echelon.base.job_secret import find_token
from echelon.base.network import endpoint
from echelon.base.option_checks import at_least
from echelon.base.poll_interval import PollInterval
from echelon.base.wait_notice import WaitNotice, say_wait
from echelon.launcher.log_directory import log_dir_argv
from echelon.launcher.rendezvous.host_options import host_counts
from echelon.launcher.run_options import RunOptions
from echelon.launcher.schedulers import ray_host
from echelon.launcher.schedulers.argv import rebuild_argv
from echelon.launcher.schedulers.ray_host import LauncherOutput, RayHost
from echelon.launcher.schedulers.ssh import collect_forwarded_environment

#: Options of ``run`` that this module handles and does not pass on.
OWN = ("on", "ray_address", "nnodes", "node_rank", "master", "procs", "gpus", "env")
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Seconds after which launchers have certainly detected a lost host by themselves.
_NOTICE = 45.0
#: Seconds between two checks of an elastic job for new nodes.
_LOOK = 2.0
#: Seconds for listener threads to notice that their launchers were killed.
_LAST_NEWS = 10.0


@dataclass(frozen=True)
class RayRequest:
    """The validated options of ``echelon run`` that concern the cluster."""

    address: str
    least: int
    most: int
    #: --nnodes as passed to launchers
    nnodes: str
    #: resources that each host takes of its node, and its number of processes
    bundle: Mapping[str, float]
    procs: int
    environment: Mapping[str, str]
    argv: tuple[str, ...]
    join_timeout: float
    grace: float
    #: True if a lost host is to be replaced
    replaces: bool


@dataclass
class _RayLauncher:
    """One launcher, from the request for its actor on."""

    index: int
    actor: Any
    name: str = ""
    #: ``None`` while it runs, or has not started yet; -1: its node was lost
    code: int | None = None
    replacement: bool = False
    started: threading.Event = field(default_factory=threading.Event)


def run_on_ray(context: Any, first: Callable[[], None] | None = None) -> int:
    """Run the job of ``echelon run`` on nodes of the cluster; return the job's exit code."""
    options = RunOptions(**context.params)
    _check_fit(options)
    ray = _the_library()
    _connect(ray, options.ray_address)
    try:
        request = check(context, ray.nodes())
        if first is not None:
            first()
        return RayJob(ray, request).run()
    finally:
        ray.shutdown()


def check(context: Any, nodes: list[dict[str, Any]]) -> RayRequest:
    """Return a ``RayRequest`` of the options for a cluster of these nodes; raises a one-line ``UsageError``."""
    options = RunOptions(**context.params)
    least, most, elastic = host_counts(options.nnodes)
    procs, bundle = _share_of_a_node(options, nodes)
    fitting = _nodes_with(bundle, nodes)
    if len(fitting) < least:
        wanted = ", ".join(f"{count:g} {name}" for name, count in bundle.items())
        raise UsageError(
            f"--nnodes {options.nnodes or 1} needs {least} nodes with {wanted} each, but the Ray cluster has "
            f"{len(fitting)}; add nodes, or ask for less by --procs or --gpus"
        )
    environment = collect_forwarded_environment(os.environ, options.env or [])
    environment.pop(TOKEN_FILE, None)  # the file may exist on this host only
    environment.pop(VISIBLE, None)  # Ray chooses the GPUs; without requested GPUs none are visible
    environment |= {} if "GPU" in bundle else {VISIBLE: ""}
    environment[TOKEN] = (find_token() or secrets.token_hex(16).encode()).decode()
    return RayRequest(
        address=options.ray_address or "auto",
        least=least,
        most=most,
        nnodes=elastic or str(most),
        bundle=bundle,
        procs=procs,
        environment=environment,
        argv=(*rebuild_argv(context, leave_out=OWN), *log_dir_argv(options), options.script, *(options.args or [])),
        join_timeout=options.join_timeout,
        grace=options.grace,
        replaces=bool(elastic) or bool(options.max_restarts),
    )


class RayJob:
    """The launchers of a job on Ray, watched until the last one has ended."""

    def __init__(self, ray: Any, request: RayRequest) -> None:
        self._ray, self._request = ray, request
        self._hosts: list[_RayLauncher] = []
        #: signals, and pairs of a host and its output; None in place of the output if its node is lost
        self._came: queue.SimpleQueue[signal.Signals | tuple[_RayLauncher, LauncherOutput | None]] = queue.SimpleQueue()
        self._has_asked_to_end, self._deadline = False, float("inf")
        self._group: Any = None
        self._masters = ""
        self._listeners: list[threading.Thread] = []

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle_signal)
        try:
            self._begin()
            return self._run_until_end()
        finally:
            for host in self._hosts:
                self._ray.kill(host.actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
            self._join_listeners()

    def _join_listeners(self) -> None:
        """Wait until no thread is inside Ray any more: such a thread would abort the process when Python exits."""
        deadline = time.monotonic() + _LAST_NEWS
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))

    # Start

    def _begin(self) -> None:
        least = self._request.least
        self._group = self._ray.util.placement_group([dict(self._request.bundle)] * least, strategy="STRICT_SPREAD")
        notice = WaitNotice("this command", self._request.join_timeout, component="ray", say=say_wait)
        with notice.during(lambda: f"room for {least} hosts in the Ray cluster"):
            has_room = self._group.wait(self._request.join_timeout)
        if not has_room:
            raise PeerLost(
                f"the Ray cluster had no room for {least} hosts within {self._request.join_timeout:g} s; "
                "wait for other jobs to end, or give --join-timeout"
            )
        hosts = [self._host_in_bundle(index) for index in range(least)]
        found = self._ray.get([host.actor.master_endpoint.remote() for host in hosts[:2]])
        places = [endpoint(*place) for place in found]
        self._masters = ",".join(places if self._request.replaces else places[:1])
        for host in hosts:
            self._start(host)

    def _host_in_bundle(self, index: int, replacement: bool = False) -> _RayLauncher:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        return self._new_host(index, strategy, replacement)

    def _new_host(self, index: int, strategy: Any, replacement: bool) -> _RayLauncher:
        share = {name.lower(): count for name, count in self._request.bundle.items()}
        actor = self._ray.remote(RayHost).options(
            num_cpus=share["cpu"], num_gpus=share.get("gpu", 0), scheduling_strategy=strategy, max_concurrency=4
        )
        host = _RayLauncher(index, actor.remote(), replacement=replacement)
        self._hosts.append(host)
        return host

    def _start(self, host: _RayLauncher) -> None:
        """Send the launcher's arguments; the call waits in Ray until the actor's node is available."""
        own = ["--nnodes", self._request.nnodes, "--procs", str(self._request.procs), "--master", self._masters]
        if self._request.most == 1:
            own = own[:4]
        elif not host.replacement:  # the coordinator finds the place of a replacement
            own += ["--node-rank", str(host.index)]
        argv = [*own, *self._request.argv]
        host.actor.start.remote(argv, os.getcwd(), dict(self._request.environment))
        self._listeners.append(threading.Thread(target=self._listen, args=(host,), daemon=True))
        self._listeners[-1].start()

    def _listen(self, host: _RayLauncher) -> None:
        """Receive the output of one host until it has ended; runs in a thread per host."""
        while True:
            try:
                news = self._ray.get(host.actor.news.remote())
            except Exception:  # Ray has many errors for it: the actor or its node is lost, or this job is shutting down
                self._came.put((host, None))
                return
            self._came.put((host, news))
            if news.code is not None:
                return

    # Watch

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._came.put(signal.Signals(number))

    def _run_until_end(self) -> int:
        interval = PollInterval(_LOOK, time.monotonic())
        while self._running():
            try:
                came = self._came.get(timeout=0.5)
            except queue.Empty:
                pass
            else:
                self._hand_on(came) if isinstance(came, signal.Signals) else self._handle_output(*came)
            if time.monotonic() > self._deadline:
                break
            if interval.due():
                self._take_in_new_nodes()
        return self._code()

    def _running(self) -> bool:
        """Return True if a launcher runs; replacements that have not started are awaited by the running ones."""
        return any(host.code is None and (host.started.is_set() or not host.replacement) for host in self._hosts)

    def _hand_on(self, number: signal.Signals) -> None:
        """Forward a signal to every launcher; after a second one, end without waiting."""
        self._deadline = time.monotonic() + (0.0 if self._has_asked_to_end else self._request.grace + _NOTICE)
        self._has_asked_to_end = True
        for host in self._hosts:
            if host.code is None:
                host.actor.forward_signal.remote(number.name)

    def _handle_output(self, host: _RayLauncher, news: LauncherOutput | None) -> None:
        host.started.set()
        if news is None:
            self._lose(host)
            return
        host.name = news.node
        for stream, line in news.lines:
            where = sys.stdout if stream == "out" else sys.stderr
            where.write(line if host.index == 0 else f"[{host.name}] {line}")
            where.flush()
        if news.code is not None:
            host.code = news.code
            if news.code:  # the whole job has failed, and the other launchers end too
                self._deadline = min(self._deadline, time.monotonic() + self._request.grace + _NOTICE)

    def _lose(self, host: _RayLauncher) -> None:
        host.code = -1
        again = self._request.replaces and not self._has_asked_to_end and any(one.code is None for one in self._hosts)
        then = "; another node replaces it as soon as the cluster has one" if again else ""
        say(f"the Ray node of host {host.index} ({host.name or 'not started yet'}) was lost{then}")
        if again and host.index < self._request.least:
            self._start(self._host_in_bundle(host.index, replacement=True))

    def _take_in_new_nodes(self) -> None:
        """Start a host on a node that has none, beyond the placement group, up to the maximum; for elastic jobs."""
        living = [host for host in self._hosts if host.code is None]
        if self._has_asked_to_end or len(living) >= self._request.most or self._request.least == self._request.most:
            return
        taken = {host.name.partition("/")[2] for host in living}
        for node in _nodes_with(self._request.bundle, self._ray.nodes()):
            if node["NodeID"][:8] not in taken and all(host.name for host in living):
                affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], False)
                self._start(self._new_host(len(self._hosts), affinity, replacement=True))
                return

    def _code(self) -> int:
        """Return the first failure's code, unless a host finished an elastic job; 1 if a host stays lost; else 0."""
        codes = [host.code for host in self._hosts if host.code is not None and host.code >= 0]
        lost_for_good = any(host.code == -1 for host in self._hosts) and not self._request.replaces
        failed = [code for code in codes if code]
        if failed and not (self._request.nnodes.count(":") and 0 in codes):
            return failed[0]
        return 1 if not codes or lost_for_good else 0


def _the_library() -> Any:
    try:
        import ray
        import ray.cloudpickle
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError:
        raise UsageError("--on ray needs ray: pip install 'echelon[ray]'") from None
    ray.cloudpickle.register_pickle_by_value(ray_host)  # by reference, actors would import the whole package
    return ray


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        requested = f"no Ray cluster at --ray-address {address}" if address else "no Ray cluster is running here"
        line = " ".join(str(error).split())[:120]
        raise UsageError(f"{requested} ({line}); start one by 'ray start --head', or give --ray-address") from None


def _check_fit(options: RunOptions) -> None:
    if options.on != "ray":
        raise UsageError(f"--on {options.on}: the only known cluster is ray; write --on ray, or leave --on out")
    for name in ("node_rank", "master", "hosts", "hostfile"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} chooses hosts; with --on ray, Ray chooses them: leave it out")
    if options.servers is not None or options.pservers is not None:
        raise UsageError("--on ray starts jobs without parameter servers; leave --servers and --pservers out")
    if options.gpus is not None and not options.gpus.isdigit():
        raise UsageError(
            f"--gpus {options.gpus} names GPUs; with --on ray, Ray chooses them: give their number on each host"
        )


def _share_of_a_node(options: RunOptions, nodes: list[dict[str, Any]]) -> tuple[int, dict[str, float]]:
    """Return the processes of each host, and their resources: one CPU each and, if requested, GPUs.

    The default is the smallest number of GPUs of a node that has any; one process if there are none.
    """
    gpus = int(options.gpus) if options.gpus is not None else None
    if gpus is None and options.procs is None:
        gpus = int(min((node["Resources"]["GPU"] for node in _nodes_with({"GPU": 1}, nodes)), default=0))
    procs = options.procs if options.procs is not None else gpus or 1
    at_least(1, "--procs", procs)
    return procs, {"CPU": float(procs)} | ({"GPU": float(gpus)} if gpus else {})


def _nodes_with(bundle: Mapping[str, float], nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        node
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0) >= count for name, count in bundle.items())
    ]
