"""A host tier between simulated engines: the real one's index, room and choices, over reads that take time.

It is a process of its own, with one thread: what is asked of it waits for what it does, and a read that it
copies itself takes its time. Nothing is kept but names: no page, no digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from rayk.costs.table import EngineCosts
from rayk.handover.commands import EndLease, HoldTicket, LetGo, RankNews, StartRead
from rayk.handover.tier_side import TierFacts, facts_of
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import plan_engine
from rayk.models.kv_specs import engine_groups, tier_engine
from rayk.offload.geometry import tier_geometry
from rayk.offload.host import HostTier
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.tier_parts import TierParts
from rayk.simulate.clock import TURNS, Event, EventQueue, LocalClock
from rayk.simulate.engine import SimEngine
from rayk.simulate.extension import SimExtension
from rayk.simulate.network import SimNetwork
from rayk.simulate.outcome import SimEngineAccount
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.ticket import TransferTicket
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings

EPOCH = 1
_NO_NEWS = RankNews((), (), (), ())


class SimTierProcess:
    """The host tier of all engines of one machine. Implements simulate.extension.ExtensionHost."""

    name, role, epoch = TIER, TIER, EPOCH

    def __init__(
        self,
        world: EventQueue,
        network: SimNetwork,
        engine: EngineConfig,
        model: DecoderConfig,
        settings: OffloadSettings,
        costs: EngineCosts,
        *,
        secret: bytes,
        gap_ns: Callable[[], int],
    ) -> None:
        """`engine`: one of those whose KV it keeps. `costs`: what checks take on its machine. `gap_ns` tells
        how long an ask or an answer is on its way. Raises UserError."""
        self.config = tier_engine(engine, model, settings)
        self.clock = LocalClock(world)
        self.costs = costs
        self.account = SimEngineAccount()
        self.gap_ns = gap_ns
        self.world = world
        groups = engine_groups(self.config, model)
        geometry = tier_geometry(groups, settings)
        self.manager = KVCacheManager(groups, geometry.num_blocks, prefix_caching=True, secret=secret)
        self.extension = SimExtension(self, network)
        self.rank = _TierRank(self.extension, self.clock)
        parts = TierParts(
            caches=cast("Any", SimpleNamespace(geometry=geometry, is_pinned=False)),
            manager=self.manager,
            digests=cast("Any", _NoDigests()),
            rank=cast("Any", self.rank),
            description=cast("Any", SimpleNamespace(engine=TIER, epoch=EPOCH)),
        )
        self.tier = HostTier(parts, settings, clock=self.clock)
        self._model = model
        self._inbox: deque[Callable[[], object]] = deque()
        self._next: Event | None = None  # the turn that is planned
        self._order = world.enlist()

    @property
    def facts(self) -> TierFacts:
        return facts_of(self.tier)

    def attach(self, engine: SimEngine) -> None:
        """An engine's life begins, which has this tier."""
        ranks = plan_engine(engine.config, self._model).ranks
        each = [SimpleNamespace(engine=engine.name, epoch=engine.epoch, geometry=rank) for rank in ranks]
        self.tier.attach(cast("Any", each))
        offloading = engine.handover.offloading
        assert offloading is not None, "an engine without offloading"
        offloading.attach(SimTier(self, engine), self.facts)

    def detach(self, engine: SimEngine) -> None:
        """An engine died."""
        self.post(partial(self._detach, engine.name, engine.epoch))

    def _detach(self, name: str, epoch: int) -> None:
        if self.rank.epochs.get(name) == epoch:
            self.tier.detach(name)

    def post(self, action: Callable[[], object]) -> None:
        """Do something in the next turn, in the order of such calls."""
        self._inbox.append(action)
        self.wake()

    # simulate.extension.ExtensionHost.

    def work(self, length_ns: float) -> int:
        """Take time."""
        took_ns = round(length_ns)
        self.clock.advance(took_ns)
        return took_ns

    def wake(self, at_ns: int = 0) -> None:
        """Take a turn as soon as the one under way has ended, and not before `at_ns`."""
        at_ns = max(at_ns, self.clock.end_ns)
        if self._next is not None:
            if self._next.at_ns <= max(at_ns, self.world.now_ns):
                return
            self.world.cancel(self._next)
        self._next = self.world.at(at_ns, self._turn, TURNS + self._order)

    def cut_span(self) -> None:
        """Do nothing: its turns are taken singly."""

    def _turn(self) -> None:
        self._next = None
        self.clock.begin_turn()
        inbox, self._inbox = self._inbox, deque()
        for action in inbox:
            action()
        self.tier.turn()
        self.clock.end_turn()

    def check_over(self) -> None:
        """Raise AssertionError unless nobody holds anything here."""
        assert not self.tier.is_busy, "the host tier waits for something"


