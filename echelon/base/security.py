"""Authentication of parameter-server connections: a shared token, TLS, or certificates on both sides (mTLS).

One set of settings serves both ends. A server presents ``certificate`` and, with ``client_authority``, accepts only
clients whose certificates that authority has signed. A client with ``authority`` uses TLS and trusts only servers whose
certificates that authority has signed; it presents its own ``certificate`` if it has one.

The token is proven, never sent: see ``job_secret``.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.base.endpoints import split_endpoint
from echelon.base.environment import PS_CA, PS_CERT, PS_CLIENT_CA, PS_KEY, PS_TOKEN, PS_TOKEN_FILE
from echelon.base.errors import UsageError
from echelon.base.job_secret import find_token, refuse_short
from echelon.base.user_token import user_token


@dataclass(frozen=True)
class Security:
    """Credentials of one process. Files are PEM. The token never appears in a message or a ``repr``."""

    token: str | None = field(default=None, repr=False)
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    client_authority: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError(f"TLS needs a certificate and its key; set both {PS_CERT} and {PS_KEY}")
        if self.client_authority is not None and self.certificate is None:
            raise UsageError(
                f"{PS_CLIENT_CA} requires client certificates, but the server has no certificate itself; "
                f"set {PS_CERT} and {PS_KEY}"
            )
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise UsageError(f"a token must be printable ASCII and not empty; set another {PS_TOKEN}")

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None, *, token: str | None = None) -> Security:
        """Read the settings from the environment. ``token`` wins; the last resort is derived from the job's secret."""
        env = os.environ if env is None else env
        token = token or env.get(PS_TOKEN) or None
        if token is None and env.get(PS_TOKEN_FILE):
            token = _read(Path(env[PS_TOKEN_FILE])).decode("utf-8", "replace").strip()
        if token is not None:
            refuse_short(token, PS_TOKEN)
        if token is None and (of_job := find_token(env)) is not None:
            # A process that only serves rows needs no access to the launchers.
            token = hmac.new(of_job, b"parameter servers", "sha256").hexdigest()
        names = (PS_CERT, PS_KEY, PS_CA, PS_CLIENT_CA)
        return cls(token, *(Path(env[name]) if env.get(name) else None for name in names))

    def for_loopback(self, endpoints: Sequence[str], *, serves: bool = False) -> Security:
        """Return these credentials with this user's own token if all servers are on loopback and none was given.

        serves:  True for a server, which needs none if it asks for certificates; a client needs none if it has one
        """
        is_known = self.token is not None or (self.client_authority if serves else self.certificate) is not None
        if is_known or not endpoints or not all(is_loopback(split_endpoint(each)[0]) for each in endpoints):
            return self
        return replace(self, token=user_token())

    @property
    def proof_key(self) -> bytes:
        """The key of the proof at the start of a connection; empty without a token, which only loopback allows."""
        return (self.token or "").encode()

    def check_bind(self, host: str) -> None:
        """Raise if the server would listen on a network address without a token or client certificates."""
        if is_loopback(host) or self.token is not None or self.client_authority is not None:
            return
        raise UsageError(
            f"a server on {host} can be reached from other hosts without authentication; "
            f"set {PS_TOKEN} everywhere, or {PS_CERT}, {PS_KEY} and {PS_CLIENT_CA}, or listen on 127.0.0.1"
        )


#: No token, no TLS: for one host.
OPEN = Security()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}); it must be a PEM file or a token") from None
