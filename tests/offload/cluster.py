"""A host tier and engines without models in one process: caches filled through their views, local agents.

What a page holds is told by plain arithmetic and by torch's views, never by rayk's page maps.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayk.kv.caches import FieldView, allocate
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.riders import Riders, add_riders
from rayk.kv.specs import FullAttentionSpec, MlaSpec
from rayk.offload.disk import DiskTier
from rayk.offload.host import HostTier
from rayk.offload.messages import LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.pages import DiskPages, identity_of
from rayk.offload.tier_parts import TierParts
from rayk.parallel.shard import EngineShape
from rayk.transfer.agent import TransferAgent
from rayk.transfer.connectors import layer_views
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.handshake import describe_cache
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.rank import TransferRank
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.ticket_seal import sealed
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses
from rayk.types.offload import OffloadSettings
from tests.offload.families import FAMILIES, MakeSpecs
from tests.transfer.cluster import FINGERPRINT, POISON, Engine, Shape, Values
from tests.transfer.families import Specs

Tables = list[list[int]]
OF_NODE = ("wrap", "delay_polls", "clock", "folder", "device", "token_classes", "drafter")
"""What `open_node` takes that is no setting of the tier."""
DRAFTS: Specs = {
    (900, "attention"): FullAttentionSpec(16, 4, 6, 2, "bfloat16", 8),
    (901, "attention"): MlaSpec(16, 6, 2, "float32", 8),
}
"""What every drafter keeps; only its name tells it from another."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one engine keeps what it computes."""

    tp: int = 1
    dcp: int = 1
    dcp_interleave: int = 1
    stages: tuple[int, ...] = ()
    layout: str = "BHLNC"
    block_size: int = 16
    state_block_size: int = 4096
    num_blocks: int = 40
    drafter: str = ""
    """Empty: there is none."""
    draft_tp: int = 1

    def __str__(self) -> str:
        dealt = f"-dcp{self.dcp}x{self.dcp_interleave}" if self.dcp > 1 else ""
        stages = f"-pp{len(self.stages)}" if self.stages else ""
        return f"tp{self.tp}{dealt}{stages}-{self.layout}-{self.block_size}"

    @property
    def engine(self) -> EngineShape:
        return EngineShape(self.tp, self.dcp, self.dcp_interleave, self.stages, self.draft_tp)

    def shape(self, make: MakeSpecs) -> Shape:
        return _Shape(
            make=make,
            shapes=(self.engine,) * 2,
            layouts=(self.layout,) * 2,
            block_sizes=(self.block_size,) * 2,
            state_block_sizes=(self.state_block_size,) * 2,
            num_blocks=(self.num_blocks,) * 2,
            drafts=(DRAFTS if self.drafter else {},) * 2,
            drafters=(self.drafter,) * 2,
            draft_tp=(self.draft_tp,) * 2,
        )


@dataclass(frozen=True, kw_only=True)
class _Shape(Shape):
    make: MakeSpecs = FAMILIES["full"]

    def specs(self, side: int) -> Specs:
        return self.make(self.block_sizes[side], self.state_block_sizes[side])


def random_values(make: MakeSpecs, num_tokens: int, seed: int = 0, *, drafts: bool = False) -> Values:
    """Bytes of all live rows, whatever they mean: a position's are the same in a longer sequence."""
    content = {}
    for (layer, part), spec in (make(16, 16) | (DRAFTS if drafts else {})).items():
        live = spec.live_rows(num_tokens)
        for index, f in enumerate(spec.fields()):
            rng = np.random.default_rng([seed, layer, index, part == "state"])
            made = rng.integers(0, 256, (num_tokens, f.units, f.row_bytes), dtype=np.uint8)[live.start :]
            content[layer, part, f.name] = torch.from_numpy(made.transpose(1, 0, 2).copy())
    return Values(num_tokens, content)


class ByteEngine(Engine):
    """Sees bytes, whatever their fields' types are."""

    name = ""

    def views(self, rank: int, group: KVCacheGroup, layer: int) -> list[FieldView]:
        bound = self.caches[rank].view(layer, group.spec.part)
        views, starts = [], dict.fromkeys((f.bundle for f in group.spec.fields()), 0)
        for f in group.spec.fields():
            whole = bound if isinstance(bound, torch.Tensor) else bound[f.bundle]
            start, starts[f.bundle] = starts[f.bundle], starts[f.bundle] + f.row_bytes
            view = whole.view(torch.uint8)[..., start : start + f.row_bytes]
            is_draft = group.rides is not None
            views.append(FieldView(f.name, view, tuple(self.units(f, rank, is_draft=is_draft))))
        return views

    @property
    def tp(self) -> int:
        """Ranks of the engine."""
        return len(self.caches)

    def poison(self) -> None:
        for caches in self.caches:
            caches.buffer[: caches.geometry.pages_bytes].fill_(POISON)


