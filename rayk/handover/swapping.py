"""Rank 0's swaps: preempted requests whose KV goes to the host tier and comes back. Is a sched.Swapper.

A preempted request's blocks go to a store that is kept by name: exactly its tokens. They come free when the
tier has read them; the request comes back when the scheduler lets it and there are blocks again, by a read
like any other. Whatever fails, it is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent, begin_times
from rayk.handover.pending_store import PendingStore
from rayk.handover.receiving import Incoming
from rayk.handover.storing import Storing
from rayk.handover.tier_side import TierSide, moving_ns
from rayk.offload.messages import LoadAnswer, LoadRequest, StoreAnswer
from rayk.transfer.handshake import row_group_blocks
from rayk.transfer.peer_data import wrong_head
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import RaykError

if TYPE_CHECKING:
    from rayk.handover.receiving import Receiving
    from rayk.sched.request_state import RequestState


@dataclass(slots=True)
class _Swapped:
    """A preempted request whose KV is in the tier, or on its way there or back."""

    state: RequestState
    name: str  # of its store
    out_ns: int
    has_left: bool = False  # whether its blocks are free
    ticket: TransferTicket | None = None  # what the tier offers of it
    is_read: bool = False  # whether ranks are reading that
    asked_ns: int | None = None  # when the tier was asked for it


class Swapping:
    """Requests of one engine that are swapped out."""

    def __init__(self, side: TierSide, receiving: Receiving, storing: Storing) -> None:
        self._side = side
        self._receiving = receiving
        self._storing = storing
        self._swapped: dict[str, _Swapped] = {}
        self._asked: dict[str, _Swapped] = {}
        """What the tier was asked for and has not answered: also of those that nobody waits for any more,
        whose ids are taken until it does."""

    @property
    def is_busy(self) -> bool:
        return bool(self._swapped)

    def holds(self, request_id: str) -> bool:
        """Tell whether a request is swapped out, or the tier was asked for one and has not answered."""
        return request_id in self._swapped or request_id in self._asked

    def swap_out(self, state: RequestState) -> bool:
        side = self._side
        if side.tier is None or side.settings.swap == "never":
            return False
        request_id, num_tokens = state.request_id, state.num_computed
        known = min(self._storing.num_stored(request_id), num_tokens)
        moved = side.bytes_of(num_tokens, known), side.bytes_of(num_tokens, 0)
        choice = side.costs.swap(*moved, num_tokens, side.settings.swap)
        side.counts["swaps_weighed"] += 1
        if not choice.moves:
            side.counts["swaps_declined"] += 1
            return False
        if not side.may_read(side.settings.swap):
            side.counts["swaps_held_back"] += 1
            return False
        parts = self._storing.split(state, num_tokens)
        if parts is None:
            side.counts["swaps_too_large"] += 1
            return False
        side.counts["swaps"] += 1
        manager, name = side.leader.manager, side.new_name("swap", request_id)
        tables = manager.group_tables(request_id)
        manager.lease(request_id, name)
        self._swapped[request_id] = _Swapped(state, name, self._side.leader.clock())
        what = name, request_id, num_tokens, tables, tuple(state.tokens[:num_tokens]), side.num_ranks
        store = PendingStore(
            *what,
            state.request.cache_salt,
            state.token_at(num_tokens),
            on_kept=self._kept,
            on_free=self._freed,
            draft_row=manager.first_draft_row(name),
        )
        self._storing.put(store, parts)
        return True

    def forget(self, request_id: str) -> None:
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self._drop(swapped.name)
            if not swapped.is_read:
                self._side.decline(swapped.ticket)

    def _kept(self, store: PendingStore, answer: StoreAnswer) -> None:
        """What the tier made of a swapped request's store: ask for it at once, its blocks stay there."""
        swapped = self._swapped.get(store.request_id)
        if swapped is None or swapped.name != store.name:
            self._drop(store.name)
        elif not answer.ok or self._side.tier is None:
            self._start_over(store.request_id)
        else:
            self._side.counts["swapped_out_bytes"] += answer.num_bytes
            swapped.asked_ns, self._asked[store.request_id] = self._side.leader.clock(), swapped
            ask = LoadRequest(request_id=store.request_id, kept_as=store.name)
            self._side.tier.load(ask, lambda offer: self._offered(swapped, offer))

    def _freed(self, store: PendingStore) -> None:
        """A store's blocks are free: whoever was swapped out by it has left."""
        swapped = self._swapped.get(store.request_id)
        if swapped is not None and swapped.name == store.name:
            swapped.has_left = True
            self._side.leader.scheduler.blocks_left(store.request_id)

    def turn(self) -> None:
        """Before each turn: have all ranks read what the scheduler lets come back, where there are blocks."""
        scheduler, manager = self._side.leader.scheduler, self._side.leader.manager
        late_ns = self._side.leader.clock() - int(self._side.settings.transfer_s * 1e9)
        for request_id, swapped in list(self._swapped.items()):
            ticket = swapped.ticket
            if ticket is None and swapped.asked_ns is not None and swapped.asked_ns < late_ns:
                self._side.read_failed(self._side.settings.swap, swapped.asked_ns, "it is not offered", None)
                self._start_over(request_id)
                continue
            if ticket is None or swapped.is_read or not scheduler.may_return(request_id):
                continue
            unit, tokens = row_group_blocks(manager.groups), swapped.state.tokens
            salt = swapped.state.request.cache_salt
            local_prefix = manager.find_local_prefix(request_id, tokens, ticket.num_tokens, unit, salt)
            updates = manager.reserve_live(request_id, ticket.num_tokens, local_prefix)
            # Those that wait came later; it and those that run need a block per group to go on with.
            needed = (scheduler.num_running + 1) * len(manager.groups)
            if updates is not None and scheduler.num_running and manager.pool.num_free_blocks < needed:
                manager.unreserve(request_id)
                updates = None
            if updates is None:
                scheduler.make_room(request_id)
                continue
            swapped.is_read = True
            self._receiving.begin(
                self._coming_back(swapped, ticket), tuple(i for _, i in updates), local_prefix
            )

    def abort(self, request_id: str) -> bool:
        """Stop bringing a request back; False where it is not swapped out."""
        if request_id not in self._swapped:
            return False
        self._receiving.abort(request_id)
        self._side.leader.scheduler.remove(request_id)  # which says `forget`
        return True

    def tier_lost(self) -> None:
        """Compute again what is swapped out. A read that is under way fails by itself, and says so."""
        self._asked.clear()
        for request_id, swapped in list(self._swapped.items()):
            if not swapped.is_read:
                self._start_over(request_id)

    def clear(self) -> None:
        self._swapped.clear()
        self._asked.clear()

    def _offered(self, swapped: _Swapped, answer: LoadAnswer) -> None:
        """The tier offered what was swapped out, or said why not."""
        request_id, ticket = swapped.state.request_id, answer.ticket
        if ticket is not None and wrong_head(ticket) is not None:
            ticket = None  # it can be neither read nor let go
        if self._asked.get(request_id) is swapped:
            del self._asked[request_id]
        is_away = self._swapped.get(request_id) is swapped
        if is_away and ticket is not None:
            swapped.ticket = ticket
            return
        self._side.decline(ticket)
        if is_away:
            self._start_over(request_id)

    def _coming_back(self, swapped: _Swapped, ticket: TransferTicket) -> Incoming:
        state, now, settings = swapped.state, self._side.leader.clock(), self._side.settings

        def arrived(num_valid: int, failure: RaykError | None, info: dict[str, Any]) -> None:
            if failure is not None:
                self._side.doubt(ticket, failure)
                self._side.read_failed(settings.swap, now, str(failure), ticket)
            self._arrived(state.request_id, num_valid, failure, info)

        return Incoming(
            state.request,
            ticket,
            tuple(state.output_token_ids),
            settings.transfer_s,
            settings.lease_s,
            now,
            recompute=True,
            taken_ns=now,
            arrived=arrived,
        )

    def _arrived(
        self, request_id: str, num_valid: int, failure: RaykError | None, info: dict[str, Any]
    ) -> None:
        """The KV of so many of its tokens is in its blocks again."""
        side, swapped = self._side, self._swapped.pop(request_id, None)
        leader = side.leader
        if swapped is None:
            leader.manager.free(request_id)
            return
        rows = info.get("transfers", ())
        num_bytes = sum(row.bytes for row in rows)
        for row in rows:
            row.purpose = "swap"
        side.counts["swapped_in_bytes"] += num_bytes
        if failure is not None:
            side.counts["swaps_failed"] += 1
        else:
            side.costs.observe_in(num_bytes, moving_ns(info))
            side.reads.worked()
        if not num_valid:
            leader.scheduler.start_over(request_id)
            return
        salt = swapped.state.request.cache_salt
        leader.manager.remember(request_id, swapped.state.tokens, num_valid, salt)
        leader.scheduler.come_back(request_id, num_computed=num_valid)
        told = {
            **begin_times(swapped.state),
            "transfers": rows,
            "num_kv_bytes_checked": info.get("num_kv_bytes_checked", 0),
            "swap_ns": leader.clock() - swapped.out_ns,
        }
        leader.emit(RequestEvent(request_id=request_id, info=EventInfo(**told)))

    def _start_over(self, request_id: str) -> None:
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self._side.counts["swaps_failed"] += 1
            self._storing.end(swapped.name)
            self._side.leader.scheduler.start_over(request_id)

    def _drop(self, name: str) -> None:
        if self._side.tier is not None:
            self._side.tier.drop(name)
