"""One rank's KV transfers, run by its engine's loop between steps. Implements engine.loop.RankExtension."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from rayk.engine.finite import not_finite_weights
from rayk.engine.rank import EngineRank
from rayk.engine.warm_up import run_warm_up
from rayk.handover.commands import (
    BlockTables,
    Capture,
    Captured,
    CapturedRows,
    Connect,
    Describe,
    DescribeOutbox,
    Diagnose,
    EndLease,
    EndPush,
    EndReads,
    EndReservation,
    HoldTicket,
    Inspect,
    Inspected,
    LetGo,
    Locate,
    MakeStore,
    MakeTicket,
    Prove,
    PushStep,
    RankNews,
    ReleaseMismatch,
    Reserve,
    StartRead,
    TicketPart,
    WarmUp,
)
from rayk.handover.digesting import Digesting
from rayk.handover.planted import FaultBox, PlantedFault
from rayk.handover.planted_drafts import SpoiledDrafts
from rayk.handover.pushing import PushSide
from rayk.handover.transfer_metrics import report_news, report_totals
from rayk.metrics import Meter
from rayk.offload.outbox import Outbox
from rayk.transfer.agent import TransferAgent
from rayk.transfer.consumer import TransferOutcome, refusal
from rayk.transfer.costs import CostTable
from rayk.transfer.faulty_agent import FaultyAgent, reuse_early
from rayk.transfer.finite import first_not_finite
from rayk.transfer.handshake import CacheDescription, describe_cache
from rayk.transfer.layer_view import LayerView, make_layer_view
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses
from rayk.transfer.verify import Digests, compute_digests, fetch_rows, sorted_views
from rayk.transfer.warm_up import transfer_launches
from rayk.types.errors import KVMismatch, NotFiniteError, RaykError


def layer_views(rank: EngineRank) -> list[LayerView]:
    """Return what a rank's layers show of their bound caches, with the unit ids their weights were cut for
    and the tokens that its steps compute slots for: the geometry, of which maps are made, has no say."""
    owners = rank.cache_owners
    return [
        make_layer_view(layer, kept.group, owners[layer, part].field_views(), tokens)
        for kept, tokens in zip(rank.caches.geometry.groups, rank.slot_tokens, strict=True)
        for layer, part in kept.keys
    ]


def capture(views: Sequence[LayerView], command: Capture) -> Captured:
    """Copy a request's live rows of every layer out of the bound views."""
    captured: CapturedRows = {}
    for view in views:
        rows = fetch_rows(view, command.block_tables[view.group.index], command.num_tokens)
        captured.setdefault(view.layer, {}).update(rows)
    tokens = {view.layer: view.tokens for view in views if view.group.spec.has_token_rows}
    return Captured(captured, tokens)


class Inspection:
    """Looks for what is not finite on a rank."""

    def __init__(self, rank: EngineRank, views: Sequence[LayerView]) -> None:
        self._views = views
        self._find_weights = functools.cache(functools.partial(not_finite_weights, rank))

    def __call__(self, command: Inspect) -> Inspected:
        """Weights are looked at once."""
        kv = first_not_finite(self._views, command.block_tables, command.num_tokens)
        return Inspected(kv, self._find_weights())


class CaptureExtension:
    """An engine that moves no KV but lets its rows be looked at."""

    def __init__(self, rank: EngineRank) -> None:
        self._views = layer_views(rank)
        self._inspect = Inspection(rank, self._views)

    def execute(self, command: object) -> object:
        """Run Capture or Inspect; there are no other commands here."""
        if isinstance(command, Inspect):
            return self._inspect(command)
        assert isinstance(command, Capture), command
        return capture(self._views, command)

    def blocks_assigned(self, block_ids: tuple[int, ...]) -> None:
        """Nobody counts generations."""

    def poll(self) -> None:
        """Report nothing: without transfers there is no news."""

    def close(self) -> None:
        """Nothing to give back."""


