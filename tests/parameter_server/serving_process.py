"""A whole parameter server in a process of its own, as 'python -m echelon.parameter_server.server.process' runs it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from harness import context


def _main(argv: list[str], env: dict[str, str], log: Path) -> None:
    from echelon.parameter_server.server.process import main

    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if most := int(env.pop("DESCRIPTORS", 0)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.update(env)
    sys.exit(main(argv))


class ServerProcess:
    """Output goes to ``log``; ``env`` is added to the environment."""

    def __init__(self, argv: list[str], log: Path, **env: str) -> None:
        self.log = log
        self._process = context.Process(target=_main, args=(argv, env, log), daemon=True)
        self._process.start()

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self._process.join()

    def terminate(self) -> int:
        os.kill(self._process.pid or 0, signal.SIGTERM)
        return self.wait()

    def rss(self) -> int:
        """Bytes of memory that it has in use."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait(self) -> int:
        """The exit code, when it has ended by itself."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()
