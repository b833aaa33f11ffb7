"""``tokenize_corpus``: tokenizes text files in several processes into a directory of token files.

The directory is written beside its place, as ``OUT.partial``, and renamed when it is complete. After an interruption
the same call keeps the shards that are complete there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from echelon.base.config import strict
from echelon.base.directory_lock import LockUse, claim, release
from echelon.base.errors import DataError, UsageError
from echelon.base.parent_death import die_with
from echelon.data.tokens.corpus import CorpusPart, Documents, corpus_files, corpus_parts, read_documents
from echelon.data.tokens.shard_writer import shard_head, write_shard, write_whole
from echelon.data.tokens.token_head import HEAD, ShardHead, TokenHead, token_dtype
from echelon.data.tokens.tokenizer_file import TokenizerFile, make_tokenizer, read_tokenizer

_PLAN = "plan.json"
_LOCK = LockUse("lock", "tokenize", "tokenizes into this directory; wait for it, or choose another --out")


@strict
class TokenizeOptions:
    """The options of ``tokenize_corpus``.

    documents: document of a text file: "file" (default), "blank" for texts between blank lines, or "line"; each line
               of a .jsonl file is one
    field:     field of a .jsonl line that holds the text
    end:       token that ends each document; default: the tokenizer's own; "" for none
    procs:     processes; default: one for each core

    >>> options = echelon.data.TokenizeOptions(documents="line", procs=4)
    """

    documents: Documents = "file"
    field: str = "text"
    end: str | None = None
    procs: int | None = None

    def __post_init__(self) -> None:
        if self.procs is not None and self.procs < 1:
            raise UsageError(f"--procs {self.procs}: expected 1 or more")

    @property
    def processes(self) -> int:
        return self.procs or len(os.sched_getaffinity(0))


def tokenize_corpus(
    corpus: Sequence[str | os.PathLike[str]],
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: TokenizeOptions | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> TokenHead:
    """Tokenize text files into the directory ``out``, and return its head.

    corpus:    .txt and .jsonl files, both also with .gz, and directories of them
    tokenizer: a ``tokenizer.json``, or a directory of transformers
    out:       directory to write; it must not exist yet, or be empty
    options:   documents, end token and processes; default: those of ``TokenizeOptions()``
    say:       called with a line about the progress

    >>> echelon.data.tokenize_corpus(["corpus.txt"], "tokenizer.json", "wiki.tokens")
    """
    options, place = options or TokenizeOptions(), Path(out)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"--out {out} exists already; remove it, or choose another name")
    read = read_tokenizer(Path(tokenizer))
    files = corpus_files(corpus)
    end = read.end_id(options.end)
    with _partial(place, say) as partial:
        parts = _planned(partial, files, options, {"tokenizer": read.sha256, "end": end})
        job = _ShardJob(partial, parts, options, end, token_dtype(read.vocabulary))
        head = TokenHead(read.vocabulary, end, read.sha256, tuple(_written(job, read, say)))
        if not any(shard.tokens for shard in head.shards):
            raise DataError(f"the corpus has no text in {len(files)} files; check the path and --field")
        _finish(partial, place, head, read)
    return head


@dataclass(frozen=True)
class _ShardJob:
    """The data that each process needs to write any of the shards."""

    partial: Path
    parts: list[CorpusPart]
    options: TokenizeOptions
    end: int | None
    dtype: np.dtype[Any]

    def name(self, number: int) -> str:
        return f"{number:05d}"

    def complete(self, number: int) -> ShardHead | None:
        """Return the head of a shard that is complete; None for another one."""
        try:
            return ShardHead(**json.loads(shard_head(self.partial, self.name(number)).read_text()))
        except FileNotFoundError:
            return None


def _written(job: _ShardJob, read: TokenizerFile, say: Callable[[str], None]) -> list[ShardHead]:
    """Write all shards that are missing, and return the heads of all."""
    heads = [job.complete(number) for number in range(len(job.parts))]
    missing = [number for number, head in enumerate(heads) if head is None]
    if len(missing) < len(heads):
        say(f"tokenize: resumed: {len(heads) - len(missing)} of {len(heads)} shards are complete")
    if missing:
        for number, head in _written_by_processes(job, read, missing):
            heads[number] = head
            done = sum(one is not None for one in heads)
            tokens = sum(one.tokens for one in heads if one is not None)
            say(f"tokenize: {done} of {len(heads)} shards, {tokens:,} tokens")
    return [head for head in heads if head is not None]


def _written_by_processes(job: _ShardJob, read: TokenizerFile, missing: list[int]) -> Iterator[tuple[int, ShardHead]]:
    processes = min(job.options.processes, len(missing))
    pool = ProcessPoolExecutor(processes, get_context("fork"), _begin_process, (job, read.text, os.getpid()))
    try:
        futures = {pool.submit(_write_one, number): number for number in missing}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenizes was killed, perhaps for lack of memory; run the same command again, with fewer "
            "--procs: complete shards are kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Process:
    """The state of a process that tokenizes."""

    job: _ShardJob
    tokenizer: Any


def _begin_process(job: _ShardJob, tokenizer: str, parent: int) -> None:
    die_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the library, beside a process for each core
    _Process.job, _Process.tokenizer = job, make_tokenizer(tokenizer)


def _write_one(number: int) -> ShardHead:
    job, tokenizer = _Process.job, _Process.tokenizer
    pieces = read_documents(job.parts[number], job.options.documents, job.options.field)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return write_shard(job.partial, job.name(number), pieces, encode, job.end, job.dtype)


@contextmanager
def _partial(place: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Lock the directory in which the files are written until they are complete."""
    partial = place.with_name(place.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {place} cannot be written: {error.strerror}; choose another") from None
    if refusal := claim(partial, _LOCK, False, say, patience=0):
        raise UsageError(f"tokenize: {refusal}")
    try:
        yield partial
    finally:
        release(partial, _LOCK)


def _planned(partial: Path, files: list[Path], options: TokenizeOptions, more: dict[str, Any]) -> list[CorpusPart]:
    """Return the parts of the corpus: those of an interrupted call with the same input, or new ones.

    The parts depend on the number of processes, and an interrupted call may be continued with another number.
    """
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = json.loads(json.dumps({"documents": options.documents, "field": options.field, "files": facts, **more}))
    plan = partial / _PLAN
    try:
        before = json.loads(plan.read_text())
    except (OSError, ValueError):
        before = {}
    if before.get("key") == key:
        return [CorpusPart(*part) for part in before["parts"]]
    for old in partial.iterdir():
        if old.name != _LOCK.file:
            old.unlink()
    parts = corpus_parts(files, options.documents, options.processes)
    write_whole(plan, json.dumps({"key": key, "parts": parts}))
    return parts


def _finish(partial: Path, place: Path, head: TokenHead, read: TokenizerFile) -> None:
    write_whole(partial / "tokenizer.json", read.text)
    write_whole(partial / HEAD, head.to_json())
    for number in range(len(head.shards)):
        shard_head(partial, f"{number:05d}").unlink(missing_ok=True)
    (partial / _PLAN).unlink(missing_ok=True)
    release(partial, _LOCK)
    partial.rename(place)
