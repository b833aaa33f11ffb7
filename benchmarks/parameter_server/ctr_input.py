"""Reading click logs: rows a second of ``CtrFiles`` beside readers in plain Python and in numpy.

    python benchmarks/parameter_server/ctr_input.py [--rows 200000] [--rounds 5] [--batch 512] [--out results.json]

The file is generated: Criteo's format, label, 13 counts, 26 words of 8 hexadecimal digits, a tenth missing.
All contenders give the same tensors (ids, logarithms of the counts, label), which is checked before anything is timed.
They take turns; figures are medians over rounds, ratios medians of ratios within a round. "per core" is by processor
time, which neighbours on the machine move little. ``times_the_network`` is how much
faster a core reads than it trains the network of ``ctr.py`` when embeddings cost nothing, measured in the same rounds.

"python" is csv.reader and a hash in Python behind torch's DataLoader, as one writes it first; "numpy" splits lines with
``bytes.split`` and hashes whole columns with numpy, which is as far as one gets without a compiler.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from echelon.data import CtrFiles, Loader
from echelon.data.ctr.hashing import salt_of, text_id

SALTS = [salt_of(f"c{n}") for n in range(1, 27)]
Batch = list[torch.Tensor]


def generate(path: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for start in range(0, rows, 10_000):
            n = min(10_000, rows - start)
            label = np.where(draw.random((n, 1)) < 0.25, "1", "0")
            counts = np.floor(draw.lognormal(3, 2, (n, 13))).astype(np.int64).astype(str)
            ranks = draw.zipf(1.1, (n, 26)) * 2654435761 % 2**32
            words = np.array([f"{word:08x}" for word in ranks.ravel()]).reshape(n, 26)
            values = np.concatenate([counts, words], 1)
            values[draw.random(values.shape) < 0.1] = ""
            file.writelines("\t".join(row) + "\n" for row in np.concatenate([label, values], 1))


class Lines(IterableDataset[tuple[torch.Tensor, torch.Tensor, float]]):
    """The plain Python reader: one sample after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        with self._path.open(newline="") as file:
            for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                ids = [text_id(word or None, salt) for word, salt in zip(row[14:], SALTS, strict=True)]
                dense = [math.log1p(float(count)) if count else 0.0 for count in row[1:14]]
                yield torch.tensor(ids), torch.tensor(dense), float(row[0])


def python(path: Path, batch: int) -> Iterator[Batch]:
    for ids, dense, label in DataLoader(Lines(path), batch_size=batch):
        yield [ids, dense, label.float()]


def numpy_hash(words: NDArray[np.bytes_], salt: int) -> NDArray[np.int64]:
    """Hash like ``text_id``, for words of eight bytes at most, a column at a time."""
    length = np.char.str_len(words).astype(np.uint64)
    state = np.full(len(words), salt, np.uint64)
    state = np.where(length > 0, mix(state ^ words.astype("S8").view(np.uint64)), state)
    missing = np.int64(text_id(None, salt))
    return np.where(length > 0, mix(state + length).view(np.int64), missing)


def mix(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    h = h + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def numpy(path: Path, batch: int, lines_at_a_time: int = 16_384) -> Iterator[Batch]:
    with path.open("rb") as file:
        while lines := file.readlines(lines_at_a_time * 230):
            values = np.array([line.rstrip(b"\n").split(b"\t") for line in lines], "S8")
            ids = np.stack([numpy_hash(values[:, 14 + n], salt) for n, salt in enumerate(SALTS)], 1)
            counts = np.where(values[:, 1:14] == b"", b"0", values[:, 1:14]).astype(np.float32)
            columns = [torch.from_numpy(a) for a in (ids, np.log1p(counts), values[:, 0].astype(np.float32))]
            for start in range(0, len(lines), batch):
                yield [column[start : start + batch] for column in columns]


def echelon(path: Path, batch: int, *, shuffle: bool = False, workers: int = 1) -> Iterator[Batch]:
    return iter(Loader(CtrFiles(path, format="criteo"), batch_size=batch, shuffle=shuffle, workers=workers))


def check(contenders: dict[str, Callable[[], Iterator[Batch]]]) -> None:
    """Check that all readers return the same first rows."""
    first = {name: [torch.cat(c) for c in zip(*take(read(), 4), strict=True)] for name, read in contenders.items()}
    want = first["python"]
    for name, got in first.items():
        if "shuffled" in name:
            continue
        rows = min(len(got[0]), len(want[0]))
        assert torch.equal(got[0][:rows], want[0][:rows]), f"{name} makes other ids"
        assert torch.allclose(got[1][:rows], want[1][:rows]), f"{name} makes other numbers"
        assert torch.equal(got[2][:rows], want[2][:rows]), f"{name} makes other labels"


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    return [batch for batch, _ in zip(batches, range(count), strict=False)]


def timed(read: Callable[[], Iterator[Batch]]) -> tuple[float, float]:
    """Rows a second, by the clock and by processor time."""
    begin, used, rows = time.perf_counter(), time.process_time(), 0
    for batch in read():
        rows += len(batch[2])
    return rows / (time.perf_counter() - begin), rows / (time.process_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 200_000), ("rounds", 5), ("batch", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path, packed, short = (Path(folder) / name for name in ("day.tsv", "day.tsv.gz", "short.tsv"))
        generate(path, given.rows)
        packed.write_bytes(gzip.compress(path.read_bytes(), 6))
        generate(short, max(given.rows // 20, 1))  # the slow ones need not read it all
        results = measure(path, packed, short, given.batch, given.rounds)
        results["bytes_a_row"] = round(path.stat().st_size / given.rows)
    print(json.dumps(results, indent=1))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


def network(batch: int, steps: int = 100) -> float:
    """Examples a second and core that the network of the comparison takes, rows' gradient included."""
    from benchmarks.parameter_server.ctr_worker import bound

    return batch * 1e3 / float(bound(steps, 10)["cpu_ms_step"])


def measure(path: Path, packed: Path, short: Path, batch: int, rounds: int) -> dict[str, object]:
    contenders: dict[str, Callable[[], Iterator[Batch]]] = {
        "python": lambda: python(short, batch),
        "numpy": lambda: numpy(short, batch),
        "echelon": lambda: echelon(path, batch),
        "echelon, shuffled": lambda: echelon(path, batch, shuffle=True),
        "echelon, gzip": lambda: echelon(packed, batch),
        "echelon, 2 threads": lambda: echelon(path, batch, workers=2),
    }
    check({name: read for name, read in contenders.items() if name in ("python", "numpy")})
    check(
        {"python": lambda: python(path, batch), "echelon": contenders["echelon"], "gzip": contenders["echelon, gzip"]}
    )
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    taken = []
    for _ in range(rounds):
        taken.append(network(512))
        for name, read in contenders.items():
            rates[name].append(timed(read))
    readers = [row(name, rates, taken) for name in contenders]
    return {"what": "ctr_input", "rounds": rounds, "network": round(statistics.median(taken)), "readers": readers}


def row(name: str, rates: dict[str, list[tuple[float, float]]], network: list[float]) -> dict[str, object]:
    per_core = statistics.median(core for _, core in rates[name])
    over = [mine / plain for (_, mine), (_, plain) in zip(rates[name], rates["python"], strict=True)]
    return {
        "reader": name,
        "rows_s": round(statistics.median(clock for clock, _ in rates[name])),
        "rows_s_per_core": round(per_core),
        "times_python": round(statistics.median(over), 1),
        "times_the_network": round(
            statistics.median(core / n for (_, core), n in zip(rates[name], network, strict=True)), 1
        ),
    }


if __name__ == "__main__":
    main()
