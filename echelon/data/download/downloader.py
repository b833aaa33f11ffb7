"""``Downloader``: downloads the files of a spec into a folder, once per host, and unpacks archives if it says so."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from echelon.base.console import say
from echelon.base.environment import CACHE_HOME, DATA_DIR
from echelon.base.errors import DataError, EchelonError, PeerLost, UsageError, one_line
from echelon.base.formatting import size as bytes_in_words
from echelon.data.download.file_download import DownloadStopped, FileFetcher, explain_os_errors
from echelon.data.download.spec import WORKINGS, Origin, RemoteFile
from echelon.data.download.url_source import is_remote, path_of
from echelon.distributed import world
from echelon.distributed.world import World

ARCHIVE = ".tar"
SPEC_ENDINGS = (".yaml", ".yml", ".json")
#: Seconds between two lines of progress.
PROGRESS_EVERY = 5.0


class Downloader:
    """Downloads the files that ``spec`` names into ``out``: complete, verified, and only those that are missing.

    spec:      a .yaml or .json file, its URL, or the same as a dict
    out:       directory to download into
    worker:    index of this worker among ``workers``; it downloads every ``workers``-th file from this index on
    workers:   number of workers that share the work
    parallel:  number of simultaneous downloads; by default the spec decides
    token_env: name of the environment variable with a token for the server (Authorization: Bearer)
    quiet:     print no progress

    >>> spec = {"base": "https://data.example.org/mnist", "files": ["labels.gz"]}
    >>> downloader = echelon.data.Downloader(spec, "data")
    """

    def __init__(
        self,
        spec: str | os.PathLike[str] | Mapping[str, Any],
        out: str | os.PathLike[str],
        *,
        worker: int = 0,
        workers: int = 1,
        parallel: int | None = None,
        token_env: str | None = None,
        quiet: bool = False,
    ) -> None:
        if not 0 <= worker < workers:
            raise UsageError(f"worker {worker} of {workers}: workers are counted from 0 to their number less one")
        if parallel is not None and not 1 <= parallel <= 256:
            raise UsageError(f"parallel={parallel}: expected 1 to 256 files at once")
        self._out, self._share = Path(out).absolute(), slice(worker, None, workers)
        self._parallel, self._quiet, self._token = parallel, quiet, _token(token_env)
        self._origin = Origin(spec)
        call = f"{self._origin.url or json.dumps(spec, default=str)} {worker} {workers}"
        self._notes = self._out / WORKINGS / f"{hashlib.sha256(call.encode()).hexdigest()[:24]}.names"

    def fetch(self) -> list[Path]:
        """Download the files, and return the paths of all of them in the order of the spec.

        In a job (after ``echelon.init()``) every rank calls it: one process of each host downloads and the others wait.
        A failure anywhere raises the same one-line error on all ranks.
        """
        job, stop = world.current() if world.is_initialized() else None, threading.Event()
        aloud = not self._quiet and (job is None or job.rank == 0)
        if job is None or job.control is None:  # no other ranks to wait for: file locks let one process download
            return [self._out / name for name in self._fetch_here(stop, aloud)]
        one_per_host(job, lambda: self._leave_names(self._fetch_here(stop, aloud)), stop)
        return [self._out / name for name in json.loads(self._notes.read_text())]

    def _fetch_here(self, stop: threading.Event, aloud: bool) -> list[str]:
        wanted = self._origin.wanted(self._token)
        files = wanted.files[self._share]
        progress = Progress(len(files), aloud)
        fetcher = FileFetcher(self._out, wanted.access, wanted.spec.retries, progress.came, stop)

        def fetch(file: RemoteFile) -> None:
            fetcher.fetch(file)
            if wanted.spec.unpack and file.name.endswith(ARCHIVE):
                with explain_os_errors(self._out):
                    unpack(self._out, file.name)
            progress.finished_one()

        _in_threads(files, fetch, self._parallel or wanted.spec.parallel, stop)
        progress.end()
        return [file.name for file in files]

    def _leave_names(self, names: list[str]) -> None:
        """Write the names for the other ranks of this host, so that they do not request the list as well."""
        draft = self._notes.with_suffix(f".{os.getpid()}")
        with explain_os_errors(self._notes):
            draft.write_text(json.dumps(names))
            draft.replace(self._notes)


def local(dataset_dir: str | os.PathLike[str], cache: Path | None = None) -> Path:
    """Return the local path of the data.

    A path is returned unchanged. For the URL of a spec (.yaml, .json) the files are downloaded, and their folder is
    returned; any other URL is one file, such as an archive: it is downloaded, not unpacked; its path is returned. In a
    job every rank calls this.
    """
    url = os.fspath(dataset_dir)
    if not is_remote(url):
        return path_of(url)
    folder = (cache or default_cache()) / hashlib.sha256(url.encode()).hexdigest()[:16]
    path = urlsplit(url).path
    if path.lower().endswith(SPEC_ENDINGS):
        Downloader(url, folder).fetch()
        return folder
    name = unquote(path).rpartition("/")[2] or "data"
    return Downloader({"files": [{"name": name, "url": url}]}, folder).fetch()[0]


def default_cache() -> Path:
    if given := os.environ.get(DATA_DIR):
        return Path(given).absolute()
    base = os.environ.get(CACHE_HOME, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "echelon" / "data"


class Progress:
    """Counts files and bytes from many threads; prints if ``aloud``."""

    def __init__(self, files: int, aloud: bool) -> None:
        self._files, self._aloud = files, aloud
        self._done = self._bytes = self._logged_bytes = 0
        self._since = self._last = time.monotonic()
        self._lock = threading.Lock()

    def came(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            if now - self._last < PROGRESS_EVERY:
                return
            speed, self._logged_bytes = (self._bytes - self._logged_bytes) / (now - self._last), self._bytes
            self._last = now
        self._say(f"{self._done} of {self._files} files, {bytes_in_words(self._bytes)}, {speed / 1e6:.1f} MB/s")

    def finished_one(self) -> None:
        with self._lock:
            self._done += 1

    def end(self) -> None:
        """Print the total, if anything was downloaded."""
        if self._bytes:
            seconds = max(time.monotonic() - self._since, 1e-9)
            fetched, speed = bytes_in_words(self._bytes), self._bytes / seconds / 1e6
            self._say(f"{self._files} files are here, {fetched} fetched in {seconds:.1f} s ({speed:.1f} MB/s)")

    def _say(self, text: str) -> None:
        if self._aloud:
            say(text, stdout=True)


def unpack(folder: Path, name: str) -> None:
    """Unpack one archive of ``folder`` into it, unless this version of it has been unpacked.

    Threads and processes take turns: archives may contain the same folders; tarfile fails if a folder appears while it
    creates it. Nothing can be written outside of the folder: tarfile's "data" filter refuses such names and links,
    devices, and setuid programs.
    """
    archive = folder / name
    known = archive.stat()
    version = f"{known.st_size} {known.st_mtime_ns}"
    note = folder / WORKINGS / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.unpacked"
    with (folder / WORKINGS / "unpacking.lock").open("a") as turn, note.open("a+") as handle:
        fcntl.flock(turn, fcntl.LOCK_EX)
        handle.seek(0)
        if handle.read() == version:
            return
        handle.truncate(0)
        _extract(archive, folder)
        handle.write(version)


def _extract(archive: Path, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise DataError(
            f"{archive} is not unpacked: Python {platform.python_version()} cannot keep an archive "
            f"within {folder}; use Python 3.11.4 or later, or unpack it by hand and set unpack to false"
        )
    try:
        with tarfile.open(archive) as opened:
            members = opened.getmembers()
            if any(Path(member.name).parts[:1] == (WORKINGS,) for member in members):
                raise DataError(f"{archive} holds '{WORKINGS}', where downloads are kept count of; rename it there")
            opened.extractall(folder, members, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive} cannot be unpacked: {one_line(error)}; is it a whole tar file?") from None


def _in_threads(
    files: Sequence[RemoteFile], fetch: Callable[[RemoteFile], None], parallel: int, stop: threading.Event
) -> None:
    """Fetch files in threads; the first failure stops the rest and is raised here."""
    waiting, taking, failures = iter(files), threading.Lock(), list[BaseException]()

    def work() -> None:
        while not stop.is_set():
            with taking:
                file = next(waiting, None)
            if file is None:
                return
            try:
                fetch(file)
            except BaseException as error:
                failures.append(error)
                stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(parallel, len(files)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        stop.set()
        raise
    if stop.is_set():
        raise next((error for error in failures if not isinstance(error, DownloadStopped)), DownloadStopped())


def _token(name: str | None) -> str:
    if name is None:
        return ""
    token = os.environ.get(name, "").strip()
    if not token or not (token.isascii() and token.isprintable()):
        found = "has characters that no token has" if token else "is not set"
        raise UsageError(f"token_env: the variable '{name}' {found} in the environment")
    return token


#: Seconds between two rounds. They are shorter than any timeout, so that a wait of hours causes none.
SHORTEST, LONGEST = 0.01, 2.0


def one_per_host(world: World, work: Callable[[], None], stop: threading.Event) -> None:
    """Run ``work`` on local rank 0 of every host; return on all ranks when all hosts are done.

    If one fails, all ranks raise its error, and ``stop`` is set for the others. The ranks exchange states in rounds
    while the work runs in a thread: a rank that died is detected within a round, not after the timeout of a collective.
    """
    from echelon.distributed.collectives import gather_json

    assert world.control is not None
    result: Future[None] = Future()
    if works := world.place.local_rank == 0:
        threading.Thread(target=_run, args=(work, result), name="echelon-download", daemon=True).start()
    pause = SHORTEST
    try:
        while True:
            own = _state(result, pause) if works else "done"
            states = gather_json(own, world.control)
            _raise_first(states, world)
            if all(state == "done" for state in states):
                return
            pause = min(pause * 1.5, LONGEST, world.timeout / 4)
    except RuntimeError as error:
        raise PeerLost(
            f"fetching data: rank {world.rank} lost contact with another rank ({one_line(error)}); look at its log"
        ) from error
    finally:
        stop.set()
        if works:
            wait([result], LONGEST)  # until the work sees ``stop``; a request that blocks ends with the process


def _run(work: Callable[[], None], result: Future[None]) -> None:
    try:
        work()
        result.set_result(None)
    except BaseException as error:  # _state() reports it to all ranks
        result.set_exception(error)


def _state(result: Future[None], patience: float) -> str | dict[str, str]:
    if not wait([result], patience).done:
        return "working"
    if (error := result.exception()) is None:
        return "done"
    kind = "usage" if isinstance(error, UsageError) else "data"
    return {kind: str(error) if isinstance(error, EchelonError) else f"{type(error).__name__}: {one_line(error)}"}


def _raise_first(states: list[str | dict[str, str]], world: World) -> None:
    for rank, state in enumerate(states):
        if isinstance(state, dict):
            ((kind, line),) = state.items()
            error = UsageError if kind == "usage" else DataError
            raise error(line if world.place.one_host else f"rank {rank}: {line}")
