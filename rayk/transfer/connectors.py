"""Connectors that pull, over rayk's own agents: one class per transport.

Each wraps a TransferRank: a ticket carries the producer's digests, a lease keeps its blocks, and a consumer
reports a request as done only after generations and digests have proven it.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rayk.kv.caches import CanonicalKVCaches
from rayk.parallel.shard import WHOLE
from rayk.transfer.agent import TransferAgent
from rayk.transfer.connector import BaseConnector, Finished, KVRequest, Mode
from rayk.transfer.handshake import CacheDescription, describe_cache
from rayk.transfer.layer_view import LayerView, make_layer_view
from rayk.transfer.rank import TransferRank
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.token_classes import common_classes
from rayk.transfer.transports import TRANSPORTS, AgentSettings, make_agent
from rayk.transfer.wire import field_views
from rayk.types.errors import HandshakeMismatch

NS_PER_S = 1_000_000_000
Sides = tuple[list[CacheDescription], list[CacheDescription]]
"""The ranks of the producer engine, and of the consumer engine."""


def layer_views(caches: CanonicalKVCaches) -> Iterator[LayerView]:
    """Yield every cached layer as its kernels see it."""
    for geometry in caches.geometry.groups:
        group = geometry.group
        for layer in geometry.layers:
            units = {f.field.name: f.units for f in geometry.fields}
            bound = caches.view(layer, group.spec.part)
            fields = field_views(group, bound, units)
            tokens = caches.geometry.share.tokens if group.rides is None else WHOLE
            yield make_layer_view(layer, group, fields, tokens)


class RankConnector(BaseConnector):
    """What our connectors share: a TransferRank, over an agent of the transport that a class names, as in
    `class Mine(AgentConnector, transport="local")`."""

    transport: str

    def __init_subclass__(cls, *, transport: str | None = None) -> None:
        if transport is not None:
            cls.transport = transport
            cls.is_cross_process = TRANSPORTS[transport].is_cross_process

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._agent: TransferAgent | None = None
        self._rank: TransferRank | None = None
        self._is_connected = False

    def make_agent(self, name: str) -> TransferAgent:
        """Make the agent that moves the bytes. Raises DeviceError where its transport cannot be used."""
        return make_agent(name, AgentSettings(is_one_node=True), self.transport)

    @property
    def rank(self) -> TransferRank:
        """What drives the transfers. AssertionError before `register` and after `close`."""
        assert self._rank is not None, f"{self.name} has no cache"
        return self._rank

    @property
    def agent(self) -> TransferAgent:
        """The rank's. AssertionError as of `rank`."""
        assert self._agent is not None, f"{self.name} has no cache"
        return self._agent

    def register(self, caches: CanonicalKVCaches) -> None:
        if self._rank is not None:
            raise ValueError(f"{self.name} has a cache already")
        agent = self._agent = self.make_agent(self.name)
        # Ranks are one engine where they are connected as one: its name is settled there.
        description = describe_cache(agent, caches, engine="", fingerprint={})
        views = list(layer_views(caches))
        self._rank = TransferRank(agent, caches, views, description, clock=lambda: time.monotonic_ns())
        super().register(caches)

    def describe(self) -> bytes:
        return pickle.dumps(self.rank.description)

    def meet(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> Sides:
        """Connect the rank; how it is to know the two engines. Raises HandshakeMismatch, also where they deal
        tokens unlike those that the rank met before."""
        # Only now is it known how either side deals tokens, by which both are to digest them.
        sides = one_engine(producers), one_engine(consumers)
        classes = common_classes(rank.geometry.shape for side in sides for rank in side)
        before = self.rank.description.token_classes
        if classes != before:
            if self._is_connected:  # its peers count on digests by the classes that they were told
                told = str(before.deals), str(classes.deals)
                raise HandshakeMismatch((("token_classes of engines met before", *told),))
            self.rank.prove_by(classes)
        for side in sides:
            side[:] = [replace(rank, token_classes=classes) for rank in side]
        self.rank.connect(*sides)
        self._is_connected = True
        return sides

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()
        self._rank = self._agent = None
        self._is_connected = False
        super().close()


class AgentConnector(RankConnector):
    mode: Mode = "pull"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._producer: str | None = None
        """Name of the engine that is read from, where this is a consumer rank."""
        self._ids = itertools.count()
        self._sent: dict[str, str] = {}
        """Lease id -> request id."""
        self._received: set[str] = set()
        self._draining: dict[str, Finished] = {}
        """Lease id -> what will be reported when nothing writes any more."""

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Raises HandshakeMismatch."""
        sides = self.meet(producers, consumers)
        if self.name in {d.agent_name for d in sides[1]}:
            self._producer = sides[0][0].engine

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        if request.request_id in self._sent.values():
            raise ValueError(f"{request.request_id} is being sent")
        rank = self.rank
        lease_id = f"{request.request_id}#{next(self._ids)}"
        self._sent[lease_id] = request.request_id
        rank.lease(lease_id, time.monotonic_ns() + int(request.deadline_s * NS_PER_S))
        ticket = TransferTicket(
            request_id=request.request_id,
            lease_id=lease_id,
            engine="",
            epoch=rank.description.epoch,
            num_tokens=request.num_tokens,
            block_tables=request.block_ids,
            generations=rank.generations(request.block_ids),
            digests=rank.digests(request.num_tokens, request.block_ids)[None],
        )
        return pickle.dumps(ticket)

    def receive(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """Raises HandshakeMismatch where the producer is not connected."""
        if request.request_id in self._received:
            raise ValueError(f"{request.request_id} is being received")
        tickets: list[TransferTicket] = [pickle.loads(peer) for peer in peers]  # noqa: S301 - our own
        digests = np.concatenate([t.digests for t in tickets])
        ticket = replace(tickets[0], engine=self._producer or "", digests=digests)
        deadline = time.monotonic_ns() + int(request.deadline_s * NS_PER_S)
        self.rank.start(ticket, request.block_ids, deadline)
        self._received.add(request.request_id)
        return b""

    def poll(self) -> Sequence[Finished]:
        if self._rank is None:
            return []
        now = time.monotonic_ns()
        finished = list(super().poll())
        for outcome in self._rank.poll(now):
            over = Finished(outcome.request_id, "" if outcome.error is None else str(outcome.error))
            if outcome.is_draining:
                self._draining[outcome.lease_id] = over
            else:
                self._rank.release_now(outcome.request_id)
                finished.append(over)
        drained = (self._draining.pop(i, None) for i in self._rank.drained())
        finished += [over for over in drained if over is not None]
        self._received -= {over.request_id for over in finished}
        finished += [Finished(r) for r in self._end(self._rank.released())]
        late = "nobody released its blocks within the deadline"
        finished += [Finished(r, late) for r in self._end(self._rank.expired(now))]
        return finished

    def release(self, request_id: str) -> None:
        """Whoever still reads a request that is being sent finds its blocks reused."""
        if self._rank is None:
            return
        self._rank.cancel(request_id)
        leases = [lease for lease, of in self._sent.items() if of == request_id]
        for sent in self._end(leases):
            self.finish(sent, "given up")

    def held(self) -> Mapping[str, int]:
        """Count registrations and requests."""
        return {
            "registrations": int(self._rank is not None),
            "requests": len(self._sent) + len(self._received),
        }

    def close(self) -> None:
        super().close()
        for kept in (self._sent, self._received, self._draining):
            kept.clear()

    def _end(self, leases: Sequence[str]) -> list[str]:
        """Request ids of leases that are over."""
        return [self._sent.pop(lease) for lease in leases if lease in self._sent]


class LocalConnector(AgentConnector, transport="local"):
    """It connects ranks of one process."""


class NixlConnector(AgentConnector, transport="nixl"):
    """It connects processes of one host, over NIXL (UCX)."""


def one_engine(blobs: Sequence[bytes]) -> list[CacheDescription]:
    """Return the ranks of one engine, named after its first rank."""
    ranks: list[CacheDescription] = [pickle.loads(blob) for blob in blobs]  # noqa: S301 - our own
    return [replace(rank, engine=ranks[0].agent_name) for rank in ranks]
