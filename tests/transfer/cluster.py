"""Producer and consumer engines without models: caches filled through their views, any agent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rayk.kv.caches import TORCH_DTYPES, CanonicalKVCaches, FieldView, allocate
from rayk.kv.fields import ITEMSIZE, PageField
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS
from rayk.kv.riders import Riders, add_riders
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer.agent import TransferAgent
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.handshake import CacheDescription, describe_cache
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import consecutive_tables
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.token_classes import common_classes
from tests.transfer.brute import brute_shard
from tests.transfer.families import FAMILIES, Specs

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
    family: str | None = None
    """Of families.py, instead of all of the above."""
    tp: tuple[int, int] = (1, 1)
    layouts: tuple[str, str] = ("BHLNC", "BHLNC")
    block_sizes: tuple[int, int] = (4, 4)
    state_block_sizes: tuple[int, int] = (64, 64)
    kernel_block_sizes: tuple[int | None, int | None] = (None, None)
    num_blocks: tuple[int, int] = (40, 50)
    shapes: tuple[EngineShape, EngineShape] | None = None
    """Instead of `tp`, where tokens or layers are divided. Block sizes are then those of one rank."""
    drafts: tuple[Specs, Specs] = field(default_factory=lambda: ({}, {}))
    """What a drafter of either side keeps; {}: it has none."""
    drafters: tuple[str, str] = ("", "")
    draft_tp: tuple[int, int] = (1, 1)

    def engine(self, side: int) -> EngineShape:
        made = EngineShape(self.tp[side]) if self.shapes is None else self.shapes[side]
        return replace(made, draft_tp=self.draft_tp[side])

    def groups(self, side: int) -> tuple[KVCacheGroup, ...]:
        groups = group_layers(self.specs(side), dcp=self.engine(side).dcp)
        return add_riders(groups, Riders(self.drafts[side], drafter=self.drafters[side]))

    def specs(self, side: int) -> Specs:
        if self.family is not None:
            return FAMILIES[self.family](self.block_sizes[side], self.state_block_sizes[side])
        common = (self.block_sizes[side], self.units, *self.head_sizes, self.dtype, self.query_heads)
        full = FullAttentionSpec(*common)
        layers = range(self.num_layers)
        if self.window is None:
            return {(layer, "attention"): full for layer in layers}
        slide = SlidingWindowSpec(*common, self.window)
        return {(layer, "attention"): full if layer % 3 == 0 else slide for layer in layers}

    def values(self, num_tokens: int, seed: int = 0) -> Values:
        """The caches' content, all elements different by chance."""
        generator = torch.Generator().manual_seed(seed)
        content = {}
        for (layer, part), spec in (self.specs(0) | self.drafts[1] | self.drafts[0]).items():
            live = spec.live_rows(num_tokens)
            for f in spec.fields():
                shape = (f.units, len(live), f.row_bytes // ITEMSIZE[f.dtype])
                if f.dtype == "int8":
                    made = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
                else:
                    made = torch.randn(shape, generator=generator).to(TORCH_DTYPES[f.dtype])
                content[layer, part, f.name] = made
        return Values(num_tokens, content)


@dataclass(frozen=True, eq=False)
class Values:
    """What both sides should hold: (layer, part, field) -> [unit, live row, element]."""

    num_tokens: int
    content: dict[tuple[int, str, str], torch.Tensor]


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

    def units(self, field: PageField, rank: int, *, is_draft: bool = False) -> list[int]:
        """Global ids of the units of a field that a rank holds."""
        tp = self.shape.draft_tp[self.side] if is_draft else self.shape.engine(self.side).tp
        return brute_shard(field.units, tp, rank % tp, field.readers)

    def layers(self, rank: int, group: KVCacheGroup) -> list[int]:
        """Layers of a group that a rank keeps: the first ranks are those of the last stage."""
        engine = self.shape.engine(self.side)
        stages = [stage for stage, count in enumerate(engine.stages) for _ in range(count)]
        stage = engine.pp - 1 - rank // engine.tp
        return [layer for layer in group.layers if not stages or stages[layer] == stage]

    def holds(self, rank: int, group: KVCacheGroup, token: int) -> bool:
        """Whether a token has its row on a rank, by the deal alone."""
        engine = self.shape.engine(self.side)
        owner = token // engine.dcp_interleave % engine.dcp
        return group.spec.part == "state" or owner == rank % engine.tp % engine.dcp

    def heads(self, tp_rank: int) -> list[int]:
        """KV heads of a rank, where the shape has no family."""
        return brute_shard(self.shape.units, self.shape.tp[self.side], tp_rank, self.shape.query_heads)

    def groups(self) -> list[KVCacheGroup]:
        return [g.group for g in self.caches[0].geometry.groups]

    def tables(self, num_tokens: int, seed: int = 0) -> list[list[int]]:
        """Scattered block ids, nulls where nothing is live."""
        plain = consecutive_tables(self.caches[0].geometry, num_tokens)
        ids = np.random.default_rng(seed + self.side).permutation(
            np.arange(1, self.caches[0].geometry.num_blocks)
        )
        return [[0 if b == 0 else int(ids[b]) for b in t] for t in plain]

    def places(
        self, group: KVCacheGroup, table: list[int], num_tokens: int, rank: int = 0
    ) -> tuple[list[int], list[int]]:
        """(kernel block, row in it) of every live row on a rank, by plain arithmetic."""
        size, live = group.spec.block_size, group.spec.live_rows(num_tokens)
        if group.spec.part == "state":
            return [table[t // size] for t in live], [0 for _ in live]
        mine = [t for t in range(size) if self.holds(rank, group, t)]
        kernel = self.shape.kernel_block_sizes[self.side] or len(mine)
        here = [(t // size, mine.index(t % size)) for t in live if self.holds(rank, group, t)]
        blocks = [table[block] * (len(mine) // kernel) + row // kernel for block, row in here]
        return blocks, [row % kernel for _, row in here]

    def views(self, rank: int, group: KVCacheGroup, layer: int) -> list[FieldView]:
        """What a layer's kernels would see: a state's bundles, or slices of attention's content."""
        bound = self.caches[rank].view(layer, group.spec.part)
        views, start = [], 0
        for f in group.spec.fields():
            stop = start + f.row_bytes // ITEMSIZE[f.dtype]
            view = bound[..., start:stop] if isinstance(bound, torch.Tensor) else bound[f.name]
            start = stop
            is_draft = group.rides is not None
            views.append(FieldView(f.name, view, tuple(self.units(f, rank, is_draft=is_draft))))
        return views

    def slots(self, tables: list[list[int]], values: Values):
        """(rank, field's view, kernel blocks, rows in them, right content [row, unit, element]) of all."""
        for rank in range(len(self.caches)):
            for group in (g for g in self.groups() if g.layers[0] in {n for n, _, _ in values.content}):
                blocks, rows = self.places(group, tables[group.index], values.num_tokens, rank)
                live = group.spec.live_rows(values.num_tokens)
                mine = [i for i, token in enumerate(live) if self.holds(rank, group, token)]
                for layer in self.layers(rank, group):
                    for seen in self.views(rank, group, layer):
                        right = values.content[layer, group.spec.part, seen.name][list(seen.units)][:, mine]
                        yield (
                            rank,
                            seen,
                            blocks,
                            rows,
                            right.transpose(0, 1).contiguous().to(seen.view.device),
                        )

    def write(self, values: Values, tables: list[list[int]]) -> None:
        """Store values through every rank's views."""
        for _, seen, blocks, rows, right in self.slots(tables, values):
            seen.view[blocks, :, rows] = right

    def check(self, values: Values, tables: list[list[int]]) -> None:
        """Every live byte of every rank is right."""
        for rank, seen, blocks, rows, right in self.slots(tables, values):
            found = seen.view[blocks, :, rows].contiguous().view(torch.uint8)
            assert torch.equal(found, right.view(torch.uint8)), f"rank {rank} {seen.name}"

    def check_all(self, values: Values, tables: list[list[int]]) -> None:
        """Every live byte of every rank is right, and every other byte of its pages is poison.

        Rows around the live ones may have moved: the peer's poison is the same.
        """
        pages = [caches.buffer[: caches.geometry.pages_bytes] for caches in self.caches]
        found = [p.clone() for p in pages]
        for p in pages:
            p.fill_(POISON)
        self.write(values, tables)
        for rank, (p, was) in enumerate(zip(pages, found, strict=True)):
            wrong = int((p != was).sum())
            p.copy_(was)
            assert not wrong, f"rank {rank}: {wrong} of {len(p)} bytes are wrong"

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


def make_caches(shape: Shape, side: int, poison: int = POISON) -> Engine:
    """An engine's memory alone."""
    engine = Engine(shape, side)
    of = shape.engine(side)
    groups = shape.groups(side)
    for rank in range(of.num_ranks):
        geometry = plan_rank(
            groups,
            LAYOUTS[shape.layouts[side]],
            shape=of,
            rank=rank,
            num_blocks=shape.num_blocks[side],
            kernel_block_sizes=None
            if of.dcp > 1
            else kernel_block_sizes(groups, shape.kernel_block_sizes[side], {}),
        )
        engine.caches.append(allocate(geometry, torch.device("cpu"), fill=poison))
    return engine


def make_engine(
    shape: Shape,
    side: int,
    make_agent: MakeAgent,
    *,
    epoch: int = 0,
    staging: StagingSettings | None = None,
    **changes,
) -> Engine:
    """An engine named p or d; `changes` go to the descriptions."""
    engine = make_caches(shape, side)
    name = "pd"[side]
    for rank, caches in enumerate(engine.caches):
        agent = make_agent(f"{name}{epoch}.{rank}")
        fingerprint = changes.get("fingerprint", FINGERPRINT)
        description = describe_cache(
            agent,
            caches,
            engine=name,
            epoch=epoch,
            fingerprint=fingerprint,
            token_classes=common_classes([shape.engine(0), shape.engine(1)]),
        )
        tokens = shape.engine(side).share(rank).tokens
        views = [
            make_layer_view(layer, group, engine.views(rank, group, layer), tokens)
            for group in engine.groups()
            for layer in engine.layers(rank, group)
        ]
        engine.agents.append(agent)
        engine.ranks.append(TransferRank(agent, caches, views, description, staging=staging))
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

    def finish(self, ticket: TransferTicket, timeout_s: float = 60.0) -> dict[int, TransferOutcome]:
        """Poll until every consumer rank has an outcome for the ticket's request."""
        outcomes: dict[int, TransferOutcome] = {}
        until = time.monotonic() + timeout_s
        while len(outcomes) < len(self.consumer.ranks):
            assert time.monotonic() < until, f"only {sorted(outcomes)} finished"
            outcomes.update((i, o) for i, o in self.poll() if o.request_id == ticket.request_id)
        return outcomes

    def start(self, ticket: TransferTicket, tables: list[list[int]], deadline_s: float = 60.0) -> None:
        for rank in self.consumer.ranks:
            rank.start(ticket, tables, time.monotonic_ns() + int(deadline_s * 1e9))

    def transfer(self, values: Values, request_id: str = "r", seed: int = 0):
        """Write at P, transfer, and return (outcomes, consumer tables)."""
        num_tokens = values.num_tokens
        tables = self.producer.tables(num_tokens, seed)
        self.producer.write(values, tables)
        ticket = self.producer.ticket(num_tokens, tables, request_id)
        consumer_tables = self.consumer.tables(num_tokens, seed)
        self.start(ticket, consumer_tables)
        return self.finish(ticket), consumer_tables

    def released(self, timeout_s: float = 30.0) -> list[list[str]]:
        """Leases released per producer rank, once every rank has some (or the time is over)."""
        found: list[list[str]] = [[] for _ in self.producer.ranks]
        until = time.monotonic() + timeout_s
        while not all(found) and time.monotonic() < until:
            self.poll()
            for known, rank in zip(found, self.producer.ranks, strict=True):
                known += rank.released()
        return found


def local_pair(
    shape: Shape,
    delay_polls: int = 0,
    *,
    staging: StagingSettings | None = None,
    kind: type[LocalAgent] = LocalAgent,
) -> Pair:
    """Two connected engines on local agents."""
    network = LocalNetwork()

    def make_agent(name: str) -> TransferAgent:
        return kind(name, network, delay_polls)

    pair = Pair(
        make_engine(shape, 0, make_agent, staging=staging), make_engine(shape, 1, make_agent, staging=staging)
    )
    pair.connect()
    return pair
