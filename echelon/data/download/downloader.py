"""``Downloader``: downloads the files of a spec into a folder, once per host."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.data.download.file_download import DownloadStopped, FileFetcher, explain_os_errors
from echelon.data.download.progress import Progress
from echelon.data.download.spec import WORKINGS, RemoteFile
from echelon.data.download.spec_origin import Origin
from echelon.data.download.unpacking import ARCHIVE, unpack
from echelon.distributed import world


class Downloader:
    """Downloads the files that ``spec`` names into ``out``: complete, verified, and only those that are missing.

    spec:      a .yaml or .json file, its URL, or the same as a dict
    worker:    index of this worker among ``workers``; it downloads every ``workers``-th file from this index on
    parallel:  number of simultaneous downloads; by default the spec decides
    token_env: name of the environment variable with a token for the server (Authorization: Bearer)
    quiet:     print no progress
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
        from echelon.data.download.one_per_host import one_per_host

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

        _in_threads(files, fetch, progress, self._parallel or wanted.spec.parallel, stop)
        progress.end()
        return [file.name for file in files]

    def _leave_names(self, names: list[str]) -> None:
        """Write the names for the other ranks of this host, so that they do not request the list as well."""
        draft = self._notes.with_suffix(f".{os.getpid()}")
        with explain_os_errors(self._notes):
            draft.write_text(json.dumps(names))
            draft.replace(self._notes)


def _in_threads(
    files: Sequence[RemoteFile],
    fetch: Callable[[RemoteFile], None],
    progress: Progress,
    parallel: int,
    stop: threading.Event,
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
                progress.finished_one()
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
