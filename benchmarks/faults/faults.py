"""Faults between hosts, each at random moments, in each mode: the job goes on by itself to the weights of an
undisturbed run, or it ends soon and says why. Hosts are network namespaces on this machine (Linux, root).

    python benchmarks/faults/faults.py [--modes data pipeline ...] [--faults kill-rank ...] [--moments 5] [--at-once 1]
           [--out faults.json]

Two hosts train, a third stands by; all three were given the same command. Modes with parameter servers have two hosts
with a server and a worker each, without a spare host; there a launcher that was killed is started again, as the
scheduler of a cluster does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from benchmarks import ROOT
from benchmarks.faults.lossy_network import LossyNetwork
from benchmarks.support.network import Network
from echelon.distributed import rank_main

MODES = ("data", "pipeline", "split", "shard", "collective", "ps")
STEPS = 48
#: Seconds: after which a host, a rank counts as lost in these runs (both are options of the launcher), and after which
#: a job that neither ended nor went on counts as hanging.
HOST_TIMEOUT, STALL, HANGS = 8, 5, 200
PORT = 29500


@dataclass
class Outcome:
    """Result of one job."""

    mode: str
    fault: str
    moment: float
    victim: int
    ended: list[int] = field(default_factory=list)
    recovery: float | None = None
    over_after: float = 0.0
    same_weights: bool = False
    named: str = ""
    wrong: list[str] = field(default_factory=list)


class Job:
    """The same command on every host, in a directory that all see."""

    def __init__(self, network: Network, mode: str, place: Path, copies: int) -> None:
        self.network, self.mode, self.place = network, mode, place
        (place / "ckpt").mkdir(parents=True, exist_ok=True)
        self._env = os.environ | {
            "ECHELON_TOKEN": os.urandom(8).hex(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.hosts = range(2 if mode == "ps" else 3)
        self._copies = copies
        self.start_all()

    def start_all(self) -> None:
        self.launchers = [self._start(host, self._copies) for host in self.hosts]

    def start_again(self, host: int) -> None:
        """Restart a lost server as a cluster's scheduler does: the same command, where its state is."""
        self.launchers[host].wait()
        self.launchers[host] = self._start(host, copies=0)

    def _start(self, host: int, copies: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "echelon", "run", "--log-dir", str(self.place / f"log-{host}")]
        words += self._served(host) if self.mode == "ps" else self._ranks(copies)
        script = Path(__file__).with_name("faults_train.py")
        with (self.place / f"said-{host}").open("ab") as log:
            return self.network.start(
                host, [*words, str(script), self.mode, str(self.place), str(STEPS)], self._env, log, log
            )

    def _ranks(self, copies: int) -> list[str]:
        masters = ",".join(f"{address}:{PORT}" for address in self.network.addresses)
        options = {
            "--nnodes": "2:2", "--procs": 1, "--master": masters, "--copies": copies, "--stall": STALL,
            "--host-timeout": HOST_TIMEOUT, "--join-timeout": 60, "--last-call": 1, "--max-restarts": 5,
        }  # fmt: skip
        return [str(word) for pair in options.items() for word in pair]

    def _served(self, host: int) -> list[str]:
        servers = ",".join(f"{address}:{PORT}" for address in self.network.addresses[:2])
        options = {"--pservers": servers, "--trainers": 2, "--workers": 1, "--trainer-id-from": host}
        options |= {"--join-timeout": 60, "--state": self.place / f"state-{host}", "--stall": STALL}
        return [str(word) for pair in options.items() for word in pair]

    def rank_on(self, host: int) -> int:
        """The process id of the rank, or worker, that runs on a host now."""
        marker = str(self.place / f"log-{host}")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                env = (entry / "environ").read_bytes()
                if marker.encode() in words and b"\0RANK=" in env and rank_main.__file__.encode() == words[1]:
                    return int(entry.name)
        return 0

    def processes(self) -> list[int]:
        """All that belong to the job, on all hosts."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if str(self.place).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def progress(self) -> list[tuple[float, int, int]]:
        """When each step of any rank was done, and after how many restarts."""
        lines = [line.split() for path in self.place.glob("progress-*") for line in path.read_text().splitlines()]
        return [(float(line[0]), int(line[1]), int(line[2])) for line in lines if len(line) == 3]

    def step(self) -> int:
        return max((step for _, step, _ in self.progress()), default=0)

    def said(self, host: int) -> str:
        return (self.place / f"said-{host}").read_text(errors="replace")

    def hosts_in_use(self) -> list[int]:
        return [host for host in self.hosts if self.rank_on(host)]

    def over(self, without: int | None) -> bool:
        """Every launcher has ended, but for one that cannot (its host is frozen)."""
        return all(process.poll() is not None for host, process in enumerate(self.launchers) if host != without)

    def finished(self) -> bool:
        return (self.place / "final.safetensors").exists()

    def end(self) -> None:
        for process in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for _ in range(50):
            if not (left := self.processes()):
                return
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_rank(job: Job, host: int) -> None:
    os.kill(job.rank_on(host), signal.SIGKILL)


def kill_agent(job: Job, host: int) -> None:
    job.launchers[host].kill()
    if job.mode == "ps":
        job.start_again(host)


def cut_link(job: Job, host: int) -> None:
    job.network.cut(host)


def freeze_rank(job: Job, host: int) -> None:
    os.kill(job.rank_on(host), signal.SIGSTOP)


def freeze_host(job: Job, host: int) -> None:
    for pid in [job.rank_on(host), job.launchers[host].pid]:
        os.kill(pid, signal.SIGSTOP)


def fill_disk(job: Job, host: int) -> None:
    _fill(job.place / "ckpt")


def fill_state(job: Job, host: int) -> None:
    """The disk of a server's journal is full until the job has ended; then the same commands are given again."""
    _fill(job.place / f"state-{host}")
    _until(lambda: job.over(None), HANGS)
    (job.place / f"state-{host}" / "junk").unlink()
    if not job.finished():
        job.start_all()


