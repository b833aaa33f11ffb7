"""One connection to a server over Arrow Flight, and explanations of its failures."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from typing import Any

from pyarrow import flight

from echelon.base.endpoints import split_endpoint
from echelon.base.environment import PS_CA, PS_CERT, PS_KEY, PS_TOKEN
from echelon.base.security import Security
from echelon.parameter_server.protocol.arrow_wire import SCHEMA, from_batch
from echelon.parameter_server.protocol.message import WireMessage

#: Name of the only kind of stream.
STREAM = b"frames"
#: Connections share no subchannels, so that a failed one does not delay the next. A job's processes use no proxy.
_CHANNEL = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


class ServerConnectionLost(Exception):
    """The connection is lost, and a new one may be opened."""


class FlightConnection:
    """One connection to a server with at most one stream. Its methods raise the errors of gRPC unchanged."""

    def __init__(self, endpoint: str, security: Security) -> None:
        quiet_grpc()
        self._client = flight.FlightClient(
            security.client_location(endpoint), generic_options=_CHANNEL, **security.client_options()
        )
        self._headers = security.headers()
        self._writer: Any = None
        self._reader: Any = None

    def act(self, name: str, head: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a small request outside the stream and return the answer's head."""
        options = flight.FlightCallOptions(timeout=timeout, headers=self._headers)
        results = list(self._client.do_action(flight.Action(name, json.dumps(head).encode()), options))
        answer: dict[str, Any] = json.loads(results[0].body.to_pybytes()) if results else {}
        return answer

    def open(self) -> None:
        options = flight.FlightCallOptions(headers=self._headers)
        self._writer, self._reader = self._client.do_exchange(flight.FlightDescriptor.for_path(STREAM), options)
        self._writer.begin(SCHEMA)

    def write(self, batch: Any) -> None:
        self._writer.write_batch(batch)

    def read(self) -> WireMessage:
        try:
            return from_batch(self._reader.read_chunk().data)
        except StopIteration:
            raise ServerConnectionLost("the server ended the stream") from None

    def cut(self) -> None:
        """Make pending reads and writes return with an error. This may be called from any thread."""
        if self._reader is not None:
            with contextlib.suppress(Exception):
                self._reader.cancel()

    def close(self) -> None:
        self.cut()
        for end in (self._writer, self._client):
            with contextlib.suppress(Exception):  # the connection may be broken already
                end.close()


def quiet_grpc() -> None:
    """Silence gRPC's own lines about failed handshakes on stderr: Echelon reports them once itself."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks and without gRPC's debug context."""
    text = " ".join(str(error).split())
    return text.split(". gRPC client debug context")[0].split(". Detail: ")[0].split("with message: ")[-1][:500]


def refusal(error: BaseException, security: Security) -> str | None:
    """Return the explanation of a refusal that a retry cannot change; None for any other error."""
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return f"does not take this process's token; set {PS_TOKEN} to the same value on workers and servers"
    text = str(error)
    if "wrong version number" in text.lower():
        return (
            f"does not speak TLS, which {PS_CA} requires; give the server {PS_CERT} and {PS_KEY}, or unset {PS_CA} here"
        )
    if "certificate verify failed" in text:
        why = text.rpartition("certificate verify failed: ")[2].split(". gRPC")[0]
        return f"has a certificate that {security.authority} has not signed ({why}); set {PS_CA} to the right one"
    return None


def explain_foreign_server(error: BaseException) -> str | None:
    """Return an explanation if another program than a parameter server answers; else None."""
    text = str(error)
    if "Failed parsing HTTP/2" not in text and "http1.x server" not in text:
        return None
    speech = "it speaks HTTP/1" if "http1.x server" in text else "it answers in another protocol"
    return f"is no parameter server: another program has that port ({speech}); choose another port for the server"


def explain(error: BaseException, endpoint: str) -> str:
    """Return why a connection failed; common reasons are given in plain words."""
    text = one_line(error)
    if "Connection refused" in text:
        return "nothing listens there"
    if isinstance(error, flight.FlightTimedOutError):
        if _accepts(endpoint):
            return "the program that listens there does not answer: it is another program, or a stopped server"
        return "its host does not answer"
    return text


def _accepts(endpoint: str) -> bool:
    host, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=1.0):
            return True
    except OSError:
        return False


def explain_tls_rejection(error: BaseException, endpoint: str, security: Security) -> str | None:
    """Return an explanation if a server hangs up because TLS or a client certificate is missing; else None.

    The server is probed with a TLS handshake. With a certificate authority set, it is probed twice, because a killed
    server hangs up, too, but does not accept the second connection.
    """
    if "Socket closed" not in str(error) and "Connection reset" not in str(error):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if security.authority is not None and security.certificate is not None:
        context.load_cert_chain(security.certificate, security.key)
    if security.authority is None:
        line = f"speaks TLS; set {PS_CA} to the file of the authority that signed its certificate"
        return None if _speaks(endpoint, context) is None else line
    if any(_speaks(endpoint, context) != "" for _ in range(2)):
        return None
    return f"accepts only clients with a certificate it trusts; set {PS_CERT} and {PS_KEY} to such a certificate"


def _speaks(endpoint: str, context: ssl.SSLContext) -> str | None:
    """Return None without TLS, "heard" if the server sends data after the handshake, and "" if it hangs up."""
    host, port = split_endpoint(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with context.wrap_socket(socket.socket(family, kind, protocol)) as secure:
            secure.settimeout(1.0)
            secure.connect(address)
            try:
                return "heard" if secure.recv(1) else ""
            except OSError:  # an alert or a reset: the server has rejected the certificate
                return ""
    except OSError:
        return None
