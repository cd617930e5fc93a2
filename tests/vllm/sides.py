"""A request that P holds and D has received, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from rayk.vllm.proof import ProofRecord, ProofRecords, Ticket, serve_records
from rayk.vllm.proof_compare import ArrivedKV, Comparison
from rayk.vllm.proof_verifier import Fetcher
from rayk.vllm.proof_wire import ProofServer
from tests.pd import HANG_S
from tests.transfer.cluster import Engine, Shape, make_caches
from tests.vllm.made_caches import MadeCaches

SECRET = b"a secret that nobody would guess"
TOKENS = 30
HERE = "127.0.0.1"


@dataclass
class Sides:
    """P's ranks, served, and D's."""

    shape: Shape
    producer: Engine
    consumer: Engine
    records: list[ProofRecords]
    servers: list[ProofServer]
    ticket: Ticket
    caches: list[MadeCaches]
    """D's, by rank."""
    tables: list[list[int]]
    """D's."""

    def arrival(self, rank: int, *, num_tokens: int = TOKENS, first_row: int = 0) -> ArrivedKV:
        caches = self.caches[rank]
        what = self.tables, num_tokens, first_row
        return ArrivedKV("d", self.ticket, num_tokens, first_row, caches.digests(*what), caches.rows(*what))

    def verify(
        self, rank: int = 0, timeout_s: float = HANG_S, secret: bytes = SECRET, **changes
    ) -> Comparison:
        arrival = replace(self.arrival(rank), **changes)
        caches = self.caches[rank]
        return Fetcher(caches.description, caches.all_views, secret, timeout_s).verify(arrival)


@contextmanager
def sides(shape: Shape, *, keep_rows: bool = True, num_tokens: int = TOKENS) -> Iterator[Sides]:
    """P holds a request, D has received it."""
    producer, consumer = make_caches(shape, 0), make_caches(shape, 1)
    values = shape.values(num_tokens)
    tables = producer.tables(num_tokens)
    producer.write(values, tables)
    with ExitStack() as stack:
        records, servers, ranks = [], [], []
        for rank in range(shape.tp[0]):
            caches = MadeCaches(producer, rank)
            kept = ProofRecords()
            rows = caches.rows(tables, num_tokens) if keep_rows else None
            kept.put("n", ProofRecord(num_tokens, caches.digests(tables, num_tokens), rows, "p"))
            server, life = serve_records(HERE, 0, SECRET, kept, caches.description)
            stack.callback(server.close)
            records.append(kept)
            servers.append(server)
            ranks.append((*server.address, life))
        theirs = consumer.tables(num_tokens)
        consumer.write(values, theirs)
        caches = [MadeCaches(consumer, rank) for rank in range(shape.tp[1])]
        yield Sides(
            shape, producer, consumer, records, servers, Ticket("p", "n", tuple(ranks)), caches, theirs
        )


HETERO = Shape(units=4, tp=(1, 2), block_sizes=(4, 8))
SHAPES = {
    "1-to-2": HETERO,
    "2-to-1": Shape(units=4, tp=(2, 1), block_sizes=(8, 4), layouts=("BHLNC", "LBHNC")),
    "replicas-4-to-1": Shape(units=2, tp=(4, 1)),
    "replicas-1-to-4": Shape(units=2, tp=(1, 4), window=9),
    "states-1-to-2": Shape(family="falcon_h1", tp=(1, 2)),
    "states-2-to-1": Shape(family="bamba", tp=(2, 1)),
}


def roll_heads(view) -> None:
    view.copy_(view.roll(1, dims=1).clone())


def wait_for(condition) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
