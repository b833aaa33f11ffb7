"""A real ssh server for tests, on loopback, that a real ssh client logs into with a fresh key.

A process of its own: ``python sshd.py DIRECTORY NAME ...`` writes what the client needs into the directory, says so,
and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


class Hosts:
    """Each name is a host of its own, with an address and a port. No server listens at 'nowhere'."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory), *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        #: the command that knows them
        self.ssh = shlex.join(["ssh", "-F", str(directory / "config")])

    def close(self) -> None:
        self._process.communicate(timeout=20)


async def serve(directory: Path, names: list[str]) -> None:
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(directory / "key")
    key.write_public_key(directory / "authorized")
    (directory / "key").chmod(0o600)
    entries = [_entry("nowhere", "127.0.0.1", 1)]
    for number, name in enumerate(names, 1):
        server = await asyncssh.listen(
            f"127.0.0.{number}",
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            authorized_client_keys=str(directory / "authorized"),
            process_factory=run_command,
            encoding=None,
        )
        entries.append(_entry(name, f"127.0.0.{number}", server.get_port()))
    (directory / "config").write_text("".join([*entries, _common(directory / "key")]))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def run_command(session: Any) -> None:
    """Run the command by a shell as sshd does, its streams joined to the connection for as long as that lasts."""
    pipe = asyncio.subprocess.PIPE
    shell = await asyncio.create_subprocess_shell(session.command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert shell.stdin is not None
    pouring = [
        asyncio.ensure_future(_pour(shell.stdout, session.stdout)),
        asyncio.ensure_future(_pour(shell.stderr, session.stderr)),
    ]
    feeding = asyncio.ensure_future(_feed(session.stdin, shell.stdin))
    await asyncio.gather(*pouring)
    session.exit(await shell.wait())
    feeding.cancel()


async def _pour(source: Any, sink: Any) -> None:
    while data := await source.read(4096):
        try:
            sink.write(data)
        except OSError:  # the client is gone; the command may go on talking
            continue


async def _feed(source: Any, sink: Any) -> None:
    try:
        while data := await source.read(4096):
            sink.write(data)
            await sink.drain()
    except OSError:  # a connection that broke is an end of the input, too
        pass
    finally:
        sink.close()


def _common(key: Path) -> str:
    options = [
        f"IdentityFile {key}",
        "IdentitiesOnly yes",
        "StrictHostKeyChecking no",
        "UserKnownHostsFile /dev/null",
        "LogLevel ERROR",
    ]
    return "Host *\n" + "".join(f"    {option}\n" for option in options)


def _entry(name: str, address: str, port: int) -> str:
    return f"Host {name}\n    HostName {address}\n    Port {port}\n"


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2:]))
