"""TLS between launchers, with the files that parameter servers use: ECHELON_PS_CERT, _KEY, _CA and _CLIENT_CA.

Names in certificates are not checked. Instead the proof of the secret covers the fingerprint of the presented
certificate, so that a man in the middle cannot relay one host's proof to another.
"""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.base.security import Security


def server_tls_context() -> ssl.SSLContext | None:
    """Return the TLS context of an ``AuthProxy``; ``None``: no TLS."""
    files = Security.from_environment()
    if files.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    if files.client_authority is not None:
        _trust(context, files.client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls_context() -> ssl.SSLContext | None:
    """Return the TLS context of an ``AuthTunnel``; ``None``: no TLS."""
    files = Security.from_environment()
    if files.authority is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    _trust(context, files.authority)
    if files.certificate is not None:
        _load(context, files)
    return context


def own_certificate_fingerprint() -> bytes:
    """Return the fingerprint of the certificate that this process's ``AuthProxy`` presents; empty without TLS."""
    path = Security.from_environment().certificate
    if path is None:
        return b""
    first, end, _ = path.read_text().partition(ssl.PEM_FOOTER)
    return fingerprint(ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :] + end))


def fingerprint(certificate: bytes | None) -> bytes:
    return hashlib.sha256(certificate).digest() if certificate else b""


def _load(context: ssl.SSLContext, files: Security) -> None:
    try:
        context.load_cert_chain(str(files.certificate), str(files.key))
    except OSError as error:
        raise UsageError(
            f"'{files.certificate}' and '{files.key}' cannot be used for TLS ({error}); they must be a certificate and "
            "its key, as PEM files"
        ) from None


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(str(authority))
    except OSError as error:
        raise UsageError(f"'{authority}' cannot be used for TLS ({error}); it must hold certificates (PEM)") from None