class TransferExtension:
    """Dispatches commands to a TransferRank."""

    def __init__(
        self,
        rank: EngineRank,
        agent: TransferAgent,
        *,
        engine: str,
        epoch: int,
        lease_s: float,
        renewed_lease_s: float | None = None,
        staging: StagingSettings | None = None,
        make_push_agent: Callable[[], TransferAgent] | None = None,
        push_layers: int | None = None,
        outbox_bytes: int | None = None,
        faults: Sequence[PlantedFault] = (),
        on_point: Callable[[str, int], None] = lambda point, count: None,
        meter: Meter | None = None,
        token_classes: TokenClasses = ONE_CLASS,
    ) -> None:
        """`token_classes`: of all sides of the deployment. `make_push_agent`: of an agent for pushes alone,
        where the engine may push; `push_layers`: see Pusher. `outbox_bytes`: stores go through an outbox of
        so many, see OffloadSettings. `on_point` is told of "transfer" (tickets written or reads started, and
        how many so far)."""
        self._views = sorted_views(layer_views(rank), rank.plan.groups, token_classes)
        self._inspect = Inspection(rank, self._views)
        self._faults = FaultBox(faults)
        self._spoiling = SpoiledDrafts(self._views, faults)
        self._agent = FaultyAgent(agent) if any(f.kind == "flip_bit" for f in faults) else agent
        self._caches = rank.caches
        self._fence = rank.fence
        self._on_point = on_point
        self._meter = meter
        self._lease_ns = int(lease_s * 1e9)
        self._renewed_ns = int(renewed_lease_s * 1e9) if renewed_lease_s is not None else None
        self._num_handovers = 0
        self._refused: list[TransferOutcome] = []
        self._mismatched: set[str] = set()
        self._outbox = Outbox(self._agent, rank.caches, outbox_bytes) if outbox_bytes else None
        description = describe_cache(
            self._agent,
            rank.caches,
            engine=engine,
            epoch=epoch,
            fingerprint=rank.fingerprint(),
            kv_scales=rank.decoder.kv_scales,
            token_classes=token_classes,
            slot_tokens=rank.slot_tokens,
        )
        what, costs = (self._agent, rank.caches, self._views, description), CostTable()
        self.transfer = TransferRank(*what, staging=staging, costs=costs)
        self._push = PushSide(rank, make_push_agent, description, push_layers, costs)
        self._digesting = Digesting()
        if rank.device.type == "cuda":
            launches = transfer_launches(self._views, rank.caches, description.rows_per_group)
            run_warm_up(launches, rank.comm)
        if meter is not None:
            fault_counts = [
                s.num_faults_hit
                for s in (self._faults, self._spoiling, self._agent)
                if isinstance(s, FaultBox | SpoiledDrafts | FaultyAgent)
            ]
            meter.on_flush(lambda: report_totals(meter, sum(self.transfer.num_unsent.values()), fault_counts))

    def execute(self, command: object) -> object:
        """Run one command; see handover.commands."""
        if isinstance(command, PushStep | Reserve | EndReservation | EndPush):
            return self._for_pushes(command)
        # Others are about to read or overwrite pages: no kernel of an earlier step may still use them.
        self._fence.wait()
        match command:
            case Describe() | DescribeOutbox():
                return self._describe(command)
            case Connect():
                return self._connect(command)
            case WarmUp():
                return self.transfer.wire(command.engine, command.timeout_s)
            case MakeTicket():
                return self._make_ticket(command)
            case MakeStore():
                self._make_store(command)
            case StartRead():
                self._start_read(command)
            case Capture():
                return capture(self._views, command)
            case Inspect():
                self.transfer.end_lease(command.lease_id)
                return self._inspect(command)
            case _:
                return self._on_ticket(command)
        return None

    def _describe(self, command: Describe | DescribeOutbox) -> CacheDescription | None:
        own = self.transfer.description
        if isinstance(command, Describe):
            return own
        return None if self._outbox is None else self._outbox.describe(own)

    def _on_ticket(self, command: object) -> object:
        match command:
            case HoldTicket(ticket):
                self.transfer.hold(ticket)
            case LetGo(request_id):
                self.transfer.let_go(request_id)
            case EndLease(lease_id):
                self.transfer.end_lease(lease_id)
            case _:
                return self._after_failure(command)
        return None

    def _for_pushes(self, command: PushStep | Reserve | EndReservation | EndPush) -> object:
        match command:
            case PushStep():
                self._push.begin(command)  # of kernels that are to come: it waits for them
            case Reserve(_, reservation_id, producer, block_tables, num_tokens, cached):
                self._fence.wait()  # kernels of the blocks' last owner may be queued
                self._push.blocks_assigned(
                    [b for table in block_tables for b in table if b and b not in cached]
                )
                self.transfer.reserve(reservation_id, producer, block_tables, num_tokens, cached)
            case EndReservation(reservation_id):
                self.transfer.end_reservation(reservation_id)
            case EndPush(reservation_id, reason):
                self._push.end(reservation_id, reason)
        return None

    def _after_failure(self, command: object) -> object:
        match command:
            case Prove(ticket, block_tables, first_row):
                return self.transfer.proofs(ticket, block_tables, first_row)
            case EndReads(engine, epoch):
                self.transfer.end_reads(engine, epoch)
            case Diagnose():
                return self._diagnose(command)
            case Locate(layer, field, unit, rows):
                return self.transfer.locate(layer, field, unit, rows)
            case ReleaseMismatch(request_id):
                self._mismatched.discard(request_id)
                self.transfer.release_now(request_id)
            case _:
                raise AssertionError(f"unknown command {command!r}")
        return None

    def blocks_assigned(self, block_ids: tuple[int, ...]) -> None:
        """Count the generations of blocks that change hands."""
        self._push.blocks_assigned(block_ids)
        self.transfer.bump_generations(block_ids)

    def poll(self) -> RankNews | None:
        """Drive reads, notifications and leases."""
        now = time.monotonic_ns()
        outcomes = (*self._refused, *self.transfer.poll(now))
        self._refused = []
        self._mismatched |= {o.request_id for o in outcomes if isinstance(o.error, KVMismatch)}
        if self._spoiling:
            self._fence.wait()
            self._spoiling.arrived(outcomes)
        news = RankNews(
            outcomes,
            tuple(self.transfer.drained()),
            tuple(self.transfer.released()),
            tuple(self.transfer.expired(now)),
            tuple(self.transfer.cleared()),
            tuple(self.transfer.reserved()),
            *self._digesting.take(),
        )
        self._push.turn(self.transfer.stops())
        if news == _NO_NEWS:
            return None
        if self._meter is not None:
            report_news(self._meter, news)
        return news

    def close(self) -> None:
        """Give the agents and their registrations back."""
        self._digesting.close()
        self._push.close()
        self.transfer.close()

    def _connect(self, command: Connect) -> CacheDescription | None:
        self.transfer.connect(command.producers, command.consumers)
        if self.transfer.description.agent_name not in {p.agent_name for p in command.producers}:
            return self.transfer.landing(command.producers[0].engine)
        if command.landings:
            self._push.connect(command.producers, command.landings)
        return None

    def _make_ticket(self, command: MakeTicket) -> TicketPart:
        self._num_handovers += 1
        self._on_point("transfer", self._num_handovers)
        began = time.monotonic_ns()
        self.transfer.lease(command.lease_id, began + self._lease_ns, self._renewed_ns)
        generations = self._hand_out(command)
        part = self._make_part(command.request_id, command, generations)
        if self._faults.take("early_reuse", command.request_id) is not None:
            reuse_early(self._caches, [b for table in command.block_tables for b in table if b])
        return part

    def _make_store(self, command: MakeStore) -> None:
        deadline_ns = time.monotonic_ns() + self._lease_ns
        self.transfer.lease(command.lease_id, deadline_ns, self._renewed_ns)
        generations, first_row = self._hand_out(command), command.first_row
        make = functools.partial(self._make_part, command.name, command, generations, first_row)
        self._digesting.begin(command.name, make)

    def _hand_out(self, command: MakeTicket | MakeStore) -> tuple[tuple[int, ...], ...]:
        """Return the generations of the blocks that a ticket is to name."""
        if command.outbox_tables is None:
            return self.transfer.generations(command.block_tables)
        return self._own_outbox.hand_out(command.outbox_tables)

    @property
    def _own_outbox(self) -> Outbox:
        assert self._outbox is not None, "an engine whose ranks have no outbox"
        return self._outbox

    def _make_part(
        self,
        name: str,
        command: MakeTicket | MakeStore,
        generations: tuple[tuple[int, ...], ...],
        first_row: int = 0,
    ) -> TicketPart:
        """Digest the rows of a command's blocks; copy these to the outbox, where it names blocks of it."""
        own, tables = command.block_tables, command.outbox_tables
        with nullcontext() if tables is None else self._own_outbox.copying(own, tables):
            began = time.monotonic_ns()
            found = self._finite_digests(name, command.num_tokens, own, first_row)
            digest_ns = time.monotonic_ns() - began
        return TicketPart(found, generations, self._renewed_ns, digest_ns)

    def _finite_digests(
        self, name: str, num_tokens: int, block_tables: BlockTables, first_row: int = 0
    ) -> Digests:
        """Raises NotFiniteError where any value that they are of is not finite."""

        def refuse() -> None:
            place = first_not_finite(self._views, block_tables, num_tokens, first_row)
            raise NotFiniteError(name, "KV is", kv=str(place))

        what = block_tables, num_tokens, self.transfer.description.rows_per_group, first_row
        return compute_digests(self._views, *what, on_not_finite=refuse)

    def _start_read(self, command: StartRead) -> None:
        self._num_handovers += 1
        self._spoiling.note(command)
        if command.ticket.reservation_id is None:  # else they were handed out when they were reserved
            cached = command.cached_blocks
            self.blocks_assigned(
                tuple(b for table in command.block_tables for b in table if b and b not in cached)
            )
        deadline = time.monotonic_ns() + int(command.deadline_s * 1e9)
        flip = self._faults.take("flip_bit", command.ticket.request_id)
        if flip is not None and isinstance(self._agent, FaultyAgent):
            self._agent.plant(flip.flipped_bit())
        try:
            self.transfer.start(command.ticket, command.block_tables, deadline, command.first_row)
        except RaykError as error:
            # The other ranks may have started: the leader waits for an outcome of each.
            self._refused.append(refusal(command.ticket, error))
            if command.ticket.reservation_id is not None:
                self.transfer.end_reservation(command.ticket.reservation_id)
        self._on_point("transfer", self._num_handovers)

    def _diagnose(self, command: Diagnose) -> list[KVMismatch]:
        if command.request_id not in self._mismatched:
            return []
        return self.transfer.diagnose_all(command.request_id, command.fetched)


_NO_NEWS = RankNews((), (), (), ())
