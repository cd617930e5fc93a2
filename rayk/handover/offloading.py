"""Rank 0's side of offloading: what an engine loads from the host tier, stores in it, and swaps out to it.

All on the loop's thread; the tier's answers come there, too. A request's prompt is looked up before it is
queued; what is loaded comes as any hand-over does (`receiving`). `storing` has the stores and `swapping` the
swaps. A tier that is lost, slow or full costs time, never a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import EndReads
from rayk.handover.receiving import Incoming
from rayk.handover.storing import Storing
from rayk.handover.swapping import Swapping
from rayk.handover.tier_side import Tier, TierFacts, TierSide, moving_ns
from rayk.offload.backoff import Backoff
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest
from rayk.sched.request_state import max_cached_tokens
from rayk.transfer.handshake import row_group_blocks
from rayk.transfer.peer_data import wrong_head
from rayk.types.errors import RaykError
from rayk.types.offload import ENDED

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.handover.receiving import Receiving
    from rayk.parallel.shard import EngineShape
    from rayk.types.batch import ScheduledBatch
    from rayk.types.offload import OffloadSettings
    from rayk.types.request import Request

LOAD_S, PATIENCE = 2.0, 20.0
"""A load may take so long, or so many times as long as expected; then the prompt is computed."""
ANSWER_S = 2.0  # a tier that takes longer to say what it has is not waited for: the prompt is computed
UNANSWERED = "the host tier does not answer"
MAX_UNANSWERED = 4
"""So many that were not waited for, and the tier is asked for nothing more until it says a word."""


@dataclass(slots=True)
class _Lookup:
    """A prompt that is being looked up."""

    request: Request
    start: Callable[..., None]
    begin_cached: Callable[..., None]
    num_here: int  # first tokens that the engine's own cache has
    asked_ns: int
    found_ns: int | None = None  # when the tier had said what it has, or was waited for no longer
    is_over: bool = False
    """Not waited for any more. Its id is taken until the answer is here: that is no other request's."""

    def begin(self, now_ns: int, num_cached: int = 0, *, is_loaded: bool = False) -> None:
        """Queue the request: its first token tells what it waited for."""
        told = {"asked_ns": self.asked_ns, "found_ns": self.found_ns or now_ns}
        told |= {"loaded_ns": now_ns} if is_loaded else {}
        if num_cached:
            self.begin_cached(num_cached, first_info=told)
        else:
            self.start(first_info=told)


