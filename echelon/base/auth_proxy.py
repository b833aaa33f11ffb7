"""An authenticating proxy for torch's TCPStore, which has no authentication of its own.

With a job secret, the store listens on loopback only, behind an ``AuthProxy`` that asks for the secret. Processes on
other hosts connect through the ``AuthTunnel`` of their own launcher, which knows the secret.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.base import network, tls
from echelon.base.environment import LOOPBACK, PS_CA, PS_CERT, TOKEN
from echelon.base.errors import PeerLost, UsageError
from echelon.base.job_secret import PATIENCE, HandshakeError, calleds_proof, callers_proof
from echelon.base.proxy_loop import ProxyConnection, ProxyListener, is_ours, join, wait_for

#: Limit of unauthenticated connections. The proof takes one round trip; hundreds of ranks connect at once.
UNPROVEN = 256


class WrongSecret(UsageError):
    """The called job has a different secret."""


def serve_store(address: str, port: int, token: bytes | None, timeout: timedelta) -> tuple[TCPStore, int]:
    """Start a store that other hosts reach at ``address:port`` (0: any free port); return the store and the port."""
    listener = network.listen(address, port)
    if token is None:
        port = int(listener.getsockname()[1])
        return _store_at(address, listener, timeout), port
    inner = network.listen(LOOPBACK, 0)
    behind = int(inner.getsockname()[1])
    store = _store_at(LOOPBACK, inner, timeout)
    gate = AuthProxy(listener, behind, token)
    with _changing:
        _proxied[address, gate.door.port] = behind
    weakref.finalize(store, _forget, address, gate).atexit = False
    return store, gate.door.port


def local_store_endpoint(address: str, port: int, token: bytes | None) -> tuple[str, int]:
    """Return the endpoint at which this host reaches a store: its own, or with a secret that of a local tunnel.

    The first call for a store connects once, so that a wrong secret raises ``WrongSecret`` here.
    """
    if token is None:
        return address, port
    with _changing:
        if (behind := _proxied.get((address, port))) is not None:
            return LOOPBACK, behind
        if (known := _tunnels.get((address, port))) is None:
            _try(address, port, token)
            _close_idle_tunnels()
            known = _tunnels[address, port] = AuthTunnel(address, port, token)
        return LOOPBACK, known.door.port


class AuthProxy:
    """Accepts connections that prove the secret, and forwards their bytes to the store behind it."""

    def __init__(self, listener: socket.socket, behind: int, token: bytes) -> None:
        self._behind, self._token = behind, token
        self._tls, self._channel = tls.server_tls_context(), tls.own_certificate_fingerprint()
        network.raise_descriptor_limit()
        self.door = ProxyListener(listener, self._receive, at_most=UNPROVEN)

    async def _receive(self, caller: socket.socket, know: Callable[[], None]) -> None:
        network.stay_alert(caller)
        async with asyncio.timeout(PATIENCE):
            far = await ProxyConnection.accepted(caller, self._tls)
        try:
            await far.converse(calleds_proof(self._token, self._channel))
            know()
            store = await ProxyConnection.called(LOOPBACK, self._behind)
        except BaseException:
            far.transport.abort()
            raise
        await join(far, store)


class AuthTunnel:
    """A loopback port for the ranks of this host; each connection is forwarded to the proxy by its own connection."""

    def __init__(self, address: str, port: int, token: bytes) -> None:
        self._target, self._token = (address, port), token
        self.door = ProxyListener(network.listen(LOOPBACK, 0), self._receive, at_most=10 * UNPROVEN)

    async def _receive(self, caller: socket.socket, know: Callable[[], None]) -> None:
        if not is_ours(caller):
            raise HandshakeError("it belongs to another user of this host")
        near = await ProxyConnection.accepted(caller)
        try:
            far = await _call(*self._target, self._token)
        except BaseException:
            near.transport.abort()
            raise
        know()
        await join(near, far)


#: Stores that this process serves, by the endpoint that others use; and the tunnels to stores of other processes.
_proxied: dict[tuple[str, int], int] = {}
_tunnels: dict[tuple[str, int], AuthTunnel] = {}
_changing = threading.Lock()


def _store_at(address: str, listener: socket.socket, timeout: timedelta) -> TCPStore:
    port = int(listener.getsockname()[1])
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _forget(address: str, gate: AuthProxy) -> None:
    _proxied.pop((address, gate.door.port), None)  # no lock: a finalizer may run at any moment, in any thread
    gate.door.close()


def _close_idle_tunnels() -> None:
    """Close the tunnels that no rank uses any more: every rendezvous round has its own store."""
    for target in [target for target, tunnel in _tunnels.items() if tunnel.door.idle]:
        _tunnels.pop(target).door.close()


async def _call(address: str, port: int, token: bytes) -> ProxyConnection:
    async with asyncio.timeout(PATIENCE):
        far = await ProxyConnection.called(address, port, tls.client_tls_context())
    try:
        shown = far.transport.get_extra_info("ssl_object")
        channel = tls.fingerprint(shown.getpeercert(binary_form=True)) if shown else b""
        await far.converse(callers_proof(token, channel))
    except BaseException:
        far.transport.abort()
        raise
    return far


def _try(address: str, port: int, token: bytes) -> None:
    where = network.endpoint(address, port)
    try:
        wait_for(_call(address, port, token)).transport.abort()
    except HandshakeError as stranger:
        if stranger.knows_our_language:
            raise WrongSecret(
                f"the job at {where} does not know this secret; {TOKEN} must be the same on every host"
            ) from None
        raise PeerLost(
            f"the program at {where} does not authenticate as a launcher does: {stranger}; give every host the same "
            f"{TOKEN}, and set {PS_CERT} and {PS_CA} on all hosts or on none"
        ) from None
    except OSError as error:
        raise PeerLost(f"the launcher at {where} cannot be reached: {error.strerror or error}") from None
