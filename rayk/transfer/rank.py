"""One rank's whole transfer side, driven by the engine's loop. No threads of its own.

As a consumer: `connect`, `start` a ticket, `poll` until an outcome. As a producer: `bump_generations` for
blocks that are handed out, `lease` before a ticket leaves, `poll` (so that notifications arrive), then
`released` and `expired`. A rank may be both, with several engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rayk.kv.caches import CanonicalKVCaches
from rayk.transfer.agent import TransferAgent
from rayk.transfer.consumer import Consumption, TransferOutcome, refusal
from rayk.transfer.convert import Converting, begin_converting
from rayk.transfer.costs import CostTable
from rayk.transfer.failed import FailedTransfers
from rayk.transfer.handshake import CacheDescription, check_sides
from rayk.transfer.inspection import all_wrong, first_wrong, layer_proofs
from rayk.transfer.layer_view import LayerView
from rayk.transfer.lease import LeaseTable, ReleaseMessage, RenewMessage
from rayk.transfer.link import Landing, ProducerLink, make_link
from rayk.transfer.links import Links
from rayk.transfer.locate import FoundRows, find_rows
from rayk.transfer.meaning import can_convert
from rayk.transfer.measuring import Measurements
from rayk.transfer.peer_data import Peers, check_ticket, wrong_lease
from rayk.transfer.plan import TransferPlan
from rayk.transfer.push_messages import StopMessage
from rayk.transfer.push_reservations import PushReservations, Reserved
from rayk.transfer.staging import Staging, StagingSettings
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.token_classes import TokenClasses
from rayk.transfer.try_read import Wirings
from rayk.transfer.valid_prefix import LayerProof
from rayk.transfer.verify import (
    CanonicalViews,
    Digests,
    Prove,
    Rows,
    compute_digests,
    fetch_rows,
    sorted_views,
)
from rayk.transfer.waiting import WaitingTicket
from rayk.transfer.wire import wire_cache_for
from rayk.transfer.wire_queue import FOREVER_NS, BlockTables, Queued, WireQueue
from rayk.types.bugs import bug
from rayk.types.errors import HandshakeMismatch, KVMismatch, RaykError, TransferError


class TransferRank:
    """`layer_views` hold the tensors the layers were bound to. `prove`: digests what has
    arrived, in place of `compute_digests`."""

    def __init__(
        self,
        agent: TransferAgent,
        caches: CanonicalKVCaches,
        layer_views: Sequence[LayerView],
        description: CacheDescription,
        *,
        staging: StagingSettings | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        prove: Prove | None = None,
        costs: CostTable | None = None,
    ) -> None:
        self.description = description
        self._prove = prove
        self._agent = agent
        self._caches = caches
        groups = [g.group for g in caches.geometry.groups]
        self._views = sorted_views(layer_views, groups, description.token_classes)
        self._clock = clock
        # Blocks of requests being read at once: no more than fit here, several times over where the
        # producers' blocks are smaller or shared. Fences that find no room wait for others to end.
        num_slots = max(1 << 12, 8 * caches.geometry.num_blocks)
        self._landing = Landing(agent, num_slots, caches.buffer.device)
        costs = costs or CostTable()
        self._staging = Staging(agent, staging or StagingSettings(), caches.buffer.device, costs)
        self._measurements = Measurements(agent, caches.buffer.device, costs, clock)
        self._links = Links(agent)
        self._wirings = Wirings(agent, self._landing, description.agent_name)
        self._waiting: dict[str, WaitingTicket] = {}
        """Request id -> its ticket, whose blocks are not there yet."""
        self._active: dict[str, Consumption] = {}
        self._failed = FailedTransfers()
        self._queue = WireQueue()
        self._refused: list[TransferOutcome] = []
        self._leases = LeaseTable()
        self._reservations = PushReservations(agent, description.rank, self.generations, clock)
        self.num_unsent: dict[int, int] = {}
        """Producer rank -> releases and renewals that it could not be told of."""
        self._peers = Peers()
        self._stops: list[StopMessage] = []
        """Messages of consumer ranks that this rank may push to."""

    # Wiring

    def prove_by(self, classes: TokenClasses) -> None:
        """Digest tokens by these classes, which are those of all engines that it will meet. Before the first
        of them; a rank whose description says the classes already needs no such call."""
        assert not list(self._links), "digests of earlier tickets are by other classes"
        self.description = replace(self.description, token_classes=classes)
        self._views = CanonicalViews(self._views, self._views.caches, classes)

    def connect(
        self,
        producers: Sequence[CacheDescription],
        consumers: Sequence[CacheDescription],
        *,
        turn: int = 0,
        name: str | None = None,
    ) -> None:
        """Check the handshake between two engines, each given whole and in rank order; this rank is one of
        them. A consumer rank also prepares its reads; a producer rank lets these consumers release and
        renew its leases, and nobody whom it was not told of. Both engines must be polled until the first
        read is over (wiring needs both ends). Connecting to a new life of an engine replaces the old one.
        The same two engines may be connected the other way round, too.

        A consumer may have several links to an engine, each reading other replicas (`turn`, see
        `plan_transfer`) under a `name` of its own, by default the engine's: tickets' `engine` says which one
        to read by. Raises HandshakeMismatch.
        """
        me = self.description
        check_sides(me, producers, consumers, can_convert)
        self._peers.add(me, producers, consumers)
        if me.agent_name not in {c.agent_name for c in consumers}:
            return
        name = name or producers[0].engine
        for replaced in self._links.replaced_by(name, producers[0]):
            self.disconnect(replaced)
        wire = wire_cache_for(self._agent, producers, consumers, me, self._views, self._caches.buffer.device)
        try:
            made = make_link(
                self._agent,
                self._landing,
                producers,
                consumers,
                me,
                views=self._views,
                wire=wire,
                num_unsent=self.num_unsent,
                turn=turn,
            )
        except BaseException:
            self._links.undo(producers, wire)
            raise
        self._links.add(name, made)

    def wire(self, engine: str, timeout_s: float) -> bool:
        """Read 8 bytes from every rank of a connected producer engine, so that the first request need not
        wait for the network to be set up; then measure what reads from it cost, where that is to be known
        (`CostTable`). The producers must be polled meanwhile, by others.

        Returns at once whether all have answered; call again until then. Raises TransferError naming a rank
        that does not, after `timeout_s` at the latest.
        """
        self._take_notifications()
        link = self._links[engine]
        if engine not in self._measurements and not self._wirings.step(engine, link.fences, timeout_s):
            return False
        if self._staging.settings.mode == "never" or not link.plan.producer_ranks:
            return True  # there is nothing to choose
        return self._measurements.step(engine, link.producers[min(link.plan.producer_ranks)])

    def disconnect(self, name: str) -> None:
        """A link ends: its transfers fail (see the next `poll`). With its last link a producer engine is
        gone, and its ranks are forgotten."""
        link = self._links.get(name)
        self._wirings.forget(name)
        self._measurements.forget(name)
        if link is None:
            return
        self._fail([link])
        self._waiting = {r: w for r, w in self._waiting.items() if w.link is not link}
        self._links.remove(name)
        if not self._links.of(link.engine, link.epoch):
            self._reservations.arrivals.on_engine_gone(link.engine, link.epoch)

    def _fail(self, links: Sequence[ProducerLink]) -> None:
        for link in links:
            self._queue.fail(f"producer engine {link.engine} is gone", link=link)
        for consumption in self._active.values():
            if consumption.link in links:
                consumption.fail(f"producer engine {consumption.link.engine} is gone")

    def landing(self, engine: str) -> CacheDescription:
        """Tell where this rank is pushed to by a connected producer engine: a wire cache where formats
        differ, else its own. KeyError when it is not connected."""
        wire = self._links[engine].wire
        return self.description if wire is None else wire.description

    def plan(self, engine: str) -> TransferPlan:
        """Return what this rank reads from a connected producer engine. KeyError when it is not connected."""
        return self._links[engine].plan

    def close(self) -> None:
        """Forget everything."""
        for name in self._links:
            self.disconnect(name)
        self._agent.close()

    # Consumer

    def hold(self, ticket: TransferTicket) -> None:
        """A ticket waits for blocks here: its lease is renewed until `start` or `let_go`. Nothing for one of
        an engine, or of a life of it, that is not connected, nor for one that was changed on its way: `start`
        refuses it."""
        link = self._links.get(ticket.engine)
        if link is not None and link.epoch == ticket.epoch and wrong_lease(ticket) is None:
            self._waiting[ticket.request_id] = WaitingTicket(ticket, link, self._agent)

    def let_go(self, request_id: str) -> None:
        """A ticket that waits will not be read: its lease is released. Nothing for others."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.release()

    def start(
        self,
        ticket: TransferTicket,
        consumer_block_tables: Sequence[Sequence[int]],
        deadline_ns: int,
        first_row: int = 0,
    ) -> None:
        """Begin to read a request's KV into these blocks (per group, nulls where nothing is live), from row
        `first_row` on, which begins a row group: others are there. `deadline_ns` is on this object's clock.

        Raises HandshakeMismatch when the ticket is of an engine, or of a life of it, that is not connected,
        TransferError when it cannot be read by: its lease is then released, if anybody can be told.
        """
        if ticket.request_id in self._active or ticket.request_id in self._queue:
            return  # it came twice
        try:
            self._start(ticket, consumer_block_tables, deadline_ns, first_row)
        except RaykError:
            self._refuse(ticket)
            raise

    def _start(self, ticket: TransferTicket, tables: BlockTables, deadline_ns: int, first_row: int) -> None:
        link = self._links.get(ticket.engine)
        connected = "not connected" if link is None else f"{link.engine} epoch {link.epoch}"
        if link is None or link.epoch != ticket.epoch:
            raise HandshakeMismatch((("engine", f"{ticket.engine} epoch {ticket.epoch}", connected),))
        check_ticket(ticket, link.producers, self.description, link.views, tables, first_row)
        if link.wire is None:
            self._begin(ticket, link, tables, deadline_ns, first_row)
            return
        queued = Queued(
            ticket.request_id, ticket.num_tokens, tables, deadline_ns, link, ticket, first_row=first_row
        )
        if ticket.reservation_id is not None:
            wire_tables = self._reservations.claim(ticket.reservation_id)
            if wire_tables is None:
                raise TransferError(ticket.request_id, "the room that it was pushed into was given up")
            queued.wire_tables = wire_tables
            self._begin_converting(queued, ticket)
            return
        if ticket.request_id not in self._waiting:
            self.hold(ticket)
        self._queue.add(queued)
        self._admit(self._clock())

    def _refuse(self, ticket: TransferTicket) -> None:
        """It will not be read: its lease is released, and no longer renewed."""
        if ticket.request_id not in self._waiting:
            self.hold(ticket)
        self.let_go(ticket.request_id)

    def _admit(self, now_ns: int) -> None:
        """Begin transfers that waited for room in a wire cache; end those that wait no longer."""
        for queued in self._queue.ready(now_ns):
            ticket = queued.ticket
            if ticket is None:
                self._reservations.admit(queued)
            elif queued.failure is not None:
                self.let_go(ticket.request_id)
                self._refused.append(refusal(ticket, TransferError(ticket.request_id, queued.failure)))
            else:
                try:
                    self._begin_converting(queued, ticket)
                except RaykError as error:
                    self._refuse(ticket)
                    self._refused.append(refusal(ticket, error))

    def _begin_converting(self, queued: Queued, ticket: TransferTicket) -> None:
        converting = begin_converting(queued, self.description.kv_scales)
        at = queued.wire_tables, queued.deadline_ns, queued.first_row
        try:
            self._begin(ticket, queued.link, *at, converting)
        except RaykError:
            if ticket.reservation_id is None:
                converting.give_back()
            else:  # somebody may still write there
                self._reservations.unclaim(ticket.reservation_id, converting.wire, queued.wire_tables)
            raise

    def _begin(
        self,
        ticket: TransferTicket,
        link: ProducerLink,
        block_tables: Sequence[Sequence[int]],
        deadline_ns: int,
        first_row: int,
        converting: Converting | None = None,
    ) -> None:
        waiting = self._waiting.get(ticket.request_id)
        wire = converting.wire if converting is not None else None
        make = partial(
            Consumption,
            ticket=ticket,
            block_tables=block_tables,
            link=link,
            agent=self._agent,
            landing=self._landing,
            staging=self._staging,
            buffer=wire.caches.buffer if wire is not None else self._caches.buffer,
            views=link.views,
            converting=converting,
            prove=self._prove if wire is None else None,
            rows_per_group=self.description.rows_per_group,
            name=self.description.agent_name,
            deadline_ns=deadline_ns,
            first_row=first_row,
            pushed=self._reservations.reads(ticket, link),
            renewals=waiting.renewals if waiting is not None else None,
            clock=self._clock,
        )
        try:
            consumption = make()
        except TransferError as error:
            raise replace(error, request_id=ticket.request_id) from error
        except Exception as error:
            raise bug(f"the start of the read of {ticket.request_id}", error) from error
        self._waiting.pop(ticket.request_id, None)
        self._active[ticket.request_id] = consumption
        consumption.start()

    def reserve(
        self,
        reservation_id: str,
        engine: str,
        block_tables: Sequence[Sequence[int]],
        num_tokens: int,
        cached_blocks: Collection[int] = (),
    ) -> None:
        """Let the ranks of a connected producer engine write a request's KV into these blocks, but into those
        held already, or where it is converted on its way there. From when `reserved` names it, until
        `cleared` does. Raises HandshakeMismatch when the engine is not connected."""
        link = self._links.get(engine)
        if link is None:
            raise HandshakeMismatch((("engine", engine, "not connected"),))
        if reservation_id in self._reservations.arrivals or reservation_id in self._queue:
            return  # it came twice
        self.bump_generations([b for table in block_tables for b in table if b and b not in cached_blocks])
        queued = Queued(reservation_id, num_tokens, block_tables, FOREVER_NS, link)
        if link.wire is None:
            self._reservations.admit(queued)
        else:
            self._queue.add(queued)
            self._admit(self._clock())

    def reserved(self) -> list[Reserved]:
        """List reservations that there is room for by now, or never, each once."""
        return self._reservations.reserved()

    def end_reservation(self, reservation_id: str, attempt: int | None = None) -> None:
        """No ticket will come: have the producer's ranks stop, but those of which this attempt is here, and
        is known to be the last. Nothing where it is over."""
        self._queue.drop(reservation_id)
        self._reservations.end(reservation_id, attempt)

    def missing(self, reservation_id: str, attempt: int) -> dict[int, str | None]:
        """Producer ranks that have yet to write something of this attempt -> why they will not, where they
        stopped."""
        return self._reservations.arrivals.missing(reservation_id, attempt)

    def cleared(self) -> list[str]:
        """List reservations that are over, and into whose blocks nobody writes any more, each once."""
        return self._reservations.cleared()

    def stops(self) -> list[StopMessage]:
        """Tell whom this rank must not push to any more, since the last call."""
        stops, self._stops = self._stops, []
        return stops

    def cancel(self, request_id: str) -> None:
        """Give up a transfer; its outcome comes from the next `poll`. Unknown requests are over already."""
        self._queue.fail("cancelled", key=request_id)
        if request_id in self._active:
            self._active[request_id].fail("cancelled")

    def poll(self, now_ns: int) -> list[TransferOutcome]:
        """Make progress in every role; transfers that ended since the last call, each once."""
        self._take_notifications()
        self._wirings.take_back()
        self._measurements.take_back()
        for waiting in self._waiting.values():
            waiting.step(now_ns)
        self._admit(now_ns)
        outcomes, self._refused = self._refused, []
        for request_id, consumption in list(self._active.items()):
            if not consumption.is_drained:  # over CMA all is done when it starts
                consumption.step(now_ns)
            outcome = consumption.outcome
            if outcome is not None:
                if outcome.is_draining and consumption.is_drained:  # cancelling may have done that already
                    outcome = replace(outcome, is_draining=False)
                outcomes.append(outcome)
                del self._active[request_id]
                if outcome.is_draining or isinstance(outcome.error, KVMismatch):
                    self._failed.add(consumption)
                else:
                    consumption.close()
        self._failed.step(now_ns)
        self._reservations.ask_to_stop(now_ns)
        return outcomes

    def drained(self) -> list[str]:
        """Lease ids of outcomes with `is_draining` whose blocks nothing writes to any more, each once."""
        return self._failed.drained()

    def diagnose(
        self, request_id: str, layer: int, group: int, fetched: Mapping[int, Rows]
    ) -> KVMismatch | None:
        """After a KVMismatch, before `release_now`: the first wrong byte of one of a layer's caches, and why.

        `fetched`: every producer rank's rows of the layer, by rank (`fetch_rows`; more fields do no harm).
        None when the bytes are equal. Raises TransferError when nothing is kept of the request (any more).
        """
        return first_wrong(self._failed.find(request_id), layer, group, fetched)

    def diagnose_all(self, request_id: str, fetched: Sequence[Mapping[int, Rows]]) -> list[KVMismatch]:
        """Find the first wrong byte of each cache of the rank. `fetched`: by producer rank, rows by layer."""
        return all_wrong(self._failed.find(request_id), fetched)

    def proofs(
        self, ticket: TransferTicket, consumer_block_tables: Sequence[Sequence[int]], first_row: int = 0
    ) -> list[LayerProof]:
        """After a transfer that failed and has drained: what of it arrived all the same, by the digests; rows
        before `first_row` were here.

        Nothing where the producer is not connected (any more); nor where rows are converted: the wire cache's
        blocks go to the next request when the transfer fails. TransferError: see `check_ticket`.
        """
        link = self._links.get(ticket.engine)
        if link is None or link.wire is not None:
            return []
        return layer_proofs(link.views, ticket, consumer_block_tables, link, self.description, first_row)

    def end_reads(self, engine: str, epoch: int) -> None:
        """This life of a producer engine is over: what is read from it fails (see the next `poll`)."""
        self._fail(self._links.of(engine, epoch))
        self._reservations.arrivals.on_engine_gone(engine, epoch)

    def release_now(self, request_id: str) -> None:
        """After a KVMismatch: the producer's bytes are needed no longer."""
        self._failed.release(request_id)

    # Producer

    def bump_generations(self, block_ids: Sequence[int]) -> None:
        """Count that these blocks are handed out again. Call before anything is written into them."""
        self._caches.bump_generations(block_ids)

    def generations(self, block_tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """List the current generation of each block, per group, as a ticket carries them."""
        table = self._caches.generations.cpu().numpy()
        return tuple(tuple(table[list(blocks)].tolist()) for blocks in block_tables)

    def digests(self, num_tokens: int, block_tables: Sequence[Sequence[int]], first_row: int = 0) -> Digests:
        """[words] of a request's rows from `first_row` on, which begins a row group, on this rank; zero where
        it holds nothing. As long on every rank: a ticket carries them stacked by rank."""
        rows_per_group = self.description.rows_per_group
        return compute_digests(self._views, block_tables, num_tokens, rows_per_group, first_row)

    def make_ticket(
        self,
        *,
        request_id: str,
        lease_id: str,
        num_tokens: int,
        block_tables: Sequence[Sequence[int]],
        digests: Sequence[Digests],
    ) -> TransferTicket:
        """Make the ticket of a request's hand-over; `digests` of all ranks in order. Blocks outside the live
        rows may have been trimmed. Block ids and generations are the same on every rank."""
        assert len(digests) == self.description.num_ranks, "digests of every rank"
        return TransferTicket(
            request_id=request_id,
            lease_id=lease_id,
            engine=self.description.engine,
            epoch=self.description.epoch,
            num_tokens=num_tokens,
            block_tables=tuple(tuple(t) for t in block_tables),
            generations=self.generations(block_tables),
            digests=np.stack(digests),
        )

    def lease(self, lease_id: str, deadline_ns: int, lease_ns: int | None = None) -> None:
        """Open a lease on this rank, before the ticket leaves the engine; `lease_ns`: see LeaseTable."""
        self._leases.open(lease_id, deadline_ns, now_ns=self._clock(), lease_ns=lease_ns)

    def end_lease(self, lease_id: str) -> None:
        """No ticket with this lease leaves the engine."""
        self._leases.end(lease_id)

    def released(self) -> list[str]:
        """List leases that all consumer ranks released here since the last call; blocks wait for every
        rank."""
        return self._leases.take_released()

    def expired(self, now_ns: int) -> list[str]:
        """Leases whose deadline passed, each once; their blocks may be freed."""
        return self._leases.expire(now_ns)

    def fetch_rows(self, layer: int, group: int, block_table: Sequence[int], num_tokens: int) -> Rows:
        """Live rows of one of a layer's caches as raw bytes through its bound views: (field, unit) ->
        [rows, bytes]. `block_table` is the group's."""
        view = next(v for v in self._views if (v.layer, v.group.index) == (layer, group))
        return fetch_rows(view, block_table, num_tokens)

    def locate(self, layer: int, field: str, unit: int, rows: Sequence[bytes]) -> list[FoundRows]:
        """Tell where rows of a layer's field and unit lie in this rank's cache, whoever they are of."""
        view = next((v for v in self._views if v.layer == layer and field in v.names), None)
        if view is None:
            return []
        return find_rows(view, field, unit, rows, self.description.rank, self._caches.generations)

    def _take_notifications(self) -> None:
        for peer, message in self._peers.messages(self._agent):
            match message:
                case ReleaseMessage():
                    self._leases.on_release(message)
                case RenewMessage():
                    self._leases.on_renew(message, self._clock())
                case StopMessage():
                    self._stops.append(message)
                case _:
                    self._reservations.arrivals.take(message, peer)