@dataclass(eq=False)
class Loaded:
    """What came of a load."""

    answer: LoadAnswer
    tables: Tables
    outcomes: dict[int, TransferOutcome]

    @property
    def errors(self) -> list[Exception | None]:
        return [self.outcomes[rank].error for rank in sorted(self.outcomes)]


@dataclass(eq=False)
class BareNode:
    """Engines of one family around a host tier."""

    make: MakeSpecs
    settings: OffloadSettings
    wrap: Callable[[str, TransferAgent], TransferAgent] = lambda name, agent: agent
    """Of each agent, by name."""
    delay_polls: int = 0
    clock: Callable[[], int] = time.monotonic_ns
    folder: Path | None = None
    """Of the disk tier; None: there is none."""
    device: torch.device = torch.device("cpu")
    """Of the engines' caches."""
    token_classes: TokenClasses = ONE_CLASS
    """Of all engines that will be added."""
    drafter: str = ""
    """Of the tier; empty: it keeps no draft layers."""
    network: LocalNetwork = field(default_factory=LocalNetwork)
    engines: dict[str, ByteEngine] = field(default_factory=dict)
    _tier: HostTier | None = None
    _ids: Any = field(default_factory=itertools.count)

    @property
    def tier(self) -> HostTier:
        assert self._tier is not None
        return self._tier

    def agent(self, name: str) -> TransferAgent:
        return self.wrap(name, LocalAgent(name, self.network, self.delay_polls))

    def add(self, kind: Kind, name: str = "", epoch: int = 0) -> ByteEngine:
        """Make an engine and attach it; the first one says what the tier is like."""
        name = name or str(kind)
        shape = kind.shape(self.make)
        engine = ByteEngine(shape, 0)
        engine.name = name
        groups = shape.groups(0)
        for rank in range(kind.engine.num_ranks):
            geometry = plan_rank(
                groups,
                LAYOUTS[kind.layout],
                shape=kind.engine,
                rank=rank,
                num_blocks=kind.num_blocks,
            )
            caches = allocate(geometry, self.device, fill=POISON)
            agent = self.agent(f"{name}/{epoch}.{rank}")
            told = describe_cache(
                agent,
                caches,
                engine=name,
                epoch=epoch,
                fingerprint=FINGERPRINT,
                token_classes=self.token_classes,
            )
            engine.caches.append(caches)
            engine.agents.append(agent)
            made = TransferRank(agent, caches, list(layer_views(caches)), told, clock=self.clock)
            engine.ranks.append(made)
        if self._tier is None:
            self._open(engine)
        self.attach(engine)
        return engine

    def _open(self, like: ByteEngine) -> None:
        size = self.settings.block_size
        groups = group_layers(self.make(size, 1 << 40))
        rows = max((g.spec.block_size for g in groups if g.spec.has_token_rows), default=size)
        groups = group_layers(self.make(size, self.settings.state_block_size or rows))
        if self.drafter:
            groups = add_riders(groups, Riders(DRAFTS, drafter=self.drafter))
        pages = None
        told = like.descriptions[0]
        if self.folder is not None:
            identity = identity_of(groups, told, "float32")
            pages = DiskPages(DiskTier(self.folder, identity, self.settings.disk_bytes))
        parts = TierParts.open(self.agent("tier"), groups, told, self.settings, pages=pages, clock=self.clock)
        tier = HostTier(parts, self.settings, pages=pages, clock=self.clock)
        tier.caches.buffer[: tier.caches.geometry.pages_bytes].fill_(POISON)
        self._tier = tier

    def attach(self, engine: ByteEngine) -> None:
        self.tier.attach(engine.descriptions)
        for rank in engine.ranks:
            rank.connect([self.tier.description], engine.descriptions)
        self.engines[engine.name] = engine

    @property
    def unit_tokens(self) -> int:
        """Prefixes are found that are multiples of it."""
        assert self.tier.manager.prefixes is not None
        return self.tier.manager.prefixes.unit_tokens

    def whole(self, num_tokens: int) -> int:
        """So many tokens or the next more that the tier finds again."""
        return -(-num_tokens // self.unit_tokens) * self.unit_tokens

    # Stores.

    def ticket(
        self,
        engine: ByteEngine,
        tables: Tables,
        num_tokens: int,
        first_row: int = 0,
        draft_row: int = 0,
    ) -> TransferTicket:
        """Of blocks that hold a request's rows, under a lease of their own."""
        name = f"{engine.name}/store{next(self._ids)}"
        for rank in engine.ranks:
            rank.lease(name, self.clock() + 60_000_000_000)
        digests = [rank.digests(num_tokens, tables, first_row) for rank in engine.ranks]
        ticket = engine.ranks[0].make_ticket(
            request_id=name, lease_id=name, num_tokens=num_tokens, block_tables=tables, digests=digests
        )
        return sealed(replace(ticket, first_row=first_row, draft_row=draft_row))

    def begin_store(
        self, engine: ByteEngine, ticket: TransferTicket, tokens: Sequence[int], **how: Any
    ) -> list[StoreAnswer]:
        """A list that the answer comes into."""
        found: list[StoreAnswer] = []
        self.tier.store(StoreRequest(ticket=ticket, token_ids=tuple(tokens), **how), found.append)
        return found

    def store(
        self, engine: ByteEngine, values: Values, tokens: Sequence[int], seed: int = 0, **how: Any
    ) -> StoreAnswer:
        """Write values at an engine, store them, and see that its blocks are given back."""
        tables = engine.tables(values.num_tokens, seed)
        engine.write(values, tables)
        ticket = self.ticket(engine, tables, values.num_tokens)
        found = self.begin_store(engine, ticket, tokens, **how)
        self.turn_until(lambda: bool(found), engine)
        self.expect_released(engine, ticket.lease_id)
        return found[0]

    def expect_released(self, engine: ByteEngine, lease_id: str) -> None:
        """Every rank may free what it leased."""
        free: list[list[str]] = [[] for _ in engine.ranks]

        def are_free() -> bool:
            for known, rank in zip(free, engine.ranks, strict=True):
                known += rank.released()
            return all(lease_id in known for known in free)

        self.turn_until(are_free, engine)

    # Loads.

    def ask(self, engine: ByteEngine, tokens: Sequence[int] = (), **how: Any) -> LoadAnswer:
        """What the tier offers."""
        found: list[LoadAnswer] = []
        name = f"{engine.name}/load{next(self._ids)}"
        limits = {"max_tokens": len(tokens), **how}
        self.tier.load(LoadRequest(request_id=name, token_ids=tuple(tokens), **limits), found.append)
        self.turn_until(lambda: bool(found), engine)
        return found[0]

    def take(self, engine: ByteEngine, answer: LoadAnswer, seed: int = 0, *, settle: bool = True) -> Loaded:
        """Have all ranks read what is offered into blocks of their own."""
        ticket = answer.ticket
        assert ticket is not None, f"a miss: {answer.reason}"
        tables = engine.tables(ticket.num_tokens, seed)
        engine.poison()
        for rank in engine.ranks:
            rank.start(ticket, tables, self.clock() + 60_000_000_000, ticket.first_row)
        outcomes: dict[int, TransferOutcome] = {}
        self.turn_until(lambda: len(outcomes) == engine.tp, engine, outcomes)
        for rank in engine.ranks:
            rank.release_now(ticket.request_id)
        self.turn_until(lambda: ticket.lease_id not in self.tier.manager.leases, engine)
        return Loaded(answer, tables, outcomes)

    def load(self, engine: ByteEngine, tokens: Sequence[int] = (), seed: int = 0, **how: Any) -> Loaded:
        """Ask and take."""
        return self.take(engine, self.ask(engine, tokens, **how), seed)

    # Time.

    def turn(self, engine: ByteEngine, outcomes: dict[int, TransferOutcome] | None = None) -> None:
        now = self.clock()
        for index, rank in enumerate(engine.ranks):
            for outcome in rank.poll(now):
                if outcomes is not None:
                    outcomes[index] = outcome
        self.tier.turn()

    def turn_until(
        self,
        condition: Callable[[], bool],
        engine: ByteEngine,
        outcomes: dict[int, TransferOutcome] | None = None,
    ) -> None:
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, "it never came"
            self.turn(engine, outcomes)

    # The tier's own pages.

    def check_tier(self, values: Values, answer: LoadAnswer) -> None:
        """What lies in the tier's blocks, seen as an engine of its layout would."""
        assert answer.ticket is not None
        kind = Kind(tp=1, layout=self.settings.layout, block_size=self.settings.block_size)
        seen = ByteEngine(kind.shape(self.make), 0, caches=[self.tier.caches])
        seen.check(values, [list(table) for table in answer.ticket.block_tables])

    def expect_idle(self) -> None:
        """Nothing is on its way, and every block is free."""
        tier = self.tier
        tier.check_integrity()
        assert not tier.is_busy
        assert tier.manager.pool.num_free_blocks == tier.manager.pool.num_blocks - 1
        assert tier.manager.leases == ()


def open_node(family: str | MakeSpecs, *, num_blocks: int = 64, **changes: Any) -> BareNode:
    """A tier of so many blocks; `changes`: of its settings, or of the node."""
    make = FAMILIES[family] if isinstance(family, str) else family
    own = {name: changes.pop(name) for name in OF_NODE if name in changes}
    settings = OffloadSettings(host_bytes=1, **changes)
    size = settings.block_size
    groups = group_layers(make(size, settings.state_block_size or size))
    if own.get("drafter"):
        groups = add_riders(groups, DRAFTS)
    one = plan_rank(groups, LAYOUTS[settings.layout], num_blocks=2).block_bytes
    return BareNode(make, replace(settings, host_bytes=num_blocks * one), **own)


def tokens_of(sequence: int, num_tokens: int) -> tuple[int, ...]:
    """Tokens that share no block with another sequence's."""
    return tuple(sequence * 10_000 + i for i in range(num_tokens))
