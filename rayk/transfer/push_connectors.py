"""Connectors that push, over rayk's own agents: one class per transport.

A consumer rank offers blocks (a Reservation), each producer rank writes what that rank needs of it, layer by
layer, and every write brings its own notification, which the consumer sees when the write's bytes are there.
A request is done when every producer rank has said how many writes there were, and all of them are here.
There are no digests: those travel with a ticket, and a push has no third call that would carry one.

Who may write is settled as between engines (`reservation`): blocks are taken back from producer ranks by
asking them to stop, until they have answered. Where nobody answers, nobody can tell a rank that is gone from
one that is slow, and a request must be reported by its deadline all the same. So a reservation says until
when it may be written into, on the clock that the processes of one host share, and what is left of the
deadline then is time for the last write to end in.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayk.transfer.connector import Finished, KVRequest, Mode
from rayk.transfer.connectors import NS_PER_S, RankConnector
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.push import Chunk, Push
from rayk.transfer.push_link import ConsumerLink, make_consumer_link
from rayk.transfer.push_messages import HelloMessage, StopMessage, StoppedMessage
from rayk.transfer.reservation_state import StoppedTable
from rayk.transfer.ticket import Reservation
from rayk.types.errors import TransferError

WRITING_SHARE = 0.75
"""Of a request's deadline: so long its blocks may be written into."""
_ATTEMPT = 0
"""Nothing is computed here, so that no attempt is preempted."""


@dataclass(slots=True)
class _Receiving:
    """A request that this consumer rank waits for."""

    request_id: str
    stop_ns: int
    """When its producers are asked to stop; they begin no write after that."""
    until_ns: int
    failure: str = ""
    """Why its blocks are wanted back."""


@dataclass(slots=True)
class _Sending:
    """A request that this producer rank pushes."""

    until_ns: int
    pushes: list[tuple[Push, Chunk]] = field(default_factory=list)
    """One per consumer rank that gets anything."""
    layers: deque[int] = field(default_factory=deque)
    """Not handed to the pushes yet."""


