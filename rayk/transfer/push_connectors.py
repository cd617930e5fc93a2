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

import itertools
import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rayk.transfer.connector import Finished, KVRequest, Mode
from rayk.transfer.connectors import NS_PER_S, RankConnector
from rayk.transfer.options import kept_layers
from rayk.transfer.push import Chunk
from rayk.transfer.push_messages import PUSH_AGENT
from rayk.transfer.pusher import Pusher
from rayk.transfer.ticket import Reservation

WRITING_SHARE = 0.75
"""Share of a request's deadline in which its blocks may be written into."""
_ATTEMPT = 0
"""Nothing is computed here, so that no attempt is preempted."""


@dataclass(slots=True)
class _AwaitedPush:
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
    chunks: dict[str, Chunk]
    """Chunks by reservation, one per consumer rank: of those that are not over."""
    layers: deque[int]
    """Layers not told to be computed yet."""
    failure: str = ""


class AgentPushConnector(RankConnector):
    mode: Mode = "push"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._producer: str | None = None
        """Name of the engine that pushes here, where this is a consumer rank."""
        self._pusher: Pusher | None = None
        """Pusher of a producer rank, which takes its turns when the rank is polled."""
        self._ids = itertools.count()
        self._receiving: dict[str, _AwaitedPush] = {}
        """What arrives, by reservation."""
        self._sending: dict[str, _Sending] = {}
        """What is pushed, by request."""

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Raises HandshakeMismatch."""
        sides = self.meet(producers, consumers)
        if self.name in {c.agent_name for c in sides[1]}:
            self._producer = sides[0][0].engine
            return
        me = self.rank.description
        self._pusher = Pusher(
            self.make_agent(self.name + PUSH_AGENT),
            self.caches.buffer,
            me,
            push_layers=1,
            clock=lambda: time.monotonic_ns(),
            has_thread=False,
        )
        for consumer in sides[1]:
            # Each rank makes reservations of its own, as an engine of one rank would.
            self._pusher.connect(sides[0], [replace(consumer, engine=consumer.agent_name)])

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
        self.rank.reserve(*wanted, cached_blocks=blocks)
        self._receiving[reservation.reservation_id] = _AwaitedPush(request_id, stop_ns, until_ns)
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
        pusher = self._pusher
        if request.request_id in self._sending:
            raise ValueError(f"{request.request_id} is being sent")
        if pusher is None:
            raise ValueError(f"{self.name} is connected to no consumer")
        now = time.monotonic_ns()
        until_ns = now + int(request.deadline_s * NS_PER_S)
        chunks = {}
        for peer in peers:
            reservation, stop_ns = pickle.loads(peer)  # noqa: S301 - our own
            if now >= stop_ns:
                raise ValueError(f"the reservation of {request.request_id} is over")
            hold_s = (min(until_ns, stop_ns) - now) / NS_PER_S
            chunks[reservation.reservation_id] = Chunk(
                reservation=replace(reservation, hold_s=hold_s),
                attempt=_ATTEMPT,
                start=0,
                stop=request.num_tokens,
                block_tables=request.block_ids,
            )
        layers = deque(range(len(kept_layers(self.caches.geometry))))
        self._sending[request.request_id] = _Sending(until_ns, chunks, layers)
        pusher.begin(list(chunks.values()))
        pusher.turn()  # the time it may take runs from now on
        return b""

    def _poll_sending(self, pusher: Pusher, now: int) -> None:
        for message in self.rank.stops():
            pusher.stop(message)
        for sending in self._sending.values():
            if sending.layers:
                pusher.computed(sending.layers.popleft(), list(sending.chunks.values()), lambda: None)
        pusher.turn()
        over = pusher.take_over()
        for request_id, sending in tuple(self._sending.items()):
            for reservation_id in over.keys() & sending.chunks.keys():
                del sending.chunks[reservation_id]
                sending.failure = sending.failure or over[reservation_id]
            if not sending.chunks or now >= sending.until_ns:
                # What is still in flight is of no use to anybody: its request is told to have failed.
                late = "its writes did not end within the deadline" if sending.chunks else ""
                del self._sending[request_id]
                self.finish(request_id, sending.failure or late)

    # Both

    def poll(self) -> Sequence[Finished]:
        if self._rank is None:
            return []
        now = time.monotonic_ns()
        self.rank.poll(now)
        self.rank.reserved()  # at once, as nothing is converted
        if self._pusher is not None:
            self._poll_sending(self._pusher, now)
        self._poll_receiving(now)
        return super().poll()

    def release(self, request_id: str) -> None:
        for reservation_id, receiving in self._receiving.items():
            if receiving.request_id == request_id:
                self._take_back(reservation_id, "given up")
        if self._pusher is not None and request_id in self._sending:
            for reservation_id in self._sending[request_id].chunks:
                self._pusher.end(reservation_id, "given up by the producer")

    def held(self) -> Mapping[str, int]:
        """Registrations, requests, and pushes whose writes have not ended."""
        return {
            "registrations": int(self._rank is not None),
            "requests": len(self._sending) + len(self._receiving),
            "pushes": self._pusher.num_pushing if self._pusher is not None else 0,
        }

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        self._pusher = None
        super().close()
        self._receiving.clear()
        self._sending.clear()


class LocalPushConnector(AgentPushConnector, transport="local"):
    """It connects ranks of one process."""


class NixlPushConnector(AgentPushConnector, transport="nixl"):
    """It connects processes of one host, over NIXL (UCX)."""
