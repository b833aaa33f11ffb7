"""Run the tests that make sense on a GPU, several files side by side: ``make test-gpu``.

Each file gets a pytest of its own, so that neither xdist nor another plugin is needed. ECHELON_TEST_GPU=cpu runs the
same files without a GPU.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODE = "ECHELON_TEST_GPU"
LANES = max(2, min(5, (os.cpu_count() or 1) // 3))
LIMIT = 420.0  #: seconds for one file

#: Files whose ranks train on the GPU, and those with kernels of their own for it; those that take longest first.
FILES = (
    "checkpoint/test_hybrid_state.py",
    "parallel/test_hybrid.py",
    "parallel/test_strategies.py",
    "gpu/test_gpu_engine.py",
    "engine/test_ema.py",
    "parallel/test_loss_means.py",
    "engine/test_resume.py",
    "checkpoint/test_checkpoint.py",
    "parallel/test_parity.py",
    "parallel/test_norm_classes.py",
    "parallel/test_uneven.py",
    "parallel/test_gather_batch.py",
    "gpu/test_gpu_models.py",
    "gpu/test_gpu_servers.py",
    "gpu/test_gpu_tables.py",
    "parameter_server/test_device_training.py",
    "parallel/test_evaluate.py",
    "parallel/test_batch_norm.py",
    "parallel/test_hybrid_use.py",
    "parallel/test_low_memory.py",
    "parallel/test_compress.py",
    "optim/test_optim.py",
    "parallel/test_topk.py",
    "data/test_data_device.py",
    "distributed/test_device_choice.py",
)
#: Files that compile, or look at how quick the device is: nothing else may run beside them.
ALONE = ("gpu/test_gpu_fast.py", "gpu/test_gpu_graphs.py")


@dataclass(frozen=True)
class Outcome:
    """The end of one file's pytest."""

    file: str
    code: int
    seconds: float
    output: str

    @property
    def summary(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "").strip("= ")

    @property
    def counts(self) -> Counter[str]:
        found = re.findall(r"(\d+) (passed|failed|errors?|skipped)", self.summary)
        return Counter({kind.rstrip("s") if kind == "errors" else kind: int(number) for number, kind in found})


def run_file(file: str, lanes: queue.Queue[int]) -> Outcome:
    """Run one file in a free lane, whose ports are its own."""
    lane, began = lanes.get(), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir=.", "--confcutdir=."]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_XDIST_WORKER": f"gw{lane}"}
    process = subprocess.Popen(
        [*command, f"tests/{file}"],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output = process.communicate()[0] + f"\n1 failed: not over after {LIMIT:.0f} s"
    finally:
        lanes.put(lane)
    outcome = Outcome(file, process.returncode, time.monotonic() - began, output)
    report(outcome)
    return outcome


def report(outcome: Outcome) -> None:
    """Print a line for a file that passed, and all of its output otherwise."""
    if outcome.code:
        print(outcome.output)
    print(f"{'ok' if outcome.code == 0 else 'FAILED':<6} {outcome.file}: {outcome.summary}", flush=True)


def run_files(files: tuple[str, ...], lanes: int) -> list[Outcome]:
    free: queue.Queue[int] = queue.Queue()
    for lane in range(lanes):
        free.put(lane)
    with ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(lambda file: run_file(file, free), files))


def refuse_without_gpu() -> None:
    """End with one line where torch sees no GPU, unless the CPU was asked for."""
    os.environ.setdefault(MODE, "1")
    if os.environ[MODE] == "cpu":
        return
    try:
        import torch
    except ImportError:
        sys.exit(f"test-gpu: {sys.executable} has no torch; give make GPU_PYTHON=<python with torch and a GPU>")
    if not torch.cuda.is_available():
        sys.exit(
            f"test-gpu: torch {torch.__version__} of {sys.executable} sees no GPU; give make GPU_PYTHON=<another "
            f"python>, or {MODE}=cpu to run the same tests on the CPU"
        )


def main() -> None:
    refuse_without_gpu()
    began = time.monotonic()
    chosen = [file for file in (*FILES, *ALONE) if not sys.argv[1:] or any(word in file for word in sys.argv[1:])]
    beside = tuple(file for file in chosen if file not in ALONE)
    outcomes = run_files(beside, LANES) + run_files(tuple(file for file in chosen if file in ALONE), 1)
    total = sum((outcome.counts for outcome in outcomes), Counter[str]())
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(total.items()))
    failed = [outcome.file for outcome in outcomes if outcome.code]
    print(f"test-gpu: {counts} in {len(outcomes)} files, {time.monotonic() - began:.0f} s")
    if failed or not outcomes:
        sys.exit(f"test-gpu: failed: {', '.join(failed) or 'no file has such a name'}")


if __name__ == "__main__":
    main()