class AgentPushConnector(RankConnector):
    mode: Mode = "push"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._producer: str | None = None
        """Name of the engine that pushes here, where this is a consumer rank."""
        self._consumers: ConsumerLink | None = None
        """What is pushed to, where this is a producer rank."""
        self._ids = itertools.count()
        self._receiving: dict[str, _Receiving] = {}
        """By reservation."""
        self._sending: dict[str, _Sending] = {}
        """By request."""
        self._draining: list[Push] = []
        """Of requests that are reported, with writes in flight."""
        self._over = StoppedTable()
        """Reservations that no push may begin of (any more)."""

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Raises HandshakeMismatch."""
        sides = self.meet(producers, consumers)
        if self.name in {c.agent_name for c in sides[1]}:
            self._producer = sides[0][0].engine
            return
        self._consumers = self.link_to(*sides)
        for rank in self._consumers.plans:
            # The network is set up by a first message.
            mine = self.rank.description.tp_rank
            self.agent.notify(sides[1][rank].agent_name, HelloMessage(mine).encode())

    def link_to(
        self, producers: Sequence[CacheDescription], consumers: Sequence[CacheDescription]
    ) -> ConsumerLink:
        """What this producer rank pushes, in writes of a layer each."""
        return make_consumer_link(self.agent, self.rank.description, producers, consumers, push_layers=1)

    # Consumer

    def receive(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        request_id, producer = request.request_id, self._producer
        if any(receiving.request_id == request_id for receiving in self._receiving.values()):
            raise ValueError(f"{request_id} is being received")
        if producer is None:
            raise ValueError(f"{self.name} is connected to no producer")
        now = time.monotonic_ns()
        stop_ns, until_ns = (now + int(s * request.deadline_s * NS_PER_S) for s in (WRITING_SHARE, 1))
        reservation = Reservation(
            request_id=request_id,
            reservation_id=f"{self.name}#{next(self._ids)}",
            engine=self.name,
            epoch=self.rank.description.epoch,
            num_tokens=request.num_tokens,
            block_tables=request.block_ids,
            generations=(),
            hold_s=request.deadline_s,
        )
        # The engine has handed these blocks out, and counted that.
        blocks = frozenset(block for table in request.block_ids for block in table)
        wanted = reservation.reservation_id, producer, request.block_ids, request.num_tokens
        self.rank.reserve(*wanted, held_blocks=blocks)
        self._receiving[reservation.reservation_id] = _Receiving(request_id, stop_ns, until_ns)
        return pickle.dumps((reservation, stop_ns))

    def _poll_receiving(self, now: int) -> None:
        for reservation_id, receiving in self._receiving.items():
            if receiving.failure:
                continue
            missing = self.rank.missing(reservation_id, _ATTEMPT)
            why = [f"producer rank {rank} stopped: {why}" for rank, why in missing.items() if why is not None]
            if why or now >= receiving.stop_ns:
                self._take_back(reservation_id, why[0] if why else "not all was written in time")
            elif not missing:
                self.rank.end_reservation(reservation_id, _ATTEMPT)
        late = [
            r for r, receiving in self._receiving.items() if receiving.failure and now >= receiving.until_ns
        ]
        for reservation_id in [*self.rank.cleared(), *late]:
            over = self._receiving.pop(reservation_id, None)
            if over is not None:
                self.finish(over.request_id, over.failure)

    def _take_back(self, reservation_id: str, why: str) -> None:
        """Have the producers stop; the request is reported when they have, or at its deadline."""
        receiving = self._receiving[reservation_id]
        receiving.failure = receiving.failure or why
        self.rank.end_reservation(reservation_id, _ATTEMPT)

    # Producer

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """Raises ValueError for reservations that are over."""
        link = self._consumers
        if request.request_id in self._sending:
            raise ValueError(f"{request.request_id} is being sent")
        if link is None:
            raise ValueError(f"{self.name} is connected to no consumer")
        offers: list[tuple[Reservation, int]] = [pickle.loads(peer) for peer in peers]  # noqa: S301 - our own
        by_name = {reservation.engine: (reservation, stop_ns) for reservation, stop_ns in offers}
        now = time.monotonic_ns()
        sending = _Sending(now + int(request.deadline_s * NS_PER_S))
        for rank, plan in link.plans.items():
            reservation, stop_ns = by_name[link.consumers[rank].agent_name]
            if reservation.reservation_id in self._over or now >= stop_ns:
                raise ValueError(f"the reservation of {request.request_id} is over")
            push = Push(
                reservation,
                replace(link, plans={rank: plan}),
                self.agent,
                self.rank.description,
                time.monotonic_ns,
                min(sending.until_ns, stop_ns),
                is_computed=lambda: not sending.layers,
                layers_per_write=link.layers_per_write(0.0),
            )
            chunk = Chunk(
                reservation=reservation,
                attempt=_ATTEMPT,
                start=0,
                stop=request.num_tokens,
                block_tables=request.block_ids,
            )
            sending.pushes.append((push, chunk))
        for push, _ in sending.pushes:
            self._over.stop(push.reservation.reservation_id)
        sending.layers.extend(range(len(link.layers)))
        self._sending[request.request_id] = sending
        return b""

    def _poll_sending(self, now: int) -> None:
        for request_id, sending in tuple(self._sending.items()):
            layers = [sending.layers.popleft()] if sending.layers else []
            for push, chunk in sending.pushes:
                for layer in layers:
                    push.computed(layer, chunk)
                push.poll()
            left = [push for push, _ in sending.pushes if not push.is_over]
            if not left or now >= sending.until_ns:
                # What is still in flight is of no use to anybody: its request is told to have failed.
                self._draining += left
                del self._sending[request_id]
                self.finish(request_id, next((p.failure for p, _ in sending.pushes if p.failure), ""))
        for push in self._draining:
            push.poll()
        self._draining = [push for push in self._draining if not push.is_over]

    def _stop(self, message: StopMessage) -> None:
        """A consumer rank wants its blocks back."""
        self._over.stop(message.reservation_id)
        pushes = [*self._draining, *(push for s in self._sending.values() for push, _ in s.pushes)]
        mine = [p for p in pushes if p.reservation.reservation_id == message.reservation_id and not p.is_over]
        for push in mine:
            push.fail("stopped by the consumer")  # which is told when nothing is in flight
        if not mine:
            with contextlib.suppress(TransferError):
                answer = StoppedMessage(message.reservation_id, self.rank.description.tp_rank)
                self.agent.notify(message.consumer, answer.encode())

    # Both

    def poll(self) -> Sequence[Finished]:
        if self._rank is None:
            return []
        now = time.monotonic_ns()
        self.rank.poll(now)
        self.rank.reserved()  # at once, as nothing is converted
        for message in self.rank.stops():
            self._stop(message)
        self._poll_sending(now)
        self._poll_receiving(now)
        return super().poll()

    def release(self, request_id: str) -> None:
        for reservation_id, receiving in self._receiving.items():
            if receiving.request_id == request_id:
                self._take_back(reservation_id, "given up")
        if request_id in self._sending:
            for push, _ in self._sending[request_id].pushes:
                push.fail("given up by the producer")

    def held(self) -> Mapping[str, int]:
        """Registrations, requests, and pushes of reported requests whose writes have not ended."""
        requests = len(self._sending) + len(self._receiving)
        return {
            "registrations": int(self._rank is not None),
            "requests": requests,
            "pushes": len(self._draining),
        }

    def close(self) -> None:
        super().close()
        self._receiving.clear()
        self._sending.clear()
        self._draining.clear()


class LocalPushConnector(AgentPushConnector, transport="local"):
    """Between ranks of one process."""


class NixlPushConnector(AgentPushConnector, transport="nixl"):
    """Between processes of one host, over NIXL (UCX)."""
