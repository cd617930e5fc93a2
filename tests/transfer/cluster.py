"""Producer and consumer engines without models: caches filled through their views, any agent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rayk.kv.caches import TORCH_DTYPES, CanonicalKVCaches, allocate
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from rayk.transfer.agent import TransferAgent
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.handshake import CacheDescription, describe_cache
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import consecutive_tables
from rayk.transfer.rank import TransferRank
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.verify import make_layer_view
from tests.transfer.brute import brute_shard

POISON = 0x5A
FINGERPRINT = {"weights": "w", "rope": "r"}
MakeAgent = Callable[[str], TransferAgent]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What both sides of a test agree on, and what each chooses (producer, consumer)."""

    units: int = 2
    query_heads: int = 8
    head_sizes: tuple[int, int] = (4, 4)
    dtype: str = "float32"
    num_layers: int = 3
    window: int | None = None
    """Layers 1, 2, 4, 5, ... slide over this many tokens."""
    tp: tuple[int, int] = (1, 1)
    layouts: tuple[str, str] = ("BHLNC", "BHLNC")
    block_sizes: tuple[int, int] = (4, 4)
    kernel_block_sizes: tuple[int | None, int | None] = (None, None)
    num_blocks: tuple[int, int] = (40, 50)

    def specs(self, side: int) -> dict[int, KVCacheSpec]:
        common = (self.block_sizes[side], self.units, *self.head_sizes, self.dtype, self.query_heads)
        full = FullAttentionSpec(*common)
        if self.window is None:
            return dict.fromkeys(range(self.num_layers), full)
        slide = SlidingWindowSpec(*common, self.window)
        return {layer: full if layer % 3 == 0 else slide for layer in range(self.num_layers)}

    def values(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """The KV both sides should hold: [layer, head, token, content], all elements different by chance."""
        shape = (self.num_layers, self.units, num_tokens, sum(self.head_sizes))
        generator = torch.Generator().manual_seed(seed)
        if self.dtype == "int8":
            return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        return torch.randn(shape, generator=generator).to(TORCH_DTYPES[self.dtype])


@dataclass(eq=False)
class Engine:
    """All ranks of one side, in this process."""

    shape: Shape
    side: int
    agents: list[TransferAgent] = field(default_factory=list)
    caches: list[CanonicalKVCaches] = field(default_factory=list)
    ranks: list[TransferRank] = field(default_factory=list)

    @property
    def descriptions(self) -> list[CacheDescription]:
        return [r.description for r in self.ranks]

    def heads(self, tp_rank: int) -> list[int]:
        return brute_shard(self.shape.units, self.shape.tp[self.side], tp_rank, self.shape.query_heads)

    def tables(self, num_tokens: int, seed: int = 0) -> list[list[int]]:
        """Scattered block ids, nulls where nothing is live."""
        plain = consecutive_tables(self.caches[0].geometry, num_tokens)
        ids = np.random.default_rng(seed + self.side).permutation(
            np.arange(1, self.caches[0].geometry.num_blocks)
        )
        return [[0 if b == 0 else int(ids[b]) for b in t] for t in plain]

    def places(self, layer: int, tables: list[list[int]], num_tokens: int):
        """(live rows, kernel block, kernel slot) by plain arithmetic."""
        for group in self.caches[0].geometry.groups:
            if layer in group.group.layers:
                rows = list(group.group.spec.live_rows(num_tokens))
                size, kernel = group.block_size, group.kernel_block_size
                table = tables[group.group.index]
                blocks = [table[t // size] * (size // kernel) + t % size // kernel for t in rows]
                return rows, blocks, [t % size % kernel for t in rows]
        raise AssertionError(layer)

    def write(self, values: torch.Tensor, tables: list[list[int]]) -> None:
        """Store values [layer, head, token, content] through every rank's views."""
        for rank, caches in enumerate(self.caches):
            for layer in range(self.shape.num_layers):
                rows, blocks, slots = self.places(layer, tables, values.shape[2])
                heads = self.heads(rank)
                caches.view(layer)[blocks, :, slots] = values[layer][heads][:, rows].transpose(0, 1)

    def check(self, values: torch.Tensor, tables: list[list[int]]) -> None:
        """Every live byte of every rank is right."""
        for rank, caches in enumerate(self.caches):
            for layer in range(self.shape.num_layers):
                rows, blocks, slots = self.places(layer, tables, values.shape[2])
                found = caches.view(layer)[blocks, :, slots].contiguous().view(torch.uint8)
                wanted = values[layer][self.heads(rank)][:, rows].transpose(0, 1).contiguous()
                assert torch.equal(found, wanted.view(torch.uint8)), f"rank {rank} layer {layer}"

    def digests(self, num_tokens: int, tables: list[list[int]]) -> list[np.ndarray]:
        return [r.digests(num_tokens, tables) for r in self.ranks]

    def ticket(self, num_tokens: int, tables: list[list[int]], request_id: str = "r") -> TransferTicket:
        """Lease and hand over a request."""
        lease_id = f"lease-{request_id}"
        for rank in self.ranks:
            rank.lease(lease_id, time.monotonic_ns() + 60_000_000_000)
        return self.ranks[0].make_ticket(
            request_id=request_id,
            lease_id=lease_id,
            num_tokens=num_tokens,
            block_tables=tables,
            digests=self.digests(num_tokens, tables),
        )


def make_engine(shape: Shape, side: int, make_agent: MakeAgent, *, epoch: int = 0, **changes) -> Engine:
    """An engine named p or d; `changes` go to the descriptions."""
    engine = Engine(shape, side)
    name = "pd"[side]
    for rank in range(shape.tp[side]):
        geometry = plan_rank(
            group_layers(shape.specs(side)),
            LAYOUTS[shape.layouts[side]],
            tp_size=shape.tp[side],
            tp_rank=rank,
            num_blocks=shape.num_blocks[side],
            kernel_block_size=shape.kernel_block_sizes[side],
        )
        caches = allocate(geometry, torch.device("cpu"), fill=POISON)
        agent = make_agent(f"{name}{epoch}.{rank}")
        fingerprint = changes.get("fingerprint", FINGERPRINT)
        description = describe_cache(agent, caches, engine=name, epoch=epoch, fingerprint=fingerprint)
        views = [
            make_layer_view(layer, g.group, caches.view(layer), engine.heads(rank))
            for g in geometry.groups
            for layer in g.group.layers
        ]
        engine.agents.append(agent)
        engine.caches.append(caches)
        engine.ranks.append(TransferRank(agent, caches, views, description))
    return engine


@dataclass(eq=False)
class Pair:
    """A producer engine connected to a consumer engine."""

    producer: Engine
    consumer: Engine

    def connect(self) -> None:
        for rank in (*self.consumer.ranks, *self.producer.ranks):
            rank.connect(self.producer.descriptions, self.consumer.descriptions)

    def poll(self) -> list[tuple[int, TransferOutcome]]:
        """(consumer rank, outcome); both sides make progress."""
        now = time.monotonic_ns()
        for rank in self.producer.ranks:
            rank.poll(now)
        return [(i, o) for i, rank in enumerate(self.consumer.ranks) for o in rank.poll(now)]

    def finish(self, ticket: TransferTicket, timeout_s: float = 20.0) -> dict[int, TransferOutcome]:
        """Poll until every consumer rank has an outcome for the ticket's request."""
        outcomes: dict[int, TransferOutcome] = {}
        until = time.monotonic() + timeout_s
        while len(outcomes) < len(self.consumer.ranks):
            assert time.monotonic() < until, f"only {sorted(outcomes)} finished"
            outcomes.update((i, o) for i, o in self.poll() if o.request_id == ticket.request_id)
        return outcomes

    def start(self, ticket: TransferTicket, tables: list[list[int]], deadline_s: float = 20.0) -> None:
        for rank in self.consumer.ranks:
            rank.start(ticket, tables, time.monotonic_ns() + int(deadline_s * 1e9))

    def transfer(self, values: torch.Tensor, request_id: str = "r", seed: int = 0):
        """Write at P, transfer, and return (outcomes, consumer tables)."""
        num_tokens = values.shape[2]
        tables = self.producer.tables(num_tokens, seed)
        self.producer.write(values, tables)
        ticket = self.producer.ticket(num_tokens, tables, request_id)
        consumer_tables = self.consumer.tables(num_tokens, seed)
        self.start(ticket, consumer_tables)
        return self.finish(ticket), consumer_tables

    def released(self, timeout_s: float = 5.0) -> list[list[str]]:
        """Leases released per producer rank, once every rank has some (or the time is over)."""
        found: list[list[str]] = [[] for _ in self.producer.ranks]
        until = time.monotonic() + timeout_s
        while not all(found) and time.monotonic() < until:
            self.poll()
            for known, rank in zip(found, self.producer.ranks, strict=True):
                known += rank.released()
        return found


def local_pair(shape: Shape, delay_polls: int = 0) -> Pair:
    """Two connected engines on local agents."""
    network = LocalNetwork()

    def make_agent(name: str) -> TransferAgent:
        return LocalAgent(name, network, delay_polls)

    pair = Pair(make_engine(shape, 0, make_agent), make_engine(shape, 1, make_agent))
    pair.connect()
    return pair
