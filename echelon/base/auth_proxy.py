"""torch's TCPStore has no lock on its door. With a secret it listens on loopback only, behind a gate that asks for it.

Whoever wants in from another host goes through a tunnel of its own launcher, which knows the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import weakref
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.base import network, tls
from echelon.base.environment import LOOPBACK, PS_CA, PS_CERT, TOKEN
from echelon.base.errors import PeerLost, UsageError
from echelon.base.job_secret import PATIENCE, HandshakeError, calleds_proof, callers_proof
from echelon.base.proxy_loop import ProxyConnection, ProxyListener, is_ours, join, stay_alert, wait_for

#: Callers at once who have not proven themselves yet. A proof takes one round trip; hundreds of ranks come together.
STRANGERS = 256


class WrongSecret(UsageError):
    """The job we called has another secret than ours."""


def serve_store(address: str, port: int, token: bytes | None, timeout: timedelta) -> tuple[TCPStore, int]:
    """A store that other hosts reach at ``address:port`` (0: any free port); the store, and the port."""
    listener = network.listen(address, port)
    if token is None:
        port = int(listener.getsockname()[1])
        return _store_at(address, listener, timeout), port
    inner = network.listen(LOOPBACK, 0)
    behind = int(inner.getsockname()[1])
    store = _store_at(LOOPBACK, inner, timeout)
    gate = AuthProxy(listener, behind, token)
    with _changing:
        _served[address, gate.door.port] = behind
    weakref.finalize(store, _forget, address, gate).atexit = False
    return store, gate.door.port


def local_store_endpoint(address: str, port: int, token: bytes | None) -> tuple[str, int]:
    """Where a store served elsewhere is reached from this host: itself, or with a secret our tunnel to it.

    The first time for a store it is called once, so that a wrong secret is told here: ``WrongSecret``.
    """
    if token is None:
        return address, port
    with _changing:
        if (behind := _served.get((address, port))) is not None:
            return LOOPBACK, behind
        if (known := _tunnels.get((address, port))) is None:
            _try(address, port, token)
            _close_idle_tunnels()
            known = _tunnels[address, port] = AuthTunnel(address, port, token)
        return LOOPBACK, known.door.port


class AuthProxy:
    """Lets in who knows the secret, and passes on what they say to the store behind it."""

    def __init__(self, listener: socket.socket, behind: int, token: bytes) -> None:
        self._behind, self._token = behind, token
        self._tls, self._channel = tls.server_tls_context(), tls.own_certificate_fingerprint()
        _want_descriptors()
        self.door = ProxyListener(listener, self._receive, at_most=STRANGERS)

    async def _receive(self, caller: socket.socket) -> None:
        stay_alert(caller)
        async with asyncio.timeout(PATIENCE):
            far = await ProxyConnection.accepted(caller, self._tls)
        try:
            await far.converse(calleds_proof(self._token, self._channel))
            self.door.know()
            store = await ProxyConnection.called(LOOPBACK, self._behind)
        except BaseException:
            far.transport.abort()
            raise
        await join(far, store)


class AuthTunnel:
    """A port on loopback for the ranks of this host; each connection goes on to the gate by one of our own."""

    def __init__(self, address: str, port: int, token: bytes) -> None:
        self._target, self._token = (address, port), token
        self.door = ProxyListener(network.listen(LOOPBACK, 0), self._receive, at_most=10 * STRANGERS)

    async def _receive(self, caller: socket.socket) -> None:
        if not is_ours(caller):
            raise HandshakeError("it belongs to another user of this host")
        near = await ProxyConnection.accepted(caller)
        try:
            far = await _call(*self._target, self._token)
        except BaseException:
            near.transport.abort()
            raise
        self.door.know()
        await join(near, far)


#: stores that we serve ourselves, by where others reach them; and our tunnels to others
_served: dict[tuple[str, int], int] = {}
_tunnels: dict[tuple[str, int], AuthTunnel] = {}
_changing = threading.Lock()


def _store_at(address: str, listener: socket.socket, timeout: timedelta) -> TCPStore:
    port = int(listener.getsockname()[1])
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _forget(address: str, gate: AuthProxy) -> None:
    _served.pop((address, gate.door.port), None)  # no lock: this may run at any moment of any thread
    gate.door.close()


def _close_idle_tunnels() -> None:
    """Every round has a store of its own; those that no rank uses any more are over."""
    for target in [target for target, tunnel in _tunnels.items() if tunnel.door.idle]:
        _tunnels.pop(target).door.close()


def _want_descriptors() -> None:
    """Each rank of another host takes three of ours; the usual 1024 would do for a few hundred ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < enough:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


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
            f"what answers at {where} does not ask for a secret as a launcher does: {stranger}; give every host the "
            f"same {TOKEN}, and either all or none of them {PS_CERT} and {PS_CA}"
        ) from None
    except OSError as error:
        raise PeerLost(f"the launcher at {where} cannot be reached: {error.strerror or error}") from None
