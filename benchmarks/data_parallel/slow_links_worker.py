"""One host's process of slow_links.py: trains with one contender, some steps whenever it is told to.

    python slow_links_worker.py CONTENDER MODEL        in the environment that torchrun would make

Each line of input, {"warm_up": 1, "steps": 8}, is answered by a line {"seconds": [...], "losses": [...], "sent": n}.
Only the contender's own library is imported, as they live in different virtual environments.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.data_parallel.slow_links_models import WORKS, Work, batches
from benchmarks.support.network import INTERFACE, bytes_sent

_loss = nn.functional.cross_entropy


@dataclass(frozen=True)
class Contender:
    step: Callable[[Tensor, Tensor], Tensor]
    barrier: Callable[[], object]


def hand_written(
    forward: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor, Tensor], Tensor] = _loss
) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def alone(work: Work) -> Contender:
    """Train without the other hosts: each host for itself, all at the same time."""
    model, optimizer = _start(work)
    return Contender(hand_written(model, optimizer), lambda: None)


def ddp(work: Work, hook: str | None = None) -> Contender:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    dist.init_process_group("gloo")
    model, optimizer = _start(work)
    # With several buckets the PowerSGD hook aborts on Gloo ("collective mismatch"): presumably its second exchanges,
    # which start as the first ones end, meet in another order on another host. One bucket has nothing to meet.
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000 if hook == "powersgd" else None)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Contender(hand_written(parallel, optimizer), dist.barrier)


def horovod(work: Work, compression: str = "none") -> Contender:
    import horovod.torch as hvd

    _meet_for_horovod()
    hvd.init()
    model, optimizer = _start(work)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=getattr(hvd.Compression, compression)
    )
    return Contender(hand_written(model, wrapped), hvd.barrier)


def ours(work: Work, **strategy: Any) -> Contender:
    import echelon

    echelon.init()
    model, optimizer = _start(work)
    engine = echelon.distribute(
        model,
        loss=_loss,
        optimizer=optimizer,
        strategy=echelon.Strategy(**strategy),
        log=echelon.Log(console=False),
    )
    return Contender(engine.step, echelon.barrier)


def _two_communicators(work: Work) -> Contender:
    import echelon

    return ours(work, reduction=echelon.Reduction(communicators=2))


def _dgc(work: Work, sparsity: float = 0.999) -> Contender:
    import echelon

    return ours(work, dgc=echelon.Dgc(sparsity=(sparsity,)))


def _local_sgd(work: Work) -> Contender:
    import echelon

    return ours(work, localsgd=echelon.LocalSgd(k_steps=8))


CONTENDERS: dict[str, Callable[[Work], Contender]] = {
    "alone": alone,
    "ddp": ddp,
    "ddp-fp16": lambda work: ddp(work, "fp16"),
    "powersgd": lambda work: ddp(work, "powersgd"),
    "horovod": horovod,
    "horovod-fp16": lambda work: horovod(work, "fp16"),
    "dense": ours,
    "dense-2": _two_communicators,
    "fp16": lambda work: ours(work, fp16_allreduce=True),
    "dgc": _dgc,
    "dgc-99": lambda work: _dgc(work, 0.99),
    "localsgd": _local_sgd,
}


def _start(work: Work) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = work.model()
    return model, torch.optim.SGD(model.parameters(), lr=work.lr, momentum=0.9)


def _meet_for_horovod() -> None:
    """Prepare a worker as ``horovodrun`` does: variables for each rank, and a server for their rendezvous."""
    rank, world, address = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    os.environ |= {"HOROVOD_RANK": rank, "HOROVOD_SIZE": world, "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    os.environ |= {"HOROVOD_CROSS_RANK": rank, "HOROVOD_CROSS_SIZE": world, "HOROVOD_HOSTNAME": f"host{rank}"}
    os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": INTERFACE}
    os.environ |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    # Its ranks talk even when idle; one that is stopped between its turns must not run into its timeout of 30 s.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "3600"
    if rank == "0":
        _serve_rendezvous(port, int(world))
    _wait_for(address, port)


def _serve_rendezvous(port: int, world: int) -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("", port), RendezvousHandler, 0)
    server.init(get_host_assignments(parse_hosts(",".join(f"host{i}:1" for i in range(world))), world))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _wait_for(address: str, port: int) -> None:
    for _ in range(600):
        try:
            return socket.create_connection((address, port), timeout=5).close()
        except OSError:
            time.sleep(0.1)
    sys.exit(f"nobody serves at {address}:{port}")


def main() -> None:
    # Libraries may print; only answers go to the real output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    work = WORKS[sys.argv[2]]
    data = batches(work, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in work.model().parameters())
    contender = CONTENDERS[sys.argv[1]](work)
    print(json.dumps({"parameters": parameters}), file=answers)
    for line in sys.stdin:
        print(json.dumps(turn(contender, data, **json.loads(line))), file=answers)
    os._exit(0)  # the others may be gone already: nothing to say goodbye to


def turn(contender: Contender, data: Any, warm_up: int, steps: int) -> dict[str, object]:
    losses = [contender.step(*next(data)) for _ in range(warm_up)]
    contender.barrier()
    seconds, before = [], bytes_sent()
    for _ in range(steps):
        x, y = next(data)
        begin = time.perf_counter()
        losses.append(contender.step(x, y))
        seconds.append(time.perf_counter() - begin)
    contender.barrier()
    return {"seconds": seconds, "losses": [float(loss) for loss in losses], "sent": bytes_sent() - before}


if __name__ == "__main__":
    main()
