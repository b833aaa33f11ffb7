"""TLS between launchers, and to parameter servers, with one set of files: ECHELON_PS_CERT, _KEY, _CA and _CLIENT_CA.

Between launchers names in certificates are not checked. Instead the proof of the secret covers the fingerprint of the
presented certificate, so that a man in the middle cannot relay one host's proof to another.
"""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.base.security import Security


def server_tls_context(files: Security | None = None) -> ssl.SSLContext | None:
    """Return the TLS context of an ``AuthProxy`` or a parameter server; ``None``: no TLS.

    files:  the credentials; default: those of the environment
    """
    files = files or Security.from_environment()
    if files.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    if files.client_authority is not None:
        _trust(context, files.client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls_context(files: Security | None = None, *, check_names: bool = False) -> ssl.SSLContext | None:
    """Return the TLS context of an ``AuthTunnel`` or of a client of parameter servers; ``None``: no TLS.

    check_names:  the certificate must be of the called host, as for parameter servers; default False
    """
    files = files or Security.from_environment()
    if files.authority is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_names
    _trust(context, files.authority)
    if files.certificate is not None:
        _load(context, files)
    return context


def own_certificate_fingerprint(files: Security | None = None) -> bytes:
    """Return the fingerprint of the certificate that this process presents when it is called; empty without TLS."""
    path = (files or Security.from_environment()).certificate
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