class Offloading:
    """There is no tier until `attach`."""

    def __init__(
        self,
        *,
        engine: str,
        epoch: int,
        shape: EngineShape,
        settings: OffloadSettings,
        commands: list[object],
        receiving: Receiving,
    ) -> None:
        """`commands`: what all ranks are to do at the next turn; appended to."""
        self.side = TierSide(engine, epoch, shape, settings, commands)
        self.counts, self.costs = self.side.counts, self.side.costs
        self.storing = Storing(self.side)
        self.swapping = Swapping(self.side, receiving, self.storing)
        self.why_off = "no host tier is attached"
        self._receiving = receiving
        self._looking: dict[str, _Lookup] = {}
        self._steps: dict[int, tuple[int, int, float]] = {}
        """Step in flight -> when it began, its tokens, pairs of a token and one that it sees."""
        self._settled_ns = 0  # when the last step was settled

    # Attachment.

    def attach_leader(self, leader: Leader) -> None:
        self.side.attach(leader=leader)
        leader.scheduler.on_settled = self.settled

    @property
    def why_few(self) -> str:
        """Why hardly any prompt is stored, if so."""
        leader = self.side.leader
        states = [g.spec.block_size for g in leader.manager.groups if not g.spec.has_token_rows]
        if not states or max(states) < leader.scheduler.max_positions:
            return ""
        return (
            "recurrent states are updated in place, so that prompts are not stored but swapped only; "
            "engine: {prefix_caching: true, state_block_size: 64} keeps states of prefixes"
        )

    @property
    def is_on(self) -> bool:
        return self.side.tier is not None

    def attach(self, tier: Tier, facts: TierFacts) -> None:
        self.lost("another one takes its place")
        self.side.attach(facts=facts)
        self.side.tier, self.why_off = tier, ""
        self.side.reads = Backoff()
        self.side.leader.scheduler.on_computed = self.storing.computed
        self.side.leader.scheduler.swapper = self.swapping

    def lost(self, why: str, epoch: int | None = None) -> None:
        """The tier is gone: go on without it. Nothing reads this engine's blocks any more. `epoch`: of the
        tier that is meant; None: the one that is attached."""
        side = self.side
        if side.tier is None or epoch not in (None, side.facts.epoch):
            return
        side.tier, self.why_off = None, why
        self.counts["tier_losses"] += 1
        side.commands.append(EndReads(TIER, side.facts.epoch))
        self.storing.end_all()
        looking, self._looking = self._looking, {}
        for one in looking.values():
            if not one.is_over:
                one.begin(side.leader.clock())
        self.swapping.tier_lost()

    # Loads.

    def look_up(
        self, request: Request, start: Callable[..., None], begin_cached: Callable[..., None]
    ) -> bool:
        """Ask the tier for a request's prompt before it is queued; False where there is nothing to ask for.
        `start`: queues it as it is; `begin_cached`: with the KV of so many tokens in its blocks. Both take a
        `first_info`: see Leader.start."""
        side, wanted = self.side, max_cached_tokens(request)
        if side.tier is None or side.settings.load == "never" or wanted < side.facts.unit_tokens:
            return False
        if len(self._looking) - self.num_looking >= MAX_UNANSWERED:
            return False
        manager, tokens = side.leader.manager, request.prompt_token_ids
        name, salt = request.request_id, request.cache_salt
        here = manager.find_prefix(name, tokens, wanted, cache_salt=salt).num_tokens
        if here + side.facts.unit_tokens > wanted:
            return False
        unit = row_group_blocks(manager.groups)
        num_local_tokens = manager.find_local_prefix(name, tokens, wanted, unit, salt).num_tokens
        gain = here - num_local_tokens + side.facts.unit_tokens
        if not side.may_read(side.settings.load):
            self.counts["loads_held_back"] += 1
            return False
        looking = _Lookup(request, start, begin_cached, here, self.side.leader.clock())
        self._looking[name] = looking
        ask = LoadRequest(
            request_id=name,
            token_ids=tokens,
            cache_salt=salt,
            max_tokens=wanted,
            num_local_tokens=num_local_tokens,
            min_tokens=gain,
            drafts=manager.has_riders,
        )
        side.tier.load(ask, lambda answer: self._found(looking, answer))
        return True

    def _found(self, looking: _Lookup, answer: LoadAnswer) -> None:
        """The tier said what it has of a prompt."""
        name, ticket = looking.request.request_id, answer.ticket
        if ticket is not None and wrong_head(ticket) is not None:
            ticket = None  # it can be neither read nor let go
        self.counts["lookups"] += 1
        self.counts["lost_pages"] += len(answer.lost)
        # A lost tier's answers may come when another request has the id.
        is_awaited = self._looking.get(name) is looking
        if is_awaited:
            del self._looking[name]
        if not is_awaited or looking.is_over:
            self.side.decline(ticket)
            return
        looking.found_ns = self.side.leader.clock()
        if ticket is None:
            self._nothing_read(looking)
            looking.begin(self.side.leader.clock())
            return
        num_bytes = self.side.bytes_of(ticket.num_tokens, ticket.first_row)
        num_new = ticket.num_tokens - looking.num_here
        weighed = num_bytes, num_new, self.side.settings.load
        choice = self.costs.load(*weighed, num_here=looking.num_here)
        if not choice.moves:
            self.counts["loads_declined"] += 1
            self._nothing_read(looking)
            self.side.decline(ticket)
            looking.begin(self.side.leader.clock())
            return

        def arrived(num_valid: int, failure: RaykError | None, info: dict[str, Any]) -> None:
            self._loaded(looking, answer, num_valid, failure, info)

        now, settings = self.side.leader.clock(), self.side.settings
        # Computing it is always a way out: a read that stands still is not waited for long.
        patience_s = min(settings.transfer_s, max(LOAD_S, PATIENCE * choice.move_ns / 1e9))
        limits = patience_s, settings.lease_s / 2
        more: dict[str, Any] = {"recompute": True, "taken_ns": now, "arrived": arrived}
        self._receiving.queue(Incoming(looking.request, ticket, (), *limits, now, **more))

    def _loaded(
        self,
        looking: _Lookup,
        answer: LoadAnswer,
        num_valid: int,
        failure: RaykError | None,
        info: dict[str, Any],
    ) -> None:
        """A prompt's KV is in its blocks, or as much of it as is proven."""
        name, rows = looking.request.request_id, info.get("transfers", ())
        num_bytes = sum(row.bytes for row in rows)
        for row in rows:
            row.purpose = "load"
        if failure is None:
            if self.is_on:
                self.storing.note_stored(name, answer.num_tokens)
            self.costs.observe_in(num_bytes, answer.took_ns + moving_ns(info))
            self.side.reads.worked()
        self.counts["loads" if failure is None else "loads_failed"] += 1
        self.counts["loaded_bytes"] += num_bytes
        self.counts["loaded_tokens"] += max(0, num_valid - looking.num_here)
        told: dict[str, Any] = {
            "num_host_tokens": max(0, num_valid - looking.num_here),
            "num_disk_tokens": min(num_valid, answer.num_disk_tokens),
            "load_ns": self.side.leader.clock() - looking.asked_ns,
            "num_kv_bytes_checked": info.get("num_kv_bytes_checked", 0),
            "transfers": rows,
        }
        if failure is not None:
            told["offload_failure"] = str(failure)
            self._failed(looking, answer, failure, was_read=bool(info))
        looking.begin(self.side.leader.clock(), num_valid, is_loaded=True)
        self.side.leader.emit(RequestEvent(request_id=name, info=EventInfo(**told)))

    def _failed(self, looking: _Lookup, answer: LoadAnswer, failure: RaykError, *, was_read: bool) -> None:
        """`was_read`: whether a read began; else blocks, or the engine's own prefix, were lacking here."""
        assert answer.ticket is not None, "something was to be read"
        self.side.doubt(answer.ticket, failure)
        if was_read:
            self.side.read_failed(self.side.settings.load, looking.asked_ns, str(failure), answer.ticket)
        else:
            self._nothing_read(looking)

    def _nothing_read(self, looking: _Lookup) -> None:
        """What was looked up tells nothing of how reads go."""
        self.side.reads.nothing_tried(looking.asked_ns, self.side.leader.clock())

    # The hand-over's.

    @property
    def is_busy(self) -> bool:
        """Whether ranks' news of stores are awaited, or somebody is to come back."""
        return bool(self.storing.open_stores or self.swapping.is_busy)

    @property
    def num_looking(self) -> int:
        return sum(not looking.is_over for looking in self._looking.values())

    def holds(self, request_id: str) -> bool:
        """Tell whether a request is looked up, or swapped out."""
        return request_id in self._looking or self.swapping.holds(request_id)

    def abort(self, request_id: str) -> bool:
        """Stop looking a request up, or bringing it back; False where it is neither."""
        self.storing.left(request_id)
        looking = self._looking.get(request_id)
        if looking is not None and not looking.is_over:
            looking.is_over = True
            self.side.leader.manager.free(request_id)  # its keys
            return True
        return self.swapping.abort(request_id)

    def turn(self) -> None:
        """Called before each turn, it begins stores and returns, and waits for no tier that is silent."""
        self.storing.turn()
        self.swapping.turn()
        late_ns = self.side.leader.clock() - int(ANSWER_S * 1e9)
        for looking in self._looking.values():
            if looking.asked_ns < late_ns and not looking.is_over:
                self.counts["lookups_late"] += 1
                self.side.read_failed(self.side.settings.load, looking.asked_ns, UNANSWERED, None)
                looking.is_over = True
                looking.begin(self.side.leader.clock())

    def stepping(self, batch: ScheduledBatch) -> None:
        seen = ((r.num_computed_tokens, len(r.token_ids)) for r in batch.requests)
        pairs = sum(n * before + n * (n + 1) / 2 for before, n in seen)
        self._steps[batch.step] = self.side.leader.clock(), batch.num_tokens, pairs

    def settled(self, step: int) -> None:
        """Learn how long a step took: behind one that was in flight when it began, from that one's end."""
        began_ns, num_tokens, pairs = self._steps.pop(step)
        now_ns = self.side.leader.clock()
        if self.is_on:
            self.costs.observe_prefill(num_tokens, now_ns - max(began_ns, self._settled_ns), pairs)
        self._settled_ns = now_ns

    def clear(self) -> None:
        """Forget everything: the engine is going down."""
        self.side.tier, self.why_off = None, self.why_off or ENDED
        self._looking.clear()
        self.storing.clear()
        self.swapping.clear()

    def status(self) -> dict[str, Any]:
        """Counters, and what the cost model believes."""
        counted = {name: int(n) for name, n in sorted(self.counts.items())}
        open_stores = len(self.storing.open_stores)
        told = {"num_open": open_stores, "why_off": self.why_off, "why_few": self.why_few}
        told["last_store_failure"] = self.storing.last_failure
        if self.side.outbox is not None:
            pool = self.side.outbox.pool
            told["outbox"] = {"num_blocks": pool.num_blocks - 1, "num_free_blocks": pool.num_free_blocks}
        told["recent_stores"] = list(self.storing.recent)
        told["why_paused"] = self.side.reads.describe(self.side.leader.clock()) if self.is_on else ""
        return {**counted, **told, "costs": self.costs.describe()}
