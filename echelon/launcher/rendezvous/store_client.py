"""``StoreClient``: a launcher's access to the store of the rendezvous.

A call to torch's store cannot be interrupted, and over a broken connection it does not return: so a separate thread
makes the calls, while the caller waits with a limit and handles signals. The same thread sends heartbeats.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from echelon.base.errors import PeerLost

POLL = 0.1
#: Seconds between two heartbeats.
BEAT = 0.5

T = TypeVar("T")


class StoreLost(PeerLost, RuntimeError):
    """The launcher that served the store died, or the connection broke. A RuntimeError, as torch's own stores raise."""


@dataclass
class _StoreCall:
    call: Callable[[Store], Any]
    store: Store
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: Exception | None = None

    def put(self) -> None:
        try:
            self.answer = self.call(self.store)
        except Exception as error:
            self.error = error
        self.answered.set()


class StoreClient:
    def __init__(self, store: Store, where: str, patience: float) -> None:
        self._store, self.where, self._patience = store, where, patience
        self._questions: queue.SimpleQueue[_StoreCall | None] = queue.SimpleQueue()
        self._is_lost = False
        self._pulse = ""
        threading.Thread(target=self._serve, args=(store,), daemon=True, name="line").start()

    def beat_as(self, token: str) -> None:
        """Send heartbeats for ``token`` from now on."""
        self._pulse = f"beat/{token}"

    def close(self) -> None:
        """Let go of the store; one that this process serves ends, even if a plugin still has this client."""
        self._is_lost = True
        self._questions.put(None)
        del self._store

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda store: store.set(key, value))  # type: ignore[arg-type]  # torch takes bytes, too

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda store: store.add(key, amount)))

    def check(self, *keys: str) -> bool:
        """Return True if all keys exist."""
        return bool(self._ask(lambda store: store.check(list(keys))))

    def find(self, key: str) -> bytes | None:
        """Return the key's value, or ``None`` at once: the store's own ``get`` would wait for it."""
        return self._ask(lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return bytes(self._ask(lambda store: store.compare_set(key, expected, value)))

    def delete(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.delete_key(key)))

    def _ask(self, call: Callable[[Store], T]) -> T:
        if self._is_lost:
            raise self._lost()
        question = _StoreCall(call, self._store)
        self._questions.put(question)
        if not question.answered.wait(self._patience) or isinstance(question.error, RuntimeError):
            self._is_lost = True
            raise self._lost() from None
        if question.error is not None:
            raise question.error
        answer: T = question.answer
        return answer

    def _lost(self) -> StoreLost:
        return StoreLost(f"the launcher at {self.where} no longer answers; look at its console")

    def _beat(self, store: Store) -> None:
        store.add(self._pulse, 1)

    def _serve(self, store: Store) -> None:
        beaten = 0.0
        while True:
            if self._pulse and not self._is_lost and time.monotonic() - beaten >= BEAT:
                beaten = time.monotonic()
                beat = _StoreCall(self._beat, store)
                beat.put()
                self._is_lost = self._is_lost or beat.error is not None
            try:
                question = self._questions.get(timeout=BEAT / 2)
            except queue.Empty:
                continue
            if question is None:
                return
            question.put()


class RoundStore(Store):
    """A store for the messages of plugins of different launchers in one round, under a prefix."""

    def __init__(self, line: StoreClient, prefix: str, patience: float) -> None:
        super().__init__()
        self._line, self._prefix, self._patience = line, prefix, patience

    def set(self, key: str, value: str | bytes) -> None:
        self._line.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value, without blocking heartbeats."""
        self.wait([key])
        result = self._line.find(self._prefix + key)
        if result is None:
            raise KeyError(key)
        return result

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        patience = self._patience if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + patience
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(keys)}: not set within {patience:g} s")
            time.sleep(POLL)

    def add(self, key: str, amount: int) -> int:
        return self._line.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._line.check(*(self._prefix + key for key in keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._line.compare_set(self._prefix + key, expected, value)

    def delete_key(self, key: str) -> bool:
        return self._line.delete(self._prefix + key)
