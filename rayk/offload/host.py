"""The host tier: canonical pages in host memory, found by the tokens in them, shared by engines of any kind.

It is an engine without a model. Its cache is that of an imaginary rank that holds everything (TP 1, blocks
outermost, heads next): a block is the canonical page of its layers. It reads from engines' ranks to store,
and engines' ranks read from it to load, by the plans, leases, generations and digests of any other transfer;
so whatever TP size, layout or block size stored a page, any other loads it, and nothing is kept that was not
proven. Its index is a prefix cache; its least recently used blocks go first.

All on one thread: calls return at once, answers come out of `turn`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from rayk.kv.manager import FoundPrefix
from rayk.offload.disk import status_without
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.outbox import outbox_name
from rayk.offload.pages import DiskPages, HostBlocks
from rayk.offload.tier_parts import TierParts
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.handshake import CacheDescription, row_group_blocks
from rayk.transfer.peer_data import wrong_head
from rayk.transfer.plan import num_turns
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.ticket_seal import is_whole, sealed
from rayk.types.errors import KVMismatch, RaykError
from rayk.types.offload import OffloadSettings

LOG = logging.getLogger(__name__)
OnStored = Callable[[StoreAnswer], None]
OnLoaded = Callable[[LoadAnswer], None]
MAX_REREADS = 64
"""Pages of one load that may turn out damaged on disk before it is a miss: each is forgotten, and the search
begins again."""


@dataclass(slots=True)
class _RunningStore:
    """A store whose rows are being read."""

    ask: StoreRequest
    num_known_tokens: int
    began_ns: int
    done: OnStored
    failure: str = ""


@dataclass(slots=True)
class _RunningLoad:
    """A load that was not answered yet."""

    ask: LoadRequest
    began_ns: int
    done: OnLoaded
    num_rereads: int = 0
    num_disk_tokens: int = 0
    disk_bytes: int = 0
    lost: list[str] = field(default_factory=list)


class HostTier:
    """Its owner calls `turn` often while `is_busy`, and now and then otherwise."""

    def __init__(
        self,
        parts: TierParts,
        settings: OffloadSettings,
        *,
        pages: DiskPages | None = None,
        why_no_disk: str = "",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`pages`: the disk tier behind it. `why_no_disk`: why there is none where there was to be one."""
        self.settings = settings
        self._clock = clock
        self.caches, self.manager = parts.caches, parts.manager
        self.description, self.rank = parts.description, parts.rank
        self.pages = pages
        self._why_no_disk = why_no_disk
        self._digests = parts.digests
        self._blocks = HostBlocks(self.caches, self.manager, self._digests.find_changed_in)
        self._numbers = itertools.count()
        self._turns: dict[str, int] = {}  # engine -> links to it, of which each reads from other replicas
        self._reads: Counter[str] = Counter()  # engine -> stores that were read from it: the next one's turn
        self._epochs: dict[str, int] = {}
        self._storing: dict[str, _RunningStore] = {}
        self._loading: dict[str, _RunningLoad] = {}  # whose pages come from disk just now
        self._draining: dict[str, _RunningStore] = {}  # by lease
        self._lent: set[str] = set()  # leases of loads
        self._kept: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Name of a kept sequence -> the engine it is of, and its tokens."""
        self.counts: Counter[str] = Counter()  # since it began: bytes, tokens and events, by name

    # Engines.

    def attach(self, engine: Sequence[CacheDescription], outboxes: Sequence[CacheDescription] = ()) -> None:
        """Get ready to store what an engine computes, and to be read from by it: all of its ranks, in order,
        and their outboxes, where they have some. Raises HandshakeMismatch. `wire` it next, while both are
        polled."""
        self.detach(engine[0].engine)
        for producers in (engine, outboxes) if outboxes else (engine,):
            name, turns = producers[0].engine, num_turns([rank.geometry for rank in producers])
            for turn in range(turns):
                self.rank.connect(producers, [self.description], turn=turn, name=_link_name(name, turn))
            self._turns[name], self._epochs[name] = turns, engine[0].epoch
        self.rank.connect([self.description], engine)

    def wire(self, engine: str, timeout_s: float) -> bool:
        """Go on connecting to an engine; whether it is done. Raises TransferError after so long."""
        names = [name for name in (engine, outbox_name(engine)) if name in self._turns]
        return all(self.rank.wire(name, timeout_s) for name in names)

    def detach(self, engine: str) -> None:
        """An engine is gone: what is read from it fails, what it kept by name is dropped."""
        for name in (engine, outbox_name(engine)):
            for turn in range(self._turns.pop(name, 0)):
                self.rank.disconnect(_link_name(name, turn))
            self._epochs.pop(name, None)
        for kept in [k for k, (whose, _) in self._kept.items() if whose == engine]:
            self.drop(kept)

    # Stores.

    def store(self, ask: StoreRequest, done: OnStored) -> None:
        """`done` is called once, here or in `turn`."""
        storing = _RunningStore(ask, 0, self._clock(), done)
        ticket = ask.ticket
        name, engine = ticket.request_id, ticket.engine
        wrong = wrong_head(ticket)
        if wrong is not None:
            self._refuse(storing, wrong, can_release=False)
            return
        if not is_whole(ticket):
            self._refuse(storing, "its ticket was changed on the way", can_release=False)
            return
        if self._epochs.get(engine) != ticket.epoch or name in self._storing:
            self._refuse(storing, f"{engine} is not connected", can_release=False)
            return
        turn = self._reads[engine] % self._turns[engine]
        ticket = replace(ticket, engine=_link_name(engine, turn), seal="")
        storing.ask = ask = replace(ask, ticket=ticket)
        tokens, num_tokens = ask.token_ids, ticket.num_tokens
        if len(tokens) != num_tokens:
            self._refuse(storing, f"it has {len(tokens)} tokens, its ticket {num_tokens}")
            return
        if ask.keep_as is None and self._has_all(ask):
            storing.num_known_tokens = num_tokens
            self._let_go(ticket)
            self._stored(storing)
            return
        unit = row_group_blocks(self.manager.groups)
        drafts = not self.rank.plan(ticket.engine).left_out
        where = ask.known_tokens, num_tokens, unit, ask.cache_salt
        local_prefix = self.manager.find_local_prefix(name, *where, drafts=drafts)
        if local_prefix.num_tokens < ticket.first_row:
            self.manager.free(name)
            self._refuse(storing, f"the first {ticket.first_row} tokens are not here any more")
            return
        updates = self.manager.reserve_live(name, num_tokens, local_prefix)
        if updates is None:
            self.manager.free(name)
            self._refuse(storing, "no room: what is not being read, kept or part of it is too little")
            return
        tables = tuple(ids for _, ids in updates)
        here = {block for blocks in local_prefix.blocks for block in blocks}
        self._hand_out([b for table in tables for b in table if b and b not in here])
        storing.num_known_tokens = local_prefix.num_tokens
        self._storing[name] = storing
        deadline_ns = storing.began_ns + int(ask.deadline_s * 1e9)
        try:
            self.rank.start(ticket, tables, deadline_ns, local_prefix.num_tokens)
            self._reads[engine] += 1
        except RaykError as error:
            del self._storing[name]
            self.manager.free(name)
            self._refuse(storing, str(error), can_release=False)

    def drop(self, kept_as: str) -> None:
        """Nobody will load what was kept by this name, or is about to be."""
        if self._kept.pop(kept_as, None) is not None:
            self.manager.free(kept_as)
        for storing in self._storing.values():
            if storing.ask.keep_as == kept_as:
                storing.ask = replace(storing.ask, keep_as=None)

    def _has_all(self, ask: StoreRequest) -> bool:
        name, num_tokens = ask.ticket.request_id, ask.ticket.num_tokens
        drafts = not (self.rank.plan(ask.ticket.engine).left_out or ask.ticket.draft_row)
        tokens, salt = ask.known_tokens, ask.cache_salt
        found = self.manager.find_prefix(name, tokens, num_tokens, cache_salt=salt, drafts=drafts)
        if found.num_tokens < num_tokens or self.manager.adopt(name, found) is None:
            return False
        changed = self._write(ask, num_tokens)
        self.manager.free(name)  # they were used just now: others go first
        return not changed

    def _write(self, ask: StoreRequest, num_known_tokens: int) -> Collection[int]:
        """Queue what is not on disk. Blocks that had changed, which are returned, are found no more."""
        if self.pages is None:
            return ()
        name, num_tokens = ask.ticket.request_id, ask.ticket.num_tokens
        keys = self.manager.prefix_keys(name, ask.known_tokens, num_tokens, ask.cache_salt)
        changed = self.pages.write(self._blocks, name, keys, num_tokens, num_known_tokens)
        self._forget(changed)
        return changed

    def _hand_out(self, block_ids: Sequence[int]) -> None:
        """Get blocks ready to hold something else."""
        self.rank.bump_generations(block_ids)
        self._digests.forget(block_ids)

    def _let_go(self, ticket: TransferTicket) -> None:
        """Release the engine's lease without reading."""
        self.rank.hold(ticket)
        self.rank.let_go(ticket.request_id)

    def _refuse(self, storing: _RunningStore, why: str, *, can_release: bool = True) -> None:
        if can_release:
            self._let_go(storing.ask.ticket)
        storing.failure = why
        self._stored(storing)

    def _stored(self, storing: _RunningStore, outcome: TransferOutcome | None = None) -> None:
        ticket = storing.ask.ticket
        num_bytes = sum(row.bytes for row in outcome.rows) if outcome is not None else 0
        took_ns = self._clock() - storing.began_ns
        self.counts["store_failures" if storing.failure else "stores"] += 1
        if not storing.failure:
            self.counts["stored_bytes"] += num_bytes
            self.counts["stored_tokens"] += ticket.num_tokens - storing.num_known_tokens
        storing.done(
            StoreAnswer(
                name=ticket.request_id,
                num_tokens=0 if storing.failure else ticket.num_tokens,
                num_known_tokens=storing.num_known_tokens,
                num_bytes=num_bytes,
                took_ns=took_ns,
                reason=storing.failure,
                transfers=outcome.rows if outcome is not None else (),
                num_bytes_checked=outcome.num_bytes_checked if outcome is not None else 0,
            )
        )

    def _on_outcome(self, outcome: TransferOutcome) -> None:
        """All rows of a store are here and proven, or it failed."""
        storing = self._storing.pop(outcome.request_id)
        if outcome.error is not None:
            storing.failure = str(outcome.error)
            LOG.warning("a store failed: %s", outcome.error)
            if isinstance(outcome.error, KVMismatch):
                self.counts["mismatches"] += 1
                self.rank.release_now(outcome.request_id)
            if outcome.is_draining:
                self._draining[outcome.lease_id] = storing
            else:
                self.manager.free(outcome.request_id)
            self._stored(storing, outcome)
            return
        ticket = storing.ask.ticket
        self.manager.lack_drafts(
            ticket.request_id, ticket.num_tokens if outcome.left_out else ticket.draft_row
        )
        self._keep(storing)
        self._stored(storing, outcome)

    def _keep(self, storing: _RunningStore) -> None:
        ask, name = storing.ask, storing.ask.ticket.request_id
        self.manager.remember(name, ask.known_tokens, ask.ticket.num_tokens, ask.cache_salt)
        self._write(ask, storing.num_known_tokens)
        if ask.keep_as is None:
            self.manager.free(name)
            return
        self.drop(ask.keep_as)
        if name != ask.keep_as:
            self.manager.rename(name, ask.keep_as)
        self._kept[ask.keep_as] = ask.ticket.engine.partition("~")[0], ask.token_ids

    # Loads.

    def load(self, ask: LoadRequest, done: OnLoaded) -> None:
        """`done` is called once, here or in `turn`."""
        loading = _RunningLoad(ask, self._clock(), done)
        if ask.kept_as is None:
            self._search(loading)
            return
        kept = self._kept.pop(ask.kept_as, None)
        if kept is None:
            self._miss(loading, f"nothing is kept as {ask.kept_as}")
            return
        self._lend(loading, ask.kept_as, len(kept[1]), 0)

    def _search(self, loading: _RunningLoad) -> None:
        """Look for the longest prefix in host memory and on disk together."""
        ask, name = loading.ask, self._name_of(loading.ask)
        elsewhere = self.pages.since if self.pages is not None and self.pages.is_readable else None
        what = ask.token_ids, ask.max_tokens, ask.num_local_tokens, elsewhere, ask.cache_salt
        found = self.manager.find_prefix(name, *what, drafts=ask.drafts)
        if found.num_tokens < ask.num_local_tokens + ask.min_tokens:
            self.manager.free(name)
            self._miss(loading)
            return
        if self.manager.adopt(name, found) is None:
            self.manager.free(name)
            self._miss(loading, "no room for pages from disk" if found.missing else "no room")
        elif found.missing:
            self._fetch(loading, name, found)
        else:
            self._lend(loading, name, found.num_tokens, ask.num_local_tokens)

    def _fetch(self, loading: _RunningLoad, name: str, found: FoundPrefix) -> None:
        """Bring pages from disk into the blocks that were allocated for them."""
        assert self.pages is not None
        tables = self.manager.group_tables(name)
        places = [(group, key, tables[group][index]) for group, index, key in found.missing]
        self._hand_out([block for _, _, block in places])
        self._loading[name] = loading

        def fetched(bad: Sequence[str], num_bytes: int) -> None:
            del self._loading[name]
            loading.disk_bytes += num_bytes
            if bad:
                self.manager.free(name)
                loading.lost += bad
                loading.num_rereads += len(bad)
                if loading.num_rereads > MAX_REREADS:
                    self._miss(loading, f"{loading.num_rereads} pages on disk were damaged")
                else:
                    self._search(loading)
                return
            ends = ((index + 1) * self.manager.groups[g].spec.block_size for g, index, _ in found.missing)
            loading.num_disk_tokens = max(loading.num_disk_tokens, *ends)
            ask = loading.ask
            self.manager.remember(name, ask.token_ids, found.num_tokens, ask.cache_salt)
            self._lend(loading, name, found.num_tokens, loading.ask.num_local_tokens)

        self.pages.read(self.caches, places, fetched)

    def _lend(self, loading: _RunningLoad, name: str, num_tokens: int, first_row: int) -> None:
        """Put blocks aside for an engine to read, and write the ticket."""
        if self.pages is not None and loading.ask.kept_as is None:
            ask = loading.ask
            keys = self.manager.prefix_keys(name, ask.token_ids, num_tokens, ask.cache_salt)
            self.pages.touch(self.manager.groups, keys, num_tokens)
        lease_id = f"{TIER}/{self.description.epoch}/{next(self._numbers)}/{loading.ask.request_id}"
        tables, draft_row = self.manager.group_tables(name), self.manager.first_draft_row(name)
        self.manager.lease(name, lease_id)
        now = self._clock()
        self.rank.lease(lease_id, now + int(self.settings.lease_s * 1e9))
        self._lent.add(lease_id)
        digests = self._digests.recall(tables, num_tokens, first_row)
        ticket = self.rank.make_ticket(
            request_id=loading.ask.request_id,
            lease_id=lease_id,
            num_tokens=num_tokens,
            block_tables=tables,
            digests=[digests],
        )
        times = (self._clock() - now,)
        ticket = replace(ticket, digest_ns=times, first_row=first_row, draft_row=draft_row)
        self.counts["hits"] += 1
        self.counts["lent_tokens"] += num_tokens - first_row
        self.counts["disk_hits"] += bool(loading.num_disk_tokens)
        self._answer(loading, sealed(ticket))

    def _miss(self, loading: _RunningLoad, reason: str = "") -> None:
        self.counts["misses"] += 1
        self._answer(loading, None, reason)

    def _answer(self, loading: _RunningLoad, ticket: TransferTicket | None, reason: str = "") -> None:
        took_ns = self._clock() - loading.began_ns
        self.counts["lost_pages"] += len(loading.lost)
        loading.done(
            LoadAnswer(
                request_id=loading.ask.request_id,
                ticket=ticket,
                num_disk_tokens=loading.num_disk_tokens,
                disk_bytes=loading.disk_bytes,
                took_ns=took_ns,
                reason=reason,
                lost=tuple(loading.lost),
            )
        )

    def _name_of(self, ask: LoadRequest) -> str:
        return f"load/{next(self._numbers)}/{ask.request_id}"

    def doubt(self, ticket: TransferTicket) -> None:
        """An engine did not read what a ticket of this tier says: pages that are not what was stored any more
        are found no more."""
        if ticket.epoch != self.description.epoch:
            return
        self._forget(self._digests.find_changed(ticket.block_tables, ticket.num_tokens, ticket.first_row))

    def _forget(self, changed: Collection[int]) -> None:
        """Find blocks no more that do not hold what was stored."""
        if not changed:
            return
        num_gone = self.manager.forget(changed)
        if num_gone:
            self.counts["changed_pages"] += num_gone
            LOG.warning("%d pages in host memory were changed after they had been stored", num_gone)

    # Time.

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way in, or being read: then news come soon."""
        return bool(self._storing or self._loading or self._draining or self._lent)

    def turn(self) -> None:
        """Make progress; answers come out of this."""
        now = self._clock()
        for outcome in self.rank.poll(now):
            self._on_outcome(outcome)
        for lease_id in self.rank.drained():
            storing = self._draining.pop(lease_id, None)
            if storing is not None:
                self.manager.free(storing.ask.ticket.request_id)
        for lease_id in self.rank.released():
            self._take_back(lease_id)
        for lease_id in self.rank.expired(now):
            self.counts["expired_loads"] += lease_id in self._lent
            self._take_back(lease_id)
        if self.pages is not None:
            self.pages.turn()

    def _take_back(self, lease_id: str) -> None:
        self._lent.discard(lease_id)
        self.manager.release(lease_id)

    def clear(self) -> None:
        """Forget every page in host memory that nobody holds; those on disk stay."""
        assert self.manager.prefixes is not None
        self.manager.forget()

    def status(self) -> dict[str, object]:
        """Return what it holds, and what came of what it was asked."""
        pool, page_bytes = self.manager.pool, self.caches.geometry.block_bytes
        num_used = pool.num_blocks - 1 - pool.num_free_blocks
        return {
            "num_blocks": pool.num_blocks - 1,
            "block_bytes": page_bytes,
            "is_pinned": self.caches.is_pinned,
            "num_cached_blocks": pool.num_cached_blocks,
            "num_used_blocks": num_used,
            "num_kept": len(self._kept),
            "num_lent": len(self._lent),
            **{name: int(n) for name, n in sorted(self.counts.items())},
            **self._disk_status(),
        }

    def _disk_status(self) -> dict[str, object]:
        if self.pages is not None:
            return {"disk": self.pages.status()}
        return {"disk": status_without(self._why_no_disk)} if self._why_no_disk else {}

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks leaked."""
        self.manager.check_integrity()

    def close(self) -> None:
        """Give registrations and files back."""
        self.rank.close()
        if self.pages is not None:
            self.pages.close()


def _link_name(engine: str, turn: int) -> str:
    return engine if turn == 0 else f"{engine}~{turn}"
