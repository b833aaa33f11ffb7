"""The secret of a job on several hosts: where it is found, and how one end of a connection proves to know it.

Either end sends a random challenge and answers the other's with an HMAC over both, so the secret itself never travels
and an answer heard once is worth nothing the next time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from echelon.environment import TOKEN, TOKEN_FILE
from echelon.errors import UsageError

GREETING = b"echelon1"
_CHALLENGE = 32
#: Seconds for a stranger to prove itself
PATIENCE = 10.0


class Stranger(Exception):
    """Who connected does not know the secret, or does not speak our language."""


def find_token(env: Mapping[str, str] | None = None) -> bytes | None:
    """The job's secret: ECHELON_TOKEN, or what the file named by ECHELON_TOKEN_FILE holds; ``None`` without either."""
    env = os.environ if env is None else env
    if text := env.get(TOKEN, ""):
        return text.encode()
    if not (path := env.get(TOKEN_FILE, "")):
        return None
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}={path} cannot be read: {error}; name a file that holds the secret") from None
    if not text:
        raise UsageError(f"{TOKEN_FILE}={path} is empty; write the job's secret into it")
    return text.encode()


def prove(connection: socket.socket, token: bytes) -> None:
    """The caller's side: show that we know the secret, and see that the one called does. Raises ``Stranger``."""
    mine = secrets.token_bytes(_CHALLENGE)
    connection.sendall(GREETING + mine)
    theirs, answer = _receive(connection, _CHALLENGE), _receive(connection, _CHALLENGE)
    if not hmac.compare_digest(answer, _answer(token, b"called", mine, theirs)):
        raise Stranger("it does not know the job's secret")
    connection.sendall(_answer(token, b"caller", mine, theirs))


def admit(connection: socket.socket, token: bytes) -> None:
    """The called one's side. Raises ``Stranger`` within ``PATIENCE`` whatever the caller does."""
    before = connection.gettimeout()
    connection.settimeout(PATIENCE)
    theirs = _receive(connection, len(GREETING) + _CHALLENGE)
    if not theirs.startswith(GREETING):
        raise Stranger("it is no part of an Echelon job")
    theirs, mine = theirs[len(GREETING) :], secrets.token_bytes(_CHALLENGE)
    connection.sendall(mine + _answer(token, b"called", theirs, mine))
    if not hmac.compare_digest(_receive(connection, _CHALLENGE), _answer(token, b"caller", theirs, mine)):
        raise Stranger("it does not know the job's secret")
    connection.settimeout(before)


def _answer(token: bytes, side: bytes, callers: bytes, called: bytes) -> bytes:
    return hmac.digest(hashlib.sha256(token).digest(), side + callers + called, "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    found = b""
    try:
        while len(found) < count:
            piece = connection.recv(count - len(found))
            if not piece:
                raise Stranger("it hung up")
            found += piece
    except OSError as error:
        raise Stranger(f"it did not answer ({error})") from None
    return found
