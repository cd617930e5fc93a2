"""One producer rank's pushes: a thread with an agent of its own writes while the engine's thread computes.

The engine's thread says what it computes (`begin`), what is computed (`computed`), what is over (`end`,
`stop`), and asks before blocks are handed out again (`wait_for`); all of that is handed to the thread, in
order. Two rules keep bytes whole: no page is read before its kernels are done, and no block that is being
read is overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from rayk.kv.block_pool import NULL_BLOCK
from rayk.transfer.costs import CostTable
from rayk.transfer.measuring import Measurements
from rayk.transfer.options import kept_layers
from rayk.transfer.peer_data import wrong_reservation
from rayk.transfer.push import Chunk, Push
from rayk.transfer.push_link import ConsumerLink, make_consumer_link
from rayk.transfer.push_messages import HelloMessage, StopMessage, StoppedMessage
from rayk.transfer.reservation_state import StoppedTable
from rayk.types.errors import RaykError, TransferError
from rayk.types.waiting import get_within

if TYPE_CHECKING:
    from rayk.kv.groups import KVCacheGroup
    from rayk.transfer.agent import TransferAgent
    from rayk.transfer.handshake import CacheDescription

POLL_S = 0.0003
"""How often writes in flight, and messages on their way out, are looked at."""
QUIET_S = 0.05
"""How often the agent makes progress when there is nothing to do."""
BUSY_S = 0.02
"""So long after the last news it is polled often: what was sent may need it."""
CONNECT_S = 60.0
DRAIN_S = 30.0
"""Blocks that do not come free within this end the engine: nothing says when they will."""

_log = logging.getLogger(__name__)


class Pusher:
    """Every method belongs to the engine's thread."""

    def __init__(
        self,
        agent: TransferAgent,
        buffer: torch.Tensor,
        me: CacheDescription,
        *,
        push_layers: int | None = None,
        costs: CostTable | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        has_thread: bool = True,
    ) -> None:
        """`agent` is the thread's from now on. `push_layers`: layers per write; None: by what it costs.
        `costs`: what is known of that, and gets to be known.
        `has_thread`: without one, nothing happens but when `turn` is called."""
        agent.register(buffer)
        self._groups = [g.group for g in me.geometry.groups]
        self._worker = _PushThread(agent, me, push_layers, costs or CostTable(), clock)
        self._guarded: dict[str, set[int]] = {}
        """Reservation -> blocks of ours that may be read for it."""
        self._thread: threading.Thread | None = None
        if has_thread:
            name = f"push {me.agent_name}"
            self._thread = threading.Thread(target=self._worker.run, name=name, daemon=True)
            self._thread.start()

    def connect(self, producers: Sequence[CacheDescription], consumers: Sequence[CacheDescription]) -> None:
        """Get ready to push to an engine; a new life of it replaces the old one. Raises RaykError."""
        self._ask(lambda: self._worker.connect(producers, consumers), CONNECT_S)

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """These are computed in one step, in blocks that were asked for (`wait_for`) when they were given."""
        self.check()
        for chunk in chunks:
            guarded = self._guarded.setdefault(chunk.reservation.reservation_id, set())
            guarded.update(read_blocks(chunk, self._groups))
            self._post(functools.partial(self._worker.begin, chunk))

    def computed(self, layer: int, chunks: Sequence[Chunk], wait: Callable[[], None]) -> None:
        """The kernels of a layer (its position in `kept_layers`) are queued for chunks that were begun;
        `wait` returns when they are done."""
        self._worker.note_computed(layer, chunks)
        self._post(lambda: self._worker.computed(layer, chunks, wait))

    def end(self, reservation_id: str, reason: str) -> None:
        """The request is over here: what is not written will not be."""
        self._post(lambda: self._worker.end(reservation_id, reason))

    def stop(self, message: StopMessage) -> None:
        """A consumer rank wants its blocks back."""
        self._post(lambda: self._worker.stop(message))

    def wait_for(self, block_ids: Collection[int]) -> None:
        """Return when nothing reads these blocks nor will: pushes from them are void. Raises TransferError
        when a write does not end."""
        is_free = self.void(block_ids)
        until = time.monotonic() + DRAIN_S
        while not is_free.wait(0.05):
            self.check()
            if time.monotonic() > until:
                raise TransferError("", f"writes from blocks that are needed did not end in {DRAIN_S:g} s")

    def void(self, block_ids: Collection[int]) -> threading.Event:
        """End what is pushed from these blocks; set when nothing reads them any more."""
        self.check()
        self.take_over()
        wanted, is_free = set(block_ids), threading.Event()
        hit = [r for r, blocks in self._guarded.items() if not blocks.isdisjoint(wanted)]
        for reservation_id in hit:
            del self._guarded[reservation_id]
        if hit:
            self._post(lambda: self._worker.void(hit, is_free))
        else:
            is_free.set()
        return is_free

    def take_over(self) -> dict[str, str]:
        """List reservations that nothing of ours is read for any more -> why not all was written, if so;
        each is told once, by this or to `void`."""
        over = self._worker.take_over()
        for reservation_id in over:
            self._guarded.pop(reservation_id, None)
        return over

    def check(self) -> None:
        """Raises what ended the thread: it ends the rank."""
        if self._worker.error is not None:
            raise self._worker.error

    @property
    def num_pushing(self) -> int:
        """Requests that are being pushed, for tests."""
        return len(self._worker.pushes)

    @property
    def num_posted(self) -> int:
        """Writes of the requests that are being pushed, for tests."""
        return sum(push.num_posted for push in tuple(self._worker.pushes.values()))

    def close(self) -> None:
        """Stop, whatever is in flight, and give the agent back."""
        self._worker.is_closing = True
        self._post(lambda: None)
        if self._thread is None:
            self._worker.run()
        else:
            self._thread.join()

    def turn(self) -> None:
        """Do what was asked, and look at what is in flight, where there is no thread."""
        assert self._thread is None, "the thread takes its turns by itself"
        self._worker.turn()

    def _post(self, action: Callable[[], None]) -> None:
        self._worker.inbox.put(action)

    def _ask(self, action: Callable[[], None], timeout_s: float) -> None:
        """Have the thread do something, and wait for it; its errors are raised here."""
        answers: queue.SimpleQueue[RaykError | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                action()
            except RaykError as error:
                answers.put(error)
            else:
                answers.put(None)

        self._post(ask)
        if self._thread is None:
            self._worker.turn()
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                error = get_within(answers, 0.05)
                if error is not None:
                    raise error
                return
            self.check()
        raise TransferError("", f"the pusher does not answer within {timeout_s:g} s")


def read_blocks(chunk: Chunk, groups: Sequence[KVCacheGroup]) -> set[int]:
    """List blocks of ours that are read when a chunk is pushed, and by then are the request's still: of
    groups that forget tokens nothing but what lives on behind the prompt."""
    found: set[int] = set()
    for group, table in zip(groups, chunk.block_tables, strict=True):
        if chunk.is_last:
            live = group.spec.live_rows(chunk.reservation.num_tokens)
            found.update(table[live.start // group.spec.block_size :])
        elif not group.spec.live_step:
            found.update(table)
    return found - {NULL_BLOCK}


class _PushThread:
    """The thread's side. Attributes without a note belong to the thread."""

    def __init__(
        self,
        agent: TransferAgent,
        me: CacheDescription,
        push_layers: int | None,
        costs: CostTable,
        clock: Callable[[], int],
    ) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What any thread wants to be done."""
        self.is_closing = False
        """Set by the engine's thread."""
        self.error: Exception | None = None
        """Read by the engine's thread."""
        self.links: dict[str, ConsumerLink] = {}
        """Links by engine."""
        self.pushes: dict[str, Push] = {}
        self._agent = agent
        self._me = me
        self._last_layer = len(kept_layers(me.geometry)) - 1
        self._push_layers = push_layers
        self._costs = costs
        self._clock = clock
        self._measurements = Measurements(agent, torch.device(me.device), costs, clock)
        self._to_measure: dict[str, CacheDescription] = {}
        """A rank of each engine of which it is not known yet what moving bytes costs. It is read from, as
        nobody may write there: UCX moves both ways alike."""
        self._stopped = StoppedTable()
        self._voiding: list[tuple[list[str], threading.Event]] = []
        self._over: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Reservations, and why not all was written."""
        self._computed: set[tuple[str, int]] = set()
        """(reservation, attempt) whose last layer was computed; of the engine's thread, which adds, and of
        this one, which looks and removes."""
        self._news_s = 0.0

    # The engine's thread.

    def note_computed(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Note it at once, before anything is written that hears of it."""
        for chunk in chunks:
            if chunk.is_last and layer == self._last_layer:
                self._computed.add((chunk.reservation.reservation_id, chunk.attempt))

    def take_over(self) -> dict[str, str]:
        over = {}
        with contextlib.suppress(queue.Empty):
            while True:
                reservation_id, why = self._over.get_nowait()
                over[reservation_id] = why
        return over

    # The thread.

    def run(self) -> None:
        """It runs until closed."""
        try:
            while not self.is_closing:
                self._take()
                self._look()
        except Exception as error:  # noqa: BLE001 - the engine's thread must learn of it
            self.error = error
        finally:
            self._agent.close()

    def connect(self, producers: Sequence[CacheDescription], consumers: Sequence[CacheDescription]) -> None:
        engine = consumers[0].engine
        old = self.links.pop(engine, None)
        self._to_measure.pop(engine, None)
        self._measurements.forget(engine)
        if old is not None:
            for push in [q for q in self.pushes.values() if q.link is old]:
                push.fail(f"consumer engine {engine} is gone")
            for consumer in old.consumers.values():
                self._agent.remove_peer(consumer.agent_name)
        try:
            link = make_consumer_link(
                self._agent, self._me, producers, consumers, push_layers=self._push_layers, costs=self._costs
            )
        except BaseException:
            for consumer in consumers:
                self._agent.remove_peer(consumer.agent_name)
            raise
        self.links[engine] = link
        if self._push_layers is None and link.plans:
            self._to_measure[engine] = link.consumers[min(link.plans)]
        self._news_s = time.monotonic()
        for rank in link.plans:
            self._agent.notify(link.consumers[rank].agent_name, HelloMessage(self._me.rank).encode())

    def begin(self, chunk: Chunk) -> None:
        reservation_id = chunk.reservation.reservation_id
        push = self.pushes.get(reservation_id)
        if push is None:
            opened = self._open(chunk)
            if isinstance(opened, str):
                # Nor will later chunks be pushed: nothing of ours is read for it.
                self._stopped.stop(reservation_id)
                self._over.put((reservation_id, opened))
                return
            push = opened
        push.begin(chunk)

    def computed(self, layer: int, chunks: Sequence[Chunk], wait: Callable[[], None]) -> None:
        here = [(chunk, self.pushes.get(chunk.reservation.reservation_id)) for chunk in chunks]
        if any(push is not None for _, push in here):
            wait()
        for chunk, push in here:
            if push is not None:
                push.computed(layer, chunk)
            else:
                self._computed.discard((chunk.reservation.reservation_id, chunk.attempt))

    def end(self, reservation_id: str, reason: str) -> None:
        push = self.pushes.get(reservation_id)
        self._stopped.stop(reservation_id)
        if push is not None:
            push.fail(reason)

    def stop(self, message: StopMessage) -> None:
        self._stopped.stop(message.reservation_id)
        push = self.pushes.get(message.reservation_id)
        to_rank = push.by_rank.get(message.consumer_rank) if push is not None else None
        if push is not None and to_rank is not None:
            was_drained = to_rank.session.is_drained
            push.fail("stopped by the consumer", message.consumer_rank)
            if not was_drained:
                return  # it is told when it is drained
        answer = StoppedMessage(message.reservation_id, self._me.rank)
        try:
            self._agent.notify(message.consumer, answer.encode())
        except TransferError as error:
            _log.warning("%s cannot be told that nothing is written: %s", message.consumer, error.reason)

    def void(self, reservation_ids: list[str], is_free: threading.Event) -> None:
        """Blocks of these pushes are needed."""
        for reservation_id in reservation_ids:
            push = self.pushes.get(reservation_id)
            if push is not None:
                push.void()
        self._voiding.append((reservation_ids, is_free))

    def _open(self, chunk: Chunk) -> Push | str:
        """Open a request's push, or say why there will be none."""
        reservation = chunk.reservation
        if reservation.reservation_id in self._stopped:
            return "its reservation is over"
        link = self.links.get(reservation.engine)
        if link is None or link.epoch != reservation.epoch:
            return f"consumer engine {reservation.engine} epoch {reservation.epoch} is not connected"
        wrong = wrong_reservation(reservation, tuple(link.consumers.values()))
        if wrong is not None:
            self._turn_away(reservation.reservation_id, link, wrong)
            return wrong
        # The first chunk may be of a later attempt: preempted before anything was pushed.
        push = Push(
            reservation,
            link,
            self._agent,
            self._me,
            self._clock,
            self._clock() + int(reservation.hold_s * 1e9),
            is_computed=lambda: (reservation.reservation_id, push.attempt) in self._computed,
            layers_per_write=link.layers_per_write(chunk.layer_ns),
            attempt=chunk.attempt,
        )
        self.pushes[reservation.reservation_id] = push
        return push

    def _turn_away(self, reservation_id: str, link: ConsumerLink, why: str) -> None:
        """Nothing will be written: the consumer's ranks need not wait."""
        _log.warning("nothing is pushed into reservation %s of %s: %s", reservation_id, link.engine, why)
        message = StoppedMessage(reservation_id, self._me.rank, why).encode()
        for rank in link.plans:
            with contextlib.suppress(TransferError):  # one that is gone waits for nothing
                self._agent.notify(link.consumers[rank].agent_name, message)

    def turn(self) -> None:
        """Do all that was asked, where nobody runs it."""
        while not self.inbox.empty():
            self.inbox.get()()
        self._look()

    def _take(self) -> None:
        """Do what was asked; where nothing was, wait for it a little."""
        in_flight = any(push.num_in_flight for push in self.pushes.values())
        is_busy = in_flight or self._voiding or time.monotonic() - self._news_s < BUSY_S
        try:
            action = get_within(self.inbox, POLL_S if is_busy else QUIET_S)
        except queue.Empty:
            return
        self._news_s = time.monotonic()
        action()

    def _look(self) -> None:
        for push in tuple(self.pushes.values()):
            push.poll()
        self._settle()
        self._measure()
        for peer, message in self._agent.notifications():  # also makes progress
            _log.warning("notification of no meaning from %s: %r", peer, message[:80])

    def _measure(self) -> None:
        self._measurements.take_back()
        for engine, consumer in tuple(self._to_measure.items()):
            if self._measurements.step(engine, consumer):
                del self._to_measure[engine]

    def _settle(self) -> None:
        """Forget pushes that are over, and hand back what nothing reads any more."""
        for reservation_id in [r for r, push in self.pushes.items() if push.is_over]:
            push = self.pushes.pop(reservation_id)
            # Its consumers were told that nothing follows: chunks that are still to come are not pushed.
            self._stopped.stop(reservation_id)
            self._computed.difference_update([(reservation_id, n) for n in range(push.attempt + 1)])
            self._over.put((reservation_id, push.failure))
            self._news_s = time.monotonic()
        waiting = []
        for reservation_ids, is_free in self._voiding:
            pushes = [self.pushes[r] for r in reservation_ids if r in self.pushes]
            if any(push.num_in_flight for push in pushes):
                waiting.append((reservation_ids, is_free))
            else:
                is_free.set()
        self._voiding = waiting
