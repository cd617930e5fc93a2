"""How an engine's leader reaches the host tier: calls to the actor that owns it, from a thread of their own.

Implements offloading.Tier. A Ray call costs its caller hundreds of microseconds, which no step is to wait
for. Answers, and word of the actor's end, are posted to the loop's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray.exceptions import RayActorError, RayError

from rayk.actors.failures import translate
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.transfer.ticket import TransferTicket
from rayk.types.bugs import bug
from rayk.types.errors import EngineDied

Post = Callable[[Callable[[], None]], None]


class RayTier:
    """Calls a tier's actor from a thread of its own, which `close` ends."""

    def __init__(self, handle: Any, post: Post, on_lost: Callable[[str], None]) -> None:
        """`post` runs a function on the loop's thread. `on_lost` is run there once, with the reason."""
        self._handle = handle
        self._post = post
        self._on_lost = on_lost
        self._is_lost = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rayk-tier-calls", daemon=True)
        self._thread.start()

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None:
        name = ask.ticket.request_id
        self._call("store", ask, done, lambda why: StoreAnswer(name=name, reason=why))

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None:
        self._call("load", ask, done, lambda why: LoadAnswer(request_id=ask.request_id, reason=why))

    def drop(self, kept_as: str) -> None:
        self._call("drop", kept_as, lambda _: None, lambda _: None)

    def doubt(self, ticket: TransferTicket) -> None:
        self._call("doubt", ticket, lambda _: None, lambda _: None)

    def close(self) -> None:
        self._calls.put(None)

    def _call(
        self, method: str, ask: object, done: Callable[[Any], None], failed: Callable[[str], Any]
    ) -> None:
        def answered(future: Future[Any]) -> None:
            try:
                found = future.result()
            except RayError as error:
                why = translate(error, TIER)
                found = failed(str(why))
                if isinstance(error, RayActorError) or isinstance(why, EngineDied):
                    self._post(lambda: self._lost(str(why)))
            except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
                found = failed(str(bug("a call to the host tier", error)))
            self._post(lambda: done(found))

        def call() -> None:
            try:
                future = getattr(self._handle, method).remote(ask).future()
            except Exception as error:  # noqa: BLE001 - this thread goes on
                why = str(translate(error, TIER))
                self._post(lambda: self._lost(why))
                self._post(lambda: done(failed(why)))
                return
            future.add_done_callback(answered)

        self._calls.put(call)

    def _lost(self, why: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(why)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