class SimTier:
    """The tier as one life of an engine reaches it. Implements handover.tier_side.Tier."""

    def __init__(self, process: SimTierProcess, engine: SimEngine) -> None:
        self._process, self._engine = process, engine

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None:
        self._ask(lambda tier: tier.store(ask, partial(self._answer, done)))

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None:
        self._ask(lambda tier: tier.load(ask, partial(self._answer, done)))

    def drop(self, kept_as: str) -> None:
        self._ask(lambda tier: tier.drop(kept_as))

    def doubt(self, ticket: TransferTicket) -> None:
        """Do nothing: no page changes here."""

    def _ask(self, action: Callable[[HostTier], object]) -> None:
        at_ns = self._engine.clock() + self._process.gap_ns()
        self._process.world.at(at_ns, partial(self._reach, action))

    def _reach(self, action: Callable[[HostTier], object]) -> None:
        """The tier has the ask."""
        self._process.post(partial(action, self._process.tier))

    def _answer(self, done: Callable[[Any], None], answer: StoreAnswer | LoadAnswer) -> None:
        at_ns = self._process.clock() + self._process.gap_ns()
        self._process.world.at(at_ns, partial(self._return, done, answer))

    def _return(self, done: Callable[[Any], None], answer: StoreAnswer | LoadAnswer) -> None:
        """The engine has the answer."""
        if not self._engine.is_dead:
            self._engine.leader.post(partial(done, answer))


class _TierRank:
    """Implements what HostTier needs of a TransferRank."""

    def __init__(self, extension: SimExtension, clock: LocalClock) -> None:
        self.epochs: dict[str, int] = {}  # of the engines that it is connected to
        self._extension = extension
        self._clock = clock
        self._news = _NO_NEWS

    def connect(self, producers: Sequence[Any], consumers: Sequence[Any], **link: Any) -> None:
        """Note the engine's life: links need no making."""
        del consumers, link
        if producers[0].engine != TIER:
            self.epochs[producers[0].engine] = producers[0].epoch

    def disconnect(self, link: str) -> None:
        engine = link.partition("~")[0]
        epoch = self.epochs.pop(engine, None)
        if epoch is not None:
            self._extension.end_reads(engine, epoch)

    def plan(self, engine: str) -> SimpleNamespace:
        """Nothing is left out: no engine that has a simulated tier has a drafter on its ranks."""
        del engine
        return SimpleNamespace(left_out=())

    def bump_generations(self, block_ids: Sequence[int]) -> None:
        self._extension.blocks_assigned(block_ids)

    def start(
        self, ticket: TransferTicket, tables: Sequence[Sequence[int]], deadline_ns: int, first_row: int
    ) -> None:
        """Begin to read; what is refused is told by `poll`."""
        ticket = replace(ticket, engine=ticket.engine.partition("~")[0])
        handed_out = frozenset(block for table in tables for block in table)  # by the tier itself, before
        left_s = (deadline_ns - self._clock()) / 1e9
        where = tuple(map(tuple, tables))
        self._extension.execute(StartRead(ticket, where, left_s, first_row, handed_out))

    def hold(self, ticket: TransferTicket) -> None:
        self._extension.execute(HoldTicket(replace(ticket, engine=ticket.engine.partition("~")[0])))

    def let_go(self, request_id: str) -> None:
        self._extension.execute(LetGo(request_id))

    def release_now(self, request_id: str) -> None:
        """Do nothing: nothing differs here."""

    def lease(self, lease_id: str, deadline_ns: int) -> None:
        self._extension.lease(lease_id, deadline_ns)

    def end_lease(self, lease_id: str) -> None:
        self._extension.execute(EndLease(lease_id))

    def make_ticket(
        self, *, block_tables: Sequence[Sequence[int]], digests: Sequence[Any], **fields: Any
    ) -> TransferTicket:
        tables = tuple(map(tuple, block_tables))
        return TransferTicket(
            engine=TIER,
            epoch=EPOCH,
            block_tables=tables,
            generations=tuple(map(self._extension.generations, tables)),
            digests=np.stack(digests),
            **fields,
        )

    def poll(self, now_ns: int) -> Sequence[TransferOutcome]:
        del now_ns
        self._news = self._extension.poll() or _NO_NEWS
        return self._news.outcomes

    def drained(self) -> Sequence[str]:
        return self._news.drained

    def released(self) -> Sequence[str]:
        return self._news.released

    def expired(self, now_ns: int) -> Sequence[str]:
        del now_ns
        return self._news.expired


class _NoDigests:
    """Implements what HostTier needs of BlockDigests, of pages that nobody looks at."""

    def forget(self, block_ids: Sequence[int]) -> None:
        """Do nothing: none are kept."""

    def find_changed_in(self, tables: Sequence[Sequence[int]]) -> Collection[int]:
        del tables
        return ()

    def find_changed(
        self, tables: Sequence[Sequence[int]], num_tokens: int, first_row: int = 0
    ) -> Collection[int]:
        del tables, num_tokens, first_row
        return ()

    def recall(self, tables: Sequence[Sequence[int]], num_tokens: int, first_row: int = 0) -> Any:
        del tables, num_tokens, first_row
        return np.zeros(0, dtype=np.int64)
