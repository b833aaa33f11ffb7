"""One connection to a server, and explanations of its failures."""

from __future__ import annotations

import contextlib
import socket
import ssl

from echelon.base import tls
from echelon.base.endpoints import split_endpoint
from echelon.base.environment import PS_CA, PS_CERT, PS_KEY, PS_TOKEN
from echelon.base.job_secret import HandshakeError, callers_proof
from echelon.base.security import Security
from echelon.parameter_server.protocol import message_wire
from echelon.parameter_server.protocol.byte_stream import ByteStream, StreamEndedError, TlsStream
from echelon.parameter_server.protocol.frame_memory import offer_memory
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.message_wire import PackedMessage

#: Reasons of OpenSSL for which a server hangs up on a client's certificate.
_CERTIFICATE_ALERTS = (
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "HANDSHAKE_FAILURE",
    "CERTIFICATE_UNKNOWN",
)


class ServerConnectionLost(Exception):
    """The connection is lost, and a new one may be opened."""


class ServerConnection:
    """One connection to a server. Its methods raise ``OSError`` and ``HandshakeError``; ``open`` connects."""

    def __init__(self, endpoint: str, security: Security) -> None:
        self.endpoint, self._security = endpoint, security
        self._stream: ByteStream | None = None
        self._cut = False

    def open(self, seconds: float) -> None:
        """Connect, prove the token and wait for the server's welcome, all within ``seconds``."""
        host, port = split_endpoint(self.endpoint)
        host = host.strip("[]")
        connection = socket.create_connection((host, port), timeout=seconds)
        try:
            _refuse_itself(connection)
            stream = self._stream = self._begun(connection, host, seconds)
            stream.converse(callers_proof(self._security.proof_key, tls.fingerprint(stream.certificate)))
            if (line := self.read().head.get("error")) is not None:
                raise ServerConnectionLost(str(line))
            stream.limit(None)
        except BaseException:
            connection.close()
            raise
        if self._cut:
            stream.cut()

    def share_memory(self, seconds: float) -> None:
        """Send the arrays of long messages through memory from now on, if the server is on this host and agrees."""
        stream = self._stream
        assert stream is not None
        if not (stream.can_share_memory and stream.is_on_one_host()) or (offer := offer_memory()) is None:
            return
        try:
            if self.ask(WireMessage(offer.head), seconds).head.get("shared") is True:
                stream.memory = offer.accepted()
        finally:
            offer.close()
            stream.limit(None)

    def _begun(self, connection: socket.socket, host: str, seconds: float) -> ByteStream:
        context = tls.client_tls_context(self._security, check_names=True)
        if context is None:
            stream = ByteStream(connection)
            stream.limit(seconds)
            return stream
        encrypted = TlsStream(connection, context, host)
        encrypted.limit(seconds)
        encrypted.handshake()
        return encrypted

    def ask(self, frame: WireMessage, seconds: float) -> WireMessage:
        """Send a request on an open connection of its own and return the answer."""
        assert self._stream is not None
        self._stream.limit(seconds)
        self.write(PackedMessage.of(frame))
        return self.read()

    def write(self, message: PackedMessage) -> None:
        assert self._stream is not None
        message_wire.send(self._stream, message)

    def read(self) -> WireMessage:
        assert self._stream is not None
        return message_wire.receive(self._stream).unpacked()

    def cut(self) -> None:
        """Make pending reads and writes return with an error. This may be called from any thread."""
        self._cut = True
        if self._stream is not None:
            self._stream.cut()

    def close(self) -> None:
        self.cut()  # a forked process may hold the connection as well
        if self._stream is not None:
            self._stream.close()


def _refuse_itself(connection: socket.socket) -> None:
    """Raise ``ConnectionRefusedError`` if the connection leads to its own end.

    While nothing listens at a port of this host that the kernel also deals out, every 20,000th attempt connects to
    itself (Linux), and takes the port from the server that is about to restart.
    """
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())[:500]


def refusal(error: BaseException, security: Security) -> str | None:
    """Return the explanation of a refusal that a retry cannot change; None for any other error."""
    if isinstance(error, HandshakeError) and error.knows_our_language:
        return f"does not take this process's token; set {PS_TOKEN} to the same value on workers and servers"
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return f"has a certificate that {security.authority} has not signed ({why}); set {PS_CA} to the right one"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return (
            f"does not speak TLS, which {PS_CA} requires; give the server {PS_CERT} and {PS_KEY}, or unset {PS_CA} here"
        )
    if isinstance(error, ssl.SSLError) and any(alert in str(error.reason) for alert in _CERTIFICATE_ALERTS):
        return f"accepts only clients with a certificate it trusts; set {PS_CERT} and {PS_KEY} to such a certificate"
    return None


def explain_foreign_server(error: BaseException) -> str | None:
    """Return an explanation if another program than a parameter server answers; else None."""
    if not isinstance(error, HandshakeError) or not error.heard:
        return None
    speech = "it speaks HTTP/1" if error.heard.startswith(b"HTTP/1") else "it answers in another protocol"
    return f"is no parameter server: another program has that port ({speech}); choose another port for the server"


def explain(error: BaseException) -> str:
    """Return why a connection failed; common reasons are given in plain words."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "the program that listens there does not answer: it is another program, or a stopped server"
    if isinstance(error, StreamEndedError | ConnectionResetError | BrokenPipeError | HandshakeError):
        return "the server ended the connection"
    return one_line(error)


def explain_missing_tls(error: BaseException, endpoint: str, security: Security) -> str | None:
    """Return an explanation if a server hangs up on a client without TLS because it speaks TLS; else None."""
    hung_up = isinstance(error, HandshakeError | StreamEndedError | ConnectionResetError | BrokenPipeError)
    if security.authority is not None or not hung_up:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = split_endpoint(endpoint)
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host.strip("[]"), port), timeout=1.0) as plain,
        context.wrap_socket(plain),
    ):
        return f"speaks TLS; set {PS_CA} to the file of the authority that signed its certificate"
    return None
