"""The secret of a job on several hosts: reads it, and proves it at both ends of a connection.

Each end sends a random challenge and answers the other's with an HMAC over both, so the secret itself is never sent
and a recorded answer is useless for another connection. The calling side proves first: a stranger who calls gets
nothing to try guesses of the secret on.
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

GREETING = b"echelon2"
_CHALLENGE = 32
#: Answer to a wrong proof.
REFUSED = bytes(32)
#: Fewest characters of a secret: a shorter one can be guessed from a recorded proof.
SHORTEST = 16
#: Seconds within which a connection must be authenticated
PATIENCE = 10.0


class HandshakeError(Exception):
    """The other end of a connection does not know the secret, or does not speak this protocol."""

    def __init__(self, line: str, knows_our_language: bool = False, heard: bytes = b"") -> None:
        super().__init__(line)
        self.knows_our_language, self.heard = knows_our_language, heard


def find_token(env: Mapping[str, str] | None = None) -> bytes | None:
    """Return the job's secret from ECHELON_TOKEN, or from the file that ECHELON_TOKEN_FILE names; ``None`` without."""
    env = os.environ if env is None else env
    text, origin = env.get(TOKEN, ""), TOKEN
    if not text and (path := env.get(TOKEN_FILE, "")):
        text, origin = _read(path), f"the secret in {TOKEN_FILE}={path}"
    if not text:
        return None
    if not text.isascii() or not text.isprintable():  # parameter servers send it in a header
        raise UsageError(f"{origin} must be printable ASCII without line breaks; set another secret")
    refuse_short(text, origin)
    return text.encode()


def refuse_short(secret: str, origin: str) -> None:
    """Raise ``UsageError`` for a secret that can be guessed."""
    if len(secret) < SHORTEST:
        raise UsageError(
            f"{origin} has {len(secret)} characters and could be guessed; set one of {SHORTEST} or more, for example "
            "by $(openssl rand -hex 32)"
        )


def _read(path: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}={path} cannot be read: {error}; name a file that holds the secret") from None
    if not text:
        raise UsageError(f"{TOKEN_FILE}={path} is empty; write the job's secret into it")
    return text


#: One side of the handshake: yields the bytes to send and the number of bytes to wait for; receives those bytes.
Proof = Generator[tuple[bytes, int], bytes, None]


def callers_proof(token: bytes, channel: bytes = b"") -> Proof:
    """Yield the handshake of the calling side.

    channel:  fingerprint of the TLS certificate, equal at both ends, which binds the proof to this connection
    """
    own = secrets.token_bytes(_CHALLENGE)
    greeting = yield GREETING + own, len(GREETING)
    if greeting != GREETING:
        raise HandshakeError("it answers in another protocol", heard=greeting)
    theirs = yield b"", _CHALLENGE
    answer = yield _answer(token, b"caller", own, theirs, channel), _CHALLENGE
    if not hmac.compare_digest(answer, _answer(token, b"called", own, theirs, channel)):
        raise HandshakeError("it does not know the job's secret", knows_our_language=True)


def calleds_proof(token: bytes, channel: bytes = b"") -> Proof:
    """Yield the handshake of the called side, which answers only after the caller's proof."""
    greeting = yield b"", len(GREETING)
    if greeting != GREETING:
        raise HandshakeError("it is not part of an Echelon job", heard=greeting)
    theirs = yield b"", _CHALLENGE
    own = secrets.token_bytes(_CHALLENGE)
    answer = yield GREETING + own, _CHALLENGE
    if not hmac.compare_digest(answer, _answer(token, b"caller", theirs, own, channel)):
        yield REFUSED, 0
        raise HandshakeError("it does not know the job's secret", knows_our_language=True)
    yield _answer(token, b"called", theirs, own, channel), 0


def prove(connection: socket.socket, token: bytes) -> None:
    """Prove the secret as the calling side, and check that the called side knows it.

    Raises ``HandshakeError`` within ``PATIENCE`` seconds whatever the other side does, as does ``admit``.
    """
    _converse(connection, callers_proof(token))


def admit(connection: socket.socket, token: bytes) -> None:
    """Prove the secret as the called side, and check that the calling side knows it."""
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
    """Receive ``count`` bytes. The deadline holds for all of them, so that single bytes cannot prolong the wait."""
    result = b""
    while len(result) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(result))
        if not piece:
            raise HandshakeError("it closed the connection")
        result += piece
    return result