def _fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "junk").open("wb", buffering=0) as junk:
        while True:
            junk.write(bytes(4096))


def spoil_link(job: Job, host: int) -> None:
    assert isinstance(job.network, LossyNetwork)
    job.network.spoil(host, lose=0.05, double=0.05, delay=0.01)


def corrupt_checkpoint(job: Job, host: int) -> None:
    """The newest one's largest file is damaged in the middle; then a rank dies, so that it is wanted."""
    newest = max((job.place / "ckpt").glob("step-*"), key=lambda path: path.name)
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    kill_rank(job, host)


def slow_host(job: Job, host: int) -> None:
    job.network.limit_host(host, "1mbit")


FAULTS: dict[str, Callable[[Job, int], None]] = {
    "kill-rank": kill_rank,
    "kill-agent": kill_agent,
    "cut-link": cut_link,
    "freeze-rank": freeze_rank,
    "freeze-host": freeze_host,
    "fill-disk": fill_disk,
    "corrupt-checkpoint": corrupt_checkpoint,
    "slow-host": slow_host,
    "spoil-link": spoil_link,
    "fill-state": fill_state,
}


def undisturbed(mode: str, place: Path) -> Path:
    """The weights that a run ends with when nothing happens to it."""
    with Network(3) as network:
        job = Job(network, mode, place, copies=0)
        try:
            _until(lambda: job.finished() and job.over(None), 2 * HANGS)
            assert job.finished(), "\n".join(job.said(host) for host in job.hosts)
        finally:
            job.end()
    return place / "final.safetensors"


def disturb(mode: str, fault: str, seed: int, place: Path, expected: Path) -> Outcome:
    draw = random.Random(f"{mode} {fault} {seed}")
    at, rest, victim = draw.randrange(6, STEPS - 10), draw.random() * 0.1, draw.randrange(2)
    outcome = Outcome(mode, fault, at + rest, victim)
    hosts = LossyNetwork(3) if fault == "spoil-link" else Network(3)
    small = {"fill-disk": place / "ckpt", "fill-state": place / f"state-{victim}"}.get(fault)
    with hosts as network, _small_disk(small):
        job = Job(network, mode, place, copies=int(mode not in ("ps", "collective") and fault != "corrupt-checkpoint"))
        try:
            _until(lambda: job.step() >= at or job.over(None), HANGS)
            time.sleep(rest)
            host = job.hosts_in_use()[victim] if mode != "ps" else victim
            began = time.time()
            FAULTS[fault](job, host)
            out_of_reach = host if fault == "freeze-host" else None
            outcome.wrong += [] if _until(lambda: job.over(out_of_reach), HANGS) else ["hangs"]
            outcome.over_after = time.time() - began
            again = [when for when, _, restarts in job.progress() if restarts and when > began]
            outcome.recovery = round(min(again) - began, 2) if again and job.finished() else None
            _judge(outcome, job, host, expected, out_of_reach)
        except Exception as error:  # one case that cannot be judged must not hide the others
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            job.end()
    return outcome


