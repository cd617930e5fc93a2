"""Rank 0's stores: which of a request's blocks go to the host tier, when, and until when they are held.

A store is deferred: its blocks are shared with a lease of their own while the request goes on, it begins when
its turn comes, ranks digest it beside their steps, and the tier reads it without them. Where blocks are
short, stores that were not begun are dropped.

Where ranks have an outbox, a store begins when that has room for it, ranks copy its blocks there, and these
are free from then on: the tier reads the outbox. A store that is larger than the outbox goes in parts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayk.handover.commands import EndLease, MakeStore, TicketPart
from rayk.handover.pending_store import PendingStore
from rayk.handover.tickets import make_ticket
from rayk.handover.tier_side import TierSide
from rayk.offload.messages import StoreAnswer, StoreRequest
from rayk.offload.outbox import outbox_name
from rayk.transfer.handshake import row_group_blocks
from rayk.types.errors import RaykError

if TYPE_CHECKING:
    from rayk.handover.commands import RankNews
    from rayk.sched.request_state import RequestState

ACTIVE_STORES = 4
"""Stores of one engine that the tier is at, or ranks digest. A loop looks at each only between its steps, a
few times in a store's life: one alone would wait most of the time."""
ACTIVE_BYTES = 32 << 20
"""Bytes of theirs; a larger one goes alone: two would take both cores of a small machine from the steps."""
RECENT_STORES = 64  # so many are told with their times
SLACK_S = 5.0  # the tier keeps its deadline; one that says nothing for so much longer is not waited for


