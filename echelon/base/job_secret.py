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
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from echelon.base.environment import TOKEN, TOKEN_FILE
from echelon.base.errors import UsageError

GREETING = b"echelon1"
_CHALLENGE = 32
#: Seconds for a stranger to prove itself
PATIENCE = 10.0


class HandshakeError(Exception):
    """Who is at the other end does not know the secret, or does not even speak our language."""

    def __init__(self, line: str, knows_our_language: bool = False) -> None:
        super().__init__(line)
        self.knows_our_language = knows_our_language


def find_token(env: Mapping[str, str] | None = None) -> bytes | None:
    """The job's secret: ECHELON_TOKEN, or what the file named by ECHELON_TOKEN_FILE holds; ``None`` without either."""
    env = os.environ if env is None else env
    text, origin = env.get(TOKEN, ""), TOKEN
    if not text and (path := env.get(TOKEN_FILE, "")):
        text, origin = _read(path), f"what {TOKEN_FILE}={path} holds"
    if not text:
        return None
    if not text.isascii() or not text.isprintable():  # as parameter servers send it in a header
        raise UsageError(f"{origin} must be printable ASCII without line breaks; set another secret")
    return text.encode()


def _read(path: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}={path} cannot be read: {error}; name a file that holds the secret") from None
    if not text:
        raise UsageError(f"{TOKEN_FILE}={path} is empty; write the job's secret into it")
    return text


#: What one side does: yields what to send and how many bytes to wait for, and is sent those bytes.
Proof = Generator[tuple[bytes, int], bytes, None]


def callers_proof(token: bytes, channel: bytes = b"") -> Proof:
    """``channel``, equal at both ends: of an encrypted connection, what tells it from one to somebody else."""
    mine = secrets.token_bytes(_CHALLENGE)
    theirs = yield GREETING + mine, _CHALLENGE
    answer = yield b"", _CHALLENGE
    if not hmac.compare_digest(answer, _answer(token, b"called", mine, theirs, channel)):
        raise HandshakeError("it does not know the job's secret", knows_our_language=True)
    yield _answer(token, b"caller", mine, theirs, channel), 0


def calleds_proof(token: bytes, channel: bytes = b"") -> Proof:
    greeting = yield b"", len(GREETING)
    if greeting != GREETING:
        raise HandshakeError("it is no part of an Echelon job")
    theirs = yield b"", _CHALLENGE
    mine = secrets.token_bytes(_CHALLENGE)
    answer = yield mine + _answer(token, b"called", theirs, mine, channel), _CHALLENGE
    if not hmac.compare_digest(answer, _answer(token, b"caller", theirs, mine, channel)):
        raise HandshakeError("it does not know the job's secret", knows_our_language=True)


def prove(connection: socket.socket, token: bytes) -> None:
    """The caller's side: show that we know the secret, and see that the one called does.

    Raises ``HandshakeError`` within ``PATIENCE`` whatever the other does, as ``admit`` does.
    """
    _converse(connection, callers_proof(token))


def admit(connection: socket.socket, token: bytes) -> None:
    """The called one's side."""
    _converse(connection, calleds_proof(token))


def _converse(connection: socket.socket, proof: Proof) -> None:
    before, deadline = connection.gettimeout(), time.monotonic() + PATIENCE
    say, wanted = next(proof)
    try:
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(say)
            say, wanted = proof.send(_receive(connection, wanted, deadline))
    except StopIteration:
        connection.settimeout(before)
    except OSError as error:
        raise HandshakeError(f"it did not answer ({error})") from None


def _answer(token: bytes, side: bytes, callers: bytes, called: bytes, channel: bytes) -> bytes:
    return hmac.digest(hashlib.sha256(token).digest(), side + callers + called + channel, "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """The deadline is for all of it: a byte now and then must not keep us waiting for ever."""
    found = b""
    while len(found) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(found))
        if not piece:
            raise HandshakeError("it hung up")
        found += piece
    return found
