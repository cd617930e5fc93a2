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

from rayk.kv.caches import CanonicalKVCaches
from rayk.transfer.agent import TransferAgent
from rayk.transfer.connector import BaseConnector, Finished, KVRequest, Mode
from rayk.transfer.connectors import NS_PER_S, OverTransport, one_engine
from rayk.transfer.handshake import CacheDescription, check, check_engine, describe_cache
from rayk.transfer.lease import ReleaseMessage, RenewMessage
from rayk.transfer.link import PreparedReads, ProducerLink
from rayk.transfer.peer_data import Peers
from rayk.transfer.plan import plan_transfer
from rayk.transfer.push import Chunk, Push
from rayk.transfer.push_link import ConsumerLink, make_consumer_link
from rayk.transfer.push_messages import HelloMessage, StopMessage, StoppedMessage
from rayk.transfer.push_reservations import Reserving
from rayk.transfer.reservation_state import StoppedTable
from rayk.transfer.ticket import Reservation
from rayk.types.errors import TransferError

WRITING_SHARE = 0.75
"""Of a request's deadline: so long its blocks may be written into."""
_ATTEMPT = 0
"""Nothing is computed here, so that no attempt is preempted."""


@dataclass(slots=True)
class _Room:
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


class AgentPushConnector(OverTransport, BaseConnector):
    """See connector.Connector."""

    mode: Mode = "push"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._agent: TransferAgent | None = None
        self._producers: ProducerLink | None = None
        """What is pushed from, where this is a consumer rank."""
        self._consumers: ConsumerLink | None = None
        """What is pushed to, where this is a producer rank."""
        self._ids = itertools.count()
        self._rooms: dict[str, _Room] = {}
        """By reservation."""
        self._sending: dict[str, _Sending] = {}
        """By request."""
        self._draining: list[Push] = []
        """Of requests that are reported, with writes in flight."""
        self._peers = Peers()
        self._over = StoppedTable()
        """Reservations that no push may begin of (any more)."""

    @property
    def agent(self) -> TransferAgent:
        """AssertionError before `register` and after `close`."""
        assert self._agent is not None, f"{self.name} has no cache"
        return self._agent

    def register(self, caches: CanonicalKVCaches) -> None:
        """See Connector."""
        super().register(caches)
        self._agent = self.make_agent(self.name)
        # Ranks are one engine where they are connected as one: its name is settled there.
        self._me = describe_cache(self._agent, caches, engine="", fingerprint={})
        self._reserving = Reserving(self._agent, self._me.tp_rank, lambda tables: (), time.monotonic_ns)

    def describe(self) -> bytes:
        """See Connector."""
        return pickle.dumps(self._me)

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """See Connector. Raises HandshakeMismatch."""
        sides = one_engine(producers), one_engine(consumers)
        for side in sides:
            check_engine(side)
        for producer, consumer in itertools.product(*sides):
            if self.name in (producer.agent_name, consumer.agent_name):
                check(producer, consumer)
        self._peers.add(self._me, *sides)
        if self.name in {c.agent_name for c in sides[1]}:
            self._producers = self._link_from(sides[0])
        else:
            self._consumers = self.link_to(*sides)
            for rank in self._consumers.plans:
                # The network is set up by a first message.
                self.agent.notify(sides[1][rank].agent_name, HelloMessage(self._me.tp_rank).encode())

    def _link_from(self, producers: Sequence[CacheDescription]) -> ProducerLink:
        """What comes to this consumer rank, from whom. Nothing is read."""
        plan = plan_transfer([p.geometry for p in producers], self._me.geometry)
        for rank in plan.producer_ranks:
            self.agent.add_peer(producers[rank].agent_name, producers[rank].agent_metadata)
        no_reads = PreparedReads(self.agent, producers, self._me, max_kept=0)
        return ProducerLink(tuple(producers), plan, no_reads, fences={}, num_releases={})

    def link_to(
        self, producers: Sequence[CacheDescription], consumers: Sequence[CacheDescription]
    ) -> ConsumerLink:
        """What this producer rank pushes, in writes of a layer each."""
        return make_consumer_link(self.agent, self._me, producers, consumers, push_layers=1)

    # Consumer

    def receive(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """See Connector."""
        request_id, link = request.request_id, self._producers
        if any(room.request_id == request_id for room in self._rooms.values()):
            raise ValueError(f"{request_id} is being received")
        if link is None:
            raise ValueError(f"{self.name} is connected to no producer")
        now = time.monotonic_ns()
        stop_ns, until_ns = (now + int(s * request.deadline_s * NS_PER_S) for s in (WRITING_SHARE, 1))
        reservation = Reservation(
            request_id=request_id,
            reservation_id=f"{self.name}#{next(self._ids)}",
            engine=self._me.agent_name,
            epoch=self._me.epoch,
            num_tokens=request.num_tokens,
            block_tables=request.block_ids,
            generations=(),
            hold_s=request.deadline_s,
        )
        self._reserving.arrivals.open(reservation.reservation_id, link, request.block_ids, ())
        self._rooms[reservation.reservation_id] = _Room(request_id, stop_ns, until_ns)
        return pickle.dumps((reservation, stop_ns))

    def _poll_rooms(self, now: int) -> None:
        assert self._producers is not None or not self._rooms
        arrivals = self._reserving.arrivals
        for reservation_id, room in self._rooms.items():
            if room.failure:
                continue
            ranks = self._producers.plan.producer_ranks if self._producers is not None else ()
            left = [rank for rank in ranks if not arrivals.has_arrived(reservation_id, rank, _ATTEMPT)]
            stopped = {rank: arrivals.why_stopped(reservation_id, rank) for rank in left}
            why = [f"producer rank {rank} stopped: {why}" for rank, why in stopped.items() if why is not None]
            if why or now >= room.stop_ns:
                self._take_back(reservation_id, why[0] if why else "not all was written in time")
            elif not left:
                arrivals.stop(reservation_id, now, _ATTEMPT)
        self._reserving.ask_to_stop(now)
        late = [r for r, room in self._rooms.items() if room.failure and now >= room.until_ns]
        for reservation_id in [*self._reserving.cleared(), *late]:
            over = self._rooms.pop(reservation_id, None)
            if over is not None:
                self.finish(over.request_id, over.failure)

    def _take_back(self, reservation_id: str, why: str) -> None:
        """Have the producers stop; the request is reported when they have, or at its deadline."""
        room = self._rooms[reservation_id]
        room.failure = room.failure or why
        self._reserving.arrivals.stop(reservation_id, time.monotonic_ns(), _ATTEMPT)

    # Producer

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """See Connector. Raises ValueError for reservations that are over."""
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
                self._me,
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
                answer = StoppedMessage(message.reservation_id, self._me.tp_rank)
                self.agent.notify(message.consumer, answer.encode())

    # Both

    def poll(self) -> Sequence[Finished]:
        """See Connector."""
        if self._agent is None:
            return []
        for peer, message in self._peers.messages(self._agent):
            if isinstance(message, StopMessage):
                self._stop(message)
            elif not isinstance(message, ReleaseMessage | RenewMessage):
                self._reserving.arrivals.take(message, peer)
        now = time.monotonic_ns()
        self._poll_sending(now)
        self._poll_rooms(now)
        return super().poll()

    def release(self, request_id: str) -> None:
        """See Connector."""
        for reservation_id, room in self._rooms.items():
            if room.request_id == request_id:
                self._take_back(reservation_id, "given up")
        if request_id in self._sending:
            for push, _ in self._sending[request_id].pushes:
                push.fail("given up by the producer")

    def held(self) -> Mapping[str, int]:
        """Registrations, requests, and pushes of reported requests whose writes have not ended."""
        requests = len(self._sending) + len(self._rooms)
        return {
            "registrations": int(self._agent is not None),
            "requests": requests,
            "pushes": len(self._draining),
        }

    def close(self) -> None:
        """See Connector."""
        super().close()
        if self._agent is not None:
            self._agent.close()
        self._agent = None
        self._rooms.clear()
        self._sending.clear()
        self._draining.clear()


class LocalPushConnector(AgentPushConnector, transport="local"):
    """Between ranks of one process."""


class NixlPushConnector(AgentPushConnector, transport="nixl"):
    """Between processes of one host, over NIXL (UCX)."""