class Storing:
    def __init__(self, side: TierSide) -> None:
        self._side = side
        self._queued: deque[PendingStore] = deque()
        self._stores: dict[str, PendingStore] = {}  # all that hold blocks
        self._begun: dict[str, PendingStore] = {}  # those that were not answered yet
        self._asked: dict[str, int] = {}
        """Request -> tokens that a store was begun of, whatever came of it: to try again at each step what
        was refused would digest it all at each step."""
        self._stored: dict[str, int] = {}  # request -> tokens that the tier is known to have had
        self.last_failure = ""  # why the last store that failed did
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=RECENT_STORES)
        """The last ones that moved anything: when they began and ended by the monotonic clock, and bytes."""

    @property
    def open_stores(self) -> tuple[str, ...]:
        """Names of stores that hold blocks."""
        return tuple(self._stores)

    @property
    def in_outboxes(self) -> tuple[str, ...]:
        """Names of stores whose blocks are free, but which the tier still reads from outboxes."""
        return tuple(name for name, store in self._stores.items() if store.has_left)

    def num_stored(self, request_id: str) -> int:
        """First tokens of a request that the tier is known to have had."""
        return self._stored.get(request_id, 0)

    def note_stored(self, request_id: str, num_tokens: int) -> None:
        """The tier has so many: they came from there."""
        self._stored[request_id] = self._asked[request_id] = num_tokens

    def computed(self, state: RequestState) -> None:
        """The request's blocks are all still there."""
        if self._side.tier is not None and self._side.settings.store:
            self._offer(state)
        if state.finish_reason is not None:
            self.left(state.request_id)

    def _offer(self, state: RequestState) -> None:
        side = self._side
        num_tokens, is_over = state.num_computed, state.finish_reason is not None
        asked, num_prompt = self._asked.get(state.request_id, 0), state.num_prompt
        is_new = num_tokens - asked >= side.settings.store_tokens
        is_prompt = asked < self._whole(num_prompt) and num_prompt <= num_tokens
        whole = self._whole(num_tokens)
        if whole > asked and (is_over or is_new or is_prompt):
            self._put_aside(state, whole)

    def drop(self, request_id: str) -> None:
        """What was computed for a request is worth nothing: no store of it begins, or goes on."""
        for store in [s for s in self._queued if s.request_id == request_id]:
            self.end(store.name)
        for name in [s.name for s in self._begun.values() if s.request_id == request_id]:
            self._answered(StoreAnswer(name=name, reason="what was computed for its request is not finite"))
        self.left(request_id)

    def left(self, request_id: str) -> None:
        """Forget a request that computes no more here."""
        self._asked.pop(request_id, None)
        self._tidy(request_id)

    def put(self, store: PendingStore, parts: Sequence[PendingStore] = ()) -> None:
        """Store what a lease of its name holds, at once, or as soon as outboxes have room. `parts`: go before
        it, see `split`."""
        if self._side.outbox is None:
            self._stores[store.name] = store
            self._begin(store)
            return
        urgent = (*parts, store)
        for one in urgent:
            one.is_urgent = True
            self._stores[one.name] = one
        self._queued.extendleft(reversed(urgent))

    def turn(self) -> None:
        """Called before each turn, it begins stores, or drops those in the way."""
        late_ns = self._side.leader.clock() - int((self._side.settings.transfer_s + SLACK_S) * 1e9)
        for store in [s for s in self._begun.values() if s.began_ns < late_ns]:
            self._answered(StoreAnswer(name=store.name, reason="the host tier does not answer"))
        if self._side.leader.scheduler.is_short_of_blocks:
            for store in [s for s in self._queued if not s.is_urgent]:
                self._side.counts["stores_dropped"] += 1
                self._asked.pop(store.request_id, None)
                self.end(store.name)
        busy = {s.request_id for s in self._begun.values()}
        for store in list(self._queued):
            if store.request_id in busy:
                continue
            if store.on_kept is None and not self._rows_of(store):
                self.end(store.name)  # a part that was stored meanwhile, for a store that is over
                continue
            if not self._has_room_for(store):
                break
            self._queued.remove(store)
            self._begin(store)
            busy.add(store.request_id)

    def _has_room_for(self, store: PendingStore) -> bool:
        """Tell whether it may begin beside those that have begun. One that no outbox can hold may, and is
        refused."""
        outbox = self._side.outbox
        if outbox is not None:
            needed = outbox.num_needed(store.tables, self._rows_of(store))
            if outbox.pool.num_free_blocks < needed <= outbox.num_blocks:
                return False
        if store.is_urgent:
            return True
        known = [self._new_bytes(s) for s in self._begun.values()]
        small = sum(known) + self._new_bytes(store) <= ACTIVE_BYTES
        return not known or (small and len(known) < ACTIVE_STORES)

    def _new_bytes(self, store: PendingStore) -> int:
        """Count the bytes of it that the tier is not known to have."""
        return self._side.bytes_of(store.num_tokens, self.num_stored(store.request_id))

    def on_refused(self, command: MakeStore, error: RaykError | None) -> None:
        """A rank cannot do what it was told, if there is an error."""
        if error is not None:
            self._answered(StoreAnswer(name=command.name, reason=str(error)))

    def on_news(self, rank: int, news: RankNews) -> None:
        """Digests of stores, and leases that are over at a rank."""
        for name, part in news.stored:
            self._on_part(rank, name, part)
        for name, why in news.unstored:
            self._answered(StoreAnswer(name=name, reason=f"rank {rank} could not digest it: {why}"))
        for lease_id in news.released:
            store = self._stores.get(lease_id)
            if store is not None and store.released.add(rank, True):
                self.end(lease_id)
        for lease_id in news.expired:
            if lease_id in self._stores:
                self._side.counts["stores_expired"] += 1
                self.end(lease_id)

    def end(self, name: str) -> None:
        """Free a store's blocks, those of outboxes, too."""
        store = self._stores.pop(name, None)
        if store is None:
            return
        if store in self._queued:
            self._queued.remove(store)
        self._record(store)
        self._give_back(store)
        self._tidy(store.request_id)
        self._leave(store)

    def _leave(self, store: PendingStore) -> None:
        """Free the engine's own blocks of a store. Once is enough."""
        if store.has_left:
            return
        store.has_left = True
        self._side.leader.manager.release(store.name)
        if store.on_free is not None:
            store.on_free(store)

    def _give_back(self, store: PendingStore) -> None:
        tables, store.outbox_tables = store.outbox_tables, None
        if tables is not None and self._side.outbox is not None:
            self._side.outbox.give_back(tables)

    def _record(self, store: PendingStore) -> None:
        """A store is over when it was answered and its blocks are held no longer, whichever is later."""
        if store.num_bytes and store.name not in self._stores:
            self.recent.append((store.began_ns, self._side.leader.clock(), store.num_bytes))

    def end_all(self) -> None:
        """End every store: there is no tier any more."""
        self._queued.clear()
        for name in list(self._stores):
            self.end(name)
        for known in (self._begun, self._asked, self._stored):
            known.clear()

    def clear(self) -> None:
        """Forget everything: the engine is going down, and its blocks go with it."""
        self._queued.clear()
        for known in (self._stores, self._begun, self._asked, self._stored):
            known.clear()

    def _whole(self, num_tokens: int) -> int:
        """Return the most of so many tokens that can be stored so as to be found: a whole number of the
        tier's blocks, at the end of a block of states, which is written no longer then."""
        unit = self._whole_unit
        return num_tokens // unit * unit

    @property
    def _whole_unit(self) -> int:
        groups = self._side.leader.manager.groups
        sizes = [g.spec.block_size for g in groups if not g.spec.has_token_rows]
        return math.lcm(self._side.facts.unit_tokens, *sizes)

    def _put_aside(self, state: RequestState, num_tokens: int) -> None:
        """Share the request's blocks with a store that begins when its turn comes."""
        side, request_id = self._side, state.request_id
        manager = side.leader.manager
        pending = sum(s.num_blocks for s in self._stores.values())
        if pending > side.settings.pending_share * manager.pool.num_blocks:
            side.counts["stores_put_off"] += 1
            return
        for queued in [s for s in self._queued if s.request_id == request_id]:
            self.end(queued.name)  # this one has all of its rows
        self._asked[request_id] = num_tokens
        parts = self.split(state, num_tokens)
        if parts is None:
            side.counts["stores_too_large"] += 1
            self.last_failure = f"{num_tokens} tokens do not fit into outboxes, nor do parts of them"
            return
        store = self._share(state, num_tokens)
        if store is None:
            side.counts["stores_too_late"] += 1
        else:
            parts.append(store)
        for one in parts:
            self._stores[one.name] = one
            self._queued.append(one)

    def split(self, state: RequestState, num_tokens: int) -> list[PendingStore] | None:
        """Share the request's blocks with stores of parts that outboxes can hold, one after the other: all
        but the last part, which is of all tokens. None where no parts can be held: layers with windows or
        states lack rows of earlier tokens."""
        outbox = self._side.outbox
        if outbox is None:
            return []
        unit = math.lcm(self._whole_unit, self._row_unit)
        known = min(self.num_stored(state.request_id), num_tokens) // unit * unit
        parts = list(outbox.parts(range(known, num_tokens), unit))
        if not all(map(outbox.can_hold, parts)):
            return None
        made = [self._share(state, part.stop) for part in parts[:-1]]
        found = [store for store in made if store is not None]
        if len(found) == len(made):
            return found
        for store in found:
            self._side.leader.manager.release(store.name)
        return None

    def _share(self, state: RequestState, num_tokens: int) -> PendingStore | None:
        """Share the request's blocks with a store of its first tokens; None where rows of theirs are gone."""
        side, request_id = self._side, state.request_id
        name = side.new_name("store", request_id)
        tables = side.leader.manager.share_lease(request_id, name, num_tokens)
        if tables is None:
            return None
        what = name, request_id, num_tokens, tables, tuple(state.tokens[:num_tokens]), side.num_ranks
        return PendingStore(
            *what,
            cache_salt=state.request.cache_salt,
            next_token=state.token_at(num_tokens),
            draft_row=side.leader.manager.first_draft_row(name),
        )

    def _rows_of(self, store: PendingStore) -> range:
        """Return the rows of a store that the tier is not known to have: whole row groups."""
        known = min(self.num_stored(store.request_id), store.num_tokens)
        return range(known // self._row_unit * self._row_unit, store.num_tokens)

    @property
    def _row_unit(self) -> int:
        side = self._side
        return math.lcm(row_group_blocks(side.leader.manager.groups), side.facts.row_unit_tokens)

    def _begin(self, store: PendingStore) -> None:
        side, rows = self._side, self._rows_of(store)
        store.first_row = rows.start
        store.began_ns = side.leader.clock()
        self._begun[store.name] = store
        if side.outbox is not None:
            needed, there = side.outbox.num_needed(store.tables, rows), side.outbox.num_blocks
            if needed > there:
                why = f"it takes {needed} blocks of outboxes that have {there} (offload.outbox_mib)"
                self._answered(StoreAnswer(name=store.name, reason=why))
                return
            store.outbox_tables = side.outbox.take(store.tables, rows)
        what = store.num_tokens, store.tables, store.first_row, store.outbox_tables
        side.commands.append(MakeStore(store.name, store.name, *what))

    def _on_part(self, rank: int, name: str, part: TicketPart) -> None:
        """A rank has digested its share: with the last one the ticket goes to the tier."""
        side, store = self._side, self._begun.get(name)
        if store is None or side.tier is None:
            return
        if not store.parts.add(rank, part):
            return
        tables, engine = store.tables, side.engine
        if store.outbox_tables is not None:
            tables, engine = store.outbox_tables, outbox_name(engine)
            self._leave(store)
        ticket = make_ticket(
            store.parts.in_order(),
            request_id=store.name,
            lease_id=store.name,
            engine=engine,
            epoch=side.epoch,
            num_tokens=store.num_tokens,
            block_tables=tables,
            first_row=store.first_row,
            draft_row=store.draft_row,
        )
        ask = StoreRequest(
            ticket=ticket,
            token_ids=store.token_ids,
            next_token=store.next_token,
            cache_salt=store.cache_salt,
            keep_as=store.name if store.on_kept is not None else None,
            deadline_s=side.settings.transfer_s,
        )
        side.tier.store(ask, self._answered)

    def _answered(self, answer: StoreAnswer) -> None:
        side, store = self._side, self._begun.pop(answer.name, None)
        if store is None:
            if answer.ok and side.tier is not None:
                side.tier.drop(answer.name)  # nobody waited; what is not kept by name is none of this
            return
        if answer.ok:
            side.counts["stores"] += 1
            side.counts["stored_bytes"] += answer.num_bytes
            store.num_bytes = answer.num_bytes
            self._record(store)
            if answer.num_bytes:
                side.costs.observe_out(answer.num_bytes, side.leader.clock() - store.began_ns)
            if store.request_id in self._asked or self._has_open(store.request_id):
                known = self.num_stored(store.request_id)
                self._stored[store.request_id] = max(answer.num_tokens, known)
        else:
            self._failed(store, answer.reason)
        if store.on_kept is not None:
            store.on_kept(store, answer)

    def _failed(self, store: PendingStore, why: str) -> None:
        """The next store of its request has all of the rows, and comes when there are so many more."""
        side = self._side
        side.counts["stores_failed"] += 1
        self.last_failure = why
        self._stored.pop(store.request_id, None)
        if store.first_row:
            self._asked.pop(store.request_id, None)  # what it built on may be gone: at once, once, without
        if not store.parts.is_complete:
            side.commands.append(EndLease(store.name))  # the tier, which would release it, has no ticket
        self.end(store.name)

    def _tidy(self, request_id: str) -> None:
        """Forget what is known of a request that computes no more and has nothing to be stored."""
        if not self._has_open(request_id) and request_id not in self._asked:
            self._stored.pop(request_id, None)

    def _has_open(self, request_id: str) -> bool:
        return any(s.request_id == request_id for s in self._stores.values())
