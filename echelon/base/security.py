"""Authentication of parameter-server connections: a shared token, TLS, or certificates on both sides (mTLS).

One set of settings serves both ends. A server presents ``certificate`` and, with ``client_authority``, accepts only
clients whose certificates that authority has signed. A client with ``authority`` uses TLS and trusts only servers whose
certificates that authority has signed; it presents its own ``certificate`` if it has one.

A token protects the data. It does not prevent strangers from making gRPC receive a large message before the token is
checked; on a network where that matters use client certificates, which are checked before any message.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.base.environment import PS_CA, PS_CERT, PS_CLIENT_CA, PS_KEY, PS_TOKEN, PS_TOKEN_FILE
from echelon.base.errors import UsageError
from echelon.base.job_secret import find_token

#: The HTTP header that carries the token.
HEADER, SCHEME = "authorization", "Bearer "


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
        if token is None and (of_job := find_token(env)) is not None:
            # Without TLS the token can be overheard, so it must not reveal the job's secret.
            token = hmac.new(of_job, b"parameter servers", "sha256").hexdigest()
        names = (PS_CERT, PS_KEY, PS_CA, PS_CLIENT_CA)
        return cls(token, *(Path(env[name]) if env.get(name) else None for name in names))

    def admits(self, headers: Mapping[str, list[str | bytes]]) -> bool:
        """Return True if a call with these headers carries the token. A wrong token always takes the same time."""
        if self.token is None:
            return True
        shown = [value for name, values in headers.items() if name.lower() == HEADER for value in values]
        first = shown[0] if shown else ""
        return hmac.compare_digest(
            first if isinstance(first, bytes) else first.encode("utf-8", "replace"), (SCHEME + self.token).encode()
        )

    def check_bind(self, host: str) -> None:
        """Raise if the server would listen on a network address without a token or client certificates."""
        if is_loopback(host) or self.token is not None or self.client_authority is not None:
            return
        raise UsageError(
            f"a server on {host} can be reached from other hosts without authentication; "
            f"set {PS_TOKEN} everywhere, or {PS_CERT}, {PS_KEY} and {PS_CLIENT_CA}, or listen on 127.0.0.1"
        )

    def server_location(self, host: str, port: int) -> str:
        return f"grpc+{'tls' if self.certificate else 'tcp'}://{host}:{port}"

    def server_options(self) -> dict[str, Any]:
        """Return the keyword arguments of a Flight server."""
        if self.certificate is None or self.key is None:
            return {}
        options: dict[str, Any] = {"tls_certificates": [(_read(self.certificate), _read(self.key))]}
        if self.client_authority is not None:
            options |= {"verify_client": True, "root_certificates": _read(self.client_authority)}
        return options

    def client_location(self, endpoint: str) -> str:
        return f"grpc+{'tls' if self.authority else 'tcp'}://{endpoint}"

    def client_options(self) -> dict[str, Any]:
        """Return the keyword arguments of a Flight client."""
        if self.authority is None:
            return {}
        options: dict[str, Any] = {"tls_root_certs": _read(self.authority)}
        if self.certificate is not None and self.key is not None:
            options |= {"cert_chain": _read(self.certificate), "private_key": _read(self.key)}
        return options

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that a client sends with every call."""
        return [(HEADER.encode(), (SCHEME + self.token).encode())] if self.token is not None else []


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
