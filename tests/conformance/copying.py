"""A connector that pushes, right, and as simple as can be: within one process, byte by byte along a plan.

What it does wrong in `broken` is then what the kit must find.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence

from rayk.transfer import BaseConnector, KVRequest
from rayk.transfer.plan import BlockReads, plan_transfer

RANKS: dict[str, Copying] = {}
"""Of this process, by name."""
DELAY_POLLS = 3
"""Between `send` and the copy: what is done too early is seen."""


class Copying(BaseConnector):
    mode = "push"
    is_cross_process = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        RANKS[name] = self
        self.consumers: list[str] = []
        self.producers: list[str] = []
        self.waiting: dict[str, tuple[float, set[int]]] = {}
        """Requests of this consumer rank: deadline, and producer ranks whose bytes are to come."""
        self.requests: dict[str, KVRequest] = {}
        self.sending: deque[tuple[int, float, KVRequest, list[bytes]]] = deque()
        """Requests of this producer rank: polls left, deadline, request, reservations."""

    def describe(self) -> bytes:
        return pickle.dumps((self.name, self.caches.geometry))

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        met = [[pickle.loads(blob) for blob in blobs] for blobs in (producers, consumers)]
        self.producers, self.consumers = ([name for name, _ in side] for side in met)
        self.geometries = dict(met[0] + met[1])

    def plan(self, consumer: str):
        """What a consumer rank gets, from all producer ranks."""
        return plan_transfer([self.geometries[name] for name in self.producers], self.geometries[consumer])

    def receive(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        if request.request_id in self.waiting:
            raise ValueError(f"{request.request_id} is being received")
        sources = set(self.plan(self.name).producer_ranks)
        self.waiting[request.request_id] = (time.monotonic() + request.deadline_s, sources)
        self.requests[request.request_id] = request
        return pickle.dumps(request)

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        if request.request_id in [sending[2].request_id for sending in self.sending]:
            raise ValueError(f"{request.request_id} is being sent")
        self.sending.append((DELAY_POLLS, time.monotonic() + request.deadline_s, request, list(peers)))
        return b""

    def poll(self):
        for _ in range(len(self.sending)):
            polls_left, deadline, request, peers = self.sending.popleft()
            if polls_left:
                self.sending.append((polls_left - 1, deadline, request, peers))
                continue
            for consumer in self.consumers:
                self.push(request, consumer)
            self.sent(request)
        for request_id, (deadline, _) in list(self.waiting.items()):
            if time.monotonic() > deadline:
                self.give_up(request_id, "nobody sent it in time")
        return super().poll()

    def push(self, request: KVRequest, consumer: str) -> None:
        """Copy what a consumer rank needs of this rank, if it still waits for it."""
        mine = self.producers.index(self.name)
        theirs = RANKS.get(consumer)
        wanted = theirs.requests.get(request.request_id) if theirs is not None else None
        if wanted is None:
            return
        for reads in self.plan(consumer).lower(request.num_tokens, request.block_ids, wanted.block_ids):
            if reads.producer_rank == mine:
                self.copy(reads, theirs)
        theirs.arrived(request.request_id, mine)

    def copy(self, reads: BlockReads, theirs: Copying, shift: int = 0) -> None:
        source, destination = self.caches.buffer, theirs.caches.buffer
        pattern = reads.pattern
        for i, (here, there, size) in enumerate(pattern.runs.tuples()):
            for b, d in zip(reads.source_blocks.tolist(), reads.destination_blocks.tolist(), strict=True):
                start = here + b * int(pattern.source_strides[i]) + shift
                to = there + d * int(pattern.destination_strides[i])
                destination[to : to + size] = source[start : start + size]

    def arrived(self, request_id: str, producer_rank: int) -> None:
        _, left = self.waiting[request_id]
        left.discard(producer_rank)
        if not left:
            self.give_up(request_id, "")

    def sent(self, request: KVRequest) -> None:
        self.finish(request.request_id)

    def give_up(self, request_id: str, error: str) -> None:
        if self.waiting.pop(request_id, None) is not None:
            del self.requests[request_id]
            self.finish(request_id, error)

    def release(self, request_id: str) -> None:
        self.give_up(request_id, "released")
        for sending in [s for s in self.sending if s[2].request_id == request_id]:
            self.sending.remove(sending)
            self.finish(request_id, "released")

    def held(self):
        in_flight = len(self.waiting) + len(self.sending)
        return {"registrations": int(self._caches is not None), "requests": in_flight}

    def close(self) -> None:
        super().close()
        self.waiting.clear()
        self.sending.clear()
        RANKS.pop(self.name, None)


class Slow(Copying):
    """As right, and slower than what is to fail is waited for."""

    SECONDS = 0.5

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begins: dict[str, float] = {}

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        answer = super().send(request, peers)
        self.begins[request.request_id] = time.monotonic() + self.SECONDS
        return answer

    def poll(self):
        now = time.monotonic()
        for i, (_, *rest) in enumerate(self.sending):
            if now < self.begins[rest[1].request_id]:
                self.sending[i] = (DELAY_POLLS, *rest)
        return super().poll()
