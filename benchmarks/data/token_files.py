"""Token files: tokens/s of ``echelon tokenize`` on one core, rows/s from mapped files, and the time to resume.

    python benchmarks/data/token_files.py --text corpus.txt --tokenizer tokenizer.json

The library datasets is measured beside it, in turns, where it is installed. Further figures are of a corpus of
2 * 10 ** 9 tokens in files with holes: opening it, and the first batch at token 10 ** 9. With ``--mixture`` the order
of a mixture of 20 corpora of 10 ** 9 rows each is measured instead, in processor time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from echelon.data import Loader, Mixture, TokenFiles, TokenizeOptions, tokenize_corpus

LENGTH, BATCH, ROUNDS, SECONDS = 1024, 8, 3, 2.0


def tokenized(text: Path, tokenizer: Path, folder: Path) -> dict[str, float]:
    """Return the tokens per second of one process, the same by the library alone, and those of datasets."""
    rates: dict[str, list[float]] = {"echelon tokenize": [], "the library alone": [], "datasets.map": []}
    documents = [piece for piece in text.read_text().split("\n\n") if piece.strip()]
    for number in range(ROUNDS):
        begin, out = time.perf_counter(), folder / f"tokens{number}"
        head = tokenize_corpus([text], tokenizer, out, TokenizeOptions(documents="blank", procs=1))
        rates["echelon tokenize"].append(head.tokens / (time.perf_counter() - begin))
        begin, made = time.perf_counter(), Tokenizer.from_file(str(tokenizer))
        tokens = 0
        for at in range(0, len(documents), 1000):
            encoded = made.encode_batch_fast(documents[at : at + 1000], add_special_tokens=False)
            tokens += sum(len(found.ids) for found in encoded)
        rates["the library alone"].append(tokens / (time.perf_counter() - begin))
        if importlib.util.find_spec("datasets"):
            rates["datasets.map"].append(tokens / mapped_seconds(documents, made))
    return medians(rates)


def mapped_seconds(documents: list[str], tokenizer: Any) -> float:
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    given, begin = datasets.Dataset.from_dict({"text": documents}), time.perf_counter()
    given.map(
        lambda rows: {"ids": [found.ids for found in tokenizer.encode_batch_fast(rows["text"])]},
        batched=True,
        remove_columns=["text"],
    )
    return time.perf_counter() - begin


def read(files: TokenFiles) -> dict[str, float]:
    """Return rows per second: of the loader over mapped files, and of datasets over the same rows, in Arrow files."""
    contenders: dict[str, Callable[[], Iterator[Any]]] = {"mapped": lambda: iter(loader_of(files))}
    if importlib.util.find_spec("datasets"):
        import datasets

        rows = [files[at][0].numpy() for at in range(len(files))]
        with tempfile.TemporaryDirectory() as folder:
            datasets.Dataset.from_dict({"ids": rows}).save_to_disk(folder)
            table = datasets.load_from_disk(folder).with_format("torch")
            contenders["datasets"] = lambda: iter(loader_of(table))
            return measured(contenders)
    return measured(contenders)


def loader_of(data: Any) -> Loader:
    return Loader(data, batch_size=BATCH)


def measured(contenders: dict[str, Callable[[], Iterator[Any]]]) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, start in contenders.items():
            batches, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < SECONDS:
                batches += sum(1 for _ in start())
            rates[name].append(batches * BATCH / (time.perf_counter() - begin))
    return medians(rates)


def resumed(folder: Path) -> dict[str, float]:
    """Return seconds to open 2 * 10 ** 9 tokens, and to the first batch from token 10 ** 9 on; and the memory."""
    tokens = 2 * 10**9
    (folder / "00000.tokens").touch()
    with (folder / "00000.tokens").open("r+b") as file:
        file.truncate(2 * tokens)
    np.zeros(1, "<i8").tofile(folder / "00000.documents")
    shard = {"name": "00000", "tokens": tokens, "documents": 1, "crc32": 0}
    head = {"format": "echelon tokens", "version": 1, "vocabulary": 9, "end": None, "tokenizer": "", "shards": [shard]}
    (folder / "tokens.json").write_text(json.dumps(head))
    result = {}
    for length in (LENGTH, 1):
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        loader = loader_of(TokenFiles(folder, length))
        result[f"open, rows of {length}, s"] = time.perf_counter() - begin
        begin, half = time.perf_counter(), 10**9 // length // BATCH * BATCH
        loader.load_state_dict({**loader.state_dict(), "samples": half, "position": half // BATCH})
        next(iter(loader))
        result[f"resume at token 10^9, rows of {length}, s"] = time.perf_counter() - begin
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        result[f"memory, rows of {length}, MB"] = grown / 1024
    return result


def mixed() -> dict[str, float]:
    """Return the processor time to open a mixture, to the indices at sample 10 ** 9, and for those that follow."""
    corpora: dict[str, Any] = {f"corpus {number}": range(10**9) for number in range(20)}
    begin = time.process_time()
    mixture = Mixture(corpora, [1 + number for number in range(20)])
    opened, order = time.process_time() - begin, mixture.epoch_order(seed=0, epoch=1, shuffle=True)
    begin = time.process_time()
    order.take(10**9, 10**9 + 512)
    first, begin = time.process_time() - begin, time.process_time()
    for start in range(10**9 + 512, 10**9 + 512 * 401, 512):
        order.take(start, start + 512)
    each = (time.process_time() - begin) / (400 * 512)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"open, s": opened, "at sample 10^9, s": first, "microseconds a sample": each * 1e6, "process, MB": memory}


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(each)) for name, each in rates.items() if each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--mixture", action="store_true", help="measure the order of a mixture alone")
    given = parser.parse_args()
    if given.mixture:
        print(json.dumps(mixed(), indent=1))
        return
    if given.text is None or given.tokenizer is None:
        parser.error("--text and --tokenizer are needed, or --mixture")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found: dict[str, Any] = {"tokens per second of one core": tokenized(given.text, given.tokenizer, place)}
        found[f"rows of {LENGTH} tokens per second"] = read(TokenFiles(place / "tokens0", LENGTH))
        (place / "holes").mkdir()
        found["2 * 10^9 tokens"] = resumed(place / "holes")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