def _judge(outcome: Outcome, job: Job, victim: int, expected: Path, out_of_reach: int | None) -> None:
    outcome.ended = [process.poll() if process.poll() is not None else -99 for process in job.launchers]
    told = [job.said(host) for host in job.hosts] + [path.read_text() for path in job.place.glob("log-*/server-*.log")]
    lines = [line for text in told for line in text.splitlines() if line.startswith("echelon: ")]
    blamed = [line for line in lines if any(word in line for word in BLAME)]
    outcome.named = (blamed or lines or [""])[-1 if not job.finished() else 0][:300]
    if job.finished():
        outcome.same_weights = same_weights(job.place / "final.safetensors", expected)
        # servers go on without a worker that they left out, by their rule: the mean is then over the others
        as_ruled = job.mode == "ps" and any("left out" in line for line in lines)
        if not outcome.same_weights and not as_ruled:
            outcome.wrong.append("other weights than the undisturbed run")
    elif not blamed:
        outcome.wrong.append("ended without naming a cause")
    if out_of_reach is None and (left := job.processes()):
        outcome.wrong.append(f"{len(left)} processes are left")
    if outcome.fault != "corrupt-checkpoint":
        outcome.wrong += _damaged(job.place / "ckpt")


#: Words of ours that name a cause.
BLAME = (
    "because",
    "was lost",
    "killed by",
    "stall",
    "No space",
    "damaged",
    "not been heard",
    "does not answer",
    "raised",
    "left out",
)


def same_weights(found: Path, expected: Path) -> bool:
    ours, theirs = load_file(found), load_file(expected)
    return set(ours) == set(theirs) and all(ours[name].equal(theirs[name]) for name in ours)


def _damaged(directory: Path) -> list[str]:
    from echelon.checkpoint import CheckpointError, verify

    wrong = []
    for path in directory.glob("step-*"):
        try:
            verify(path)
        except CheckpointError as error:
            wrong.append(f"a checkpoint was lost: {error}")
    return wrong


@contextlib.contextmanager
def _small_disk(path: Path | None) -> Iterator[None]:
    """With room for a few checkpoints only, so that it is soon full."""
    if path is None:
        yield
        return
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def _until(holds: Callable[[], bool], limit: float) -> bool:
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _line(outcome: Outcome) -> str:
    fate = f"over after {outcome.over_after:.1f} s"
    if outcome.ended and 0 in outcome.ended:
        fate = f"went on after {outcome.recovery} s" if outcome.recovery else "went on without a restart"
    return f"{outcome.mode:9} {outcome.fault:19} {fate:26} {outcome.wrong or 'ok'}  {outcome.named}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--modes", nargs="*", default=list(MODES))
    ask.add_argument("--faults", nargs="*", default=list(FAULTS))
    ask.add_argument("--moments", type=int, default=5)
    ask.add_argument("--at-once", type=int, default=1)
    ask.add_argument("--place", type=Path)
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    place = asked.place or Path(tempfile.mkdtemp(prefix="faults-"))
    cases = [(m, f, n) for n in range(asked.moments) for f in asked.faults for m in asked.modes]
    cases = [case for case in cases if case[0] == "ps" or case[1] != "fill-state"]
    found: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(asked.at_once) as pool:
        plain = pool.map(lambda mode: undisturbed(mode, place / f"{mode}-plain"), asked.modes)
        expected = dict(zip(asked.modes, plain, strict=True))
        runs = [pool.submit(disturb, m, f, n, place / f"{m}-{f}-{n}", expected[m]) for m, f, n in cases]
        for run in concurrent.futures.as_completed(runs):
            found.append(outcome := run.result())
            fate = (
                f"went on after {outcome.recovery} s" if outcome.recovery else f"over after {outcome.over_after:.1f} s"
            )
            print(f"{outcome.mode:9} {outcome.fault:19} {fate:26} {outcome.wrong or 'ok'}  {outcome.named}", flush=True)
            if asked.out:
                asked.out.write_text(json.dumps([asdict(each) for each in found], indent=1))
    sys.exit(any(outcome.wrong for outcome in found))


if __name__ == "__main__":
    main()
