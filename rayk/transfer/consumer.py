"""Carries out the actions of one session: posts and polls reads, computes digests, keeps the times."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rayk.kv.block_pool import NULL_BLOCK
from rayk.transfer import session as s
from rayk.transfer.agent import TransferAgent, TransferState
from rayk.transfer.arrivals import ArrivalReads
from rayk.transfer.convert import Converting
from rayk.transfer.draining import Drained, Failed, Finish, Tick
from rayk.transfer.lease import Renewals
from rayk.transfer.link import Landing, ProducerLink
from rayk.transfer.plan import BlockReads
from rayk.transfer.reads import DataReads, PostedRead
from rayk.transfer.staging import Staging
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.verify import (
    CanonicalViews,
    Prove,
    WrongWord,
    compare_digests,
    compute_digests,
    digest_mismatch,
    num_bytes_checked,
)
from rayk.transfer.waiting import send_releases, send_renewals
from rayk.types.bugs import bug
from rayk.types.errors import KVMismatch, RaykError, TransferError
from rayk.types.rows import TransferRow


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOutcome:
    """How one request's transfer ended on one consumer rank."""

    request_id: str
    lease_id: str
    error: RaykError | None
    rows: tuple[TransferRow, ...]
    """One per (producer rank, group) read; cell and repeat are left to whoever knows them."""
    stage_ns: dict[str, int]
    """read, fence, verify; a stage that never began is absent."""
    is_draining: bool
    """Reads are still in flight: the blocks stay taboo until `drained` names the lease."""
    wrong_words: tuple[WrongWord, ...] = ()
    """They are in canonical order."""
    began_ns: int | None = None
    """When the first stage began, on this rank's clock; the others follow one another. None where nothing
    did."""
    num_bytes_checked: int = 0
    """Bytes whose digests were compared."""
    left_out: tuple[str, ...] = ()
    """Draft layers of either side that did not move, and why."""

    @property
    def ok(self) -> bool:
        """The KV is here and proven."""
        return self.error is None


def refusal(ticket: TransferTicket, error: RaykError) -> TransferOutcome:
    """Return the outcome of a transfer that never began."""
    return TransferOutcome(
        request_id=ticket.request_id,
        lease_id=ticket.lease_id,
        error=error,
        rows=(),
        stage_ns={},
        is_draining=False,
    )


class _LateFences(Mapping[int, s.Fence]):
    """The fences of these producer ranks, made when the first is looked at: reads go out before."""

    def __init__(self, ranks: set[int], make: Callable[[], dict[int, s.Fence]]) -> None:
        self._ranks = ranks
        self._make = make
        self._made: dict[int, s.Fence] | None = None

    def __getitem__(self, rank: int) -> s.Fence:
        if self._made is None:
            self._made = self._make()
        return self._made[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


@dataclass(eq=False)
class Consumption:
    """One request's transfer on this rank, from ticket to verdict."""

    ticket: TransferTicket
    block_tables: Sequence[Sequence[int]]
    link: ProducerLink
    agent: TransferAgent
    landing: Landing
    staging: Staging
    buffer: torch.Tensor
    """The registered memory that is read into: int8 [bytes]."""
    views: CanonicalViews
    rows_per_group: int
    name: str
    """This rank's agent name, as releases carry it."""
    deadline_ns: int
    first_row: int = 0
    """Rows before it are here already, and are nobody's to write."""
    renewals: Renewals | None = None
    """Renewals of the lease, if it was renewed before; the session goes on with them."""
    clock: Callable[[], int] = time.monotonic_ns
    pushed: ArrivalReads | None = None
    """What is waited for where the KV is pushed; None: it is read."""
    converting: Converting | None = None
    """What makes the rank's own rows of those that arrive, where formats differ: views, block tables and
    buffer are then those of the wire cache."""
    prove: Prove | None = None
    """Digests what has arrived, in place of `compute_digests`."""
    outcome: TransferOutcome | None = None
    is_closed: bool = False
    reads: list[BlockReads] = field(init=False)
    session: s.Session = field(init=False)
    _expected: _LateFences = field(init=False)
    _data: DataReads | ArrivalReads = field(init=False)
    _fences: dict[int, tuple[PostedRead, range]] = field(default_factory=dict)
    _waiting: set[int] = field(default_factory=set)
    """Producer ranks whose fence found no room yet."""
    _stages: dict[str, int] = field(default_factory=dict)
    _began_ns: int = 0
    _stage_began_ns: int = 0
    _wrong: list[WrongWord] = field(default_factory=list)
    _bugs: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Lowering the plan is part of the read's cost.
        self._began_ns = self._stage_began_ns = self.clock()
        ticket, pushed = self.ticket, self.pushed
        rows = range(self.first_row, ticket.num_tokens) if self.first_row else None
        self.reads = [] if pushed is not None else self._lower(rows)
        self._data = pushed or DataReads(
            ticket.request_id, self.reads, self.link, self.agent, self.staging, self.buffer, self.clock
        )
        if self.first_row:
            self._data.note_cached(self._lower(range(ticket.first_row, self.first_row)))
        self._expected = _LateFences({r.producer_rank for r in self.reads}, self._expected_generations)
        self.session = s.Session(
            ticket.request_id,
            num_reads=len(self.reads) if pushed is None else len(pushed.producer_ranks),
            fences=self._expected,
            notify=tuple(self.link.num_releases),
            deadline_ns=self.deadline_ns,
            renewals=self.renewals or Renewals(ticket.lease_ns),
        )

    @property
    def is_drained(self) -> bool:
        """Whether it is over, with nothing in flight."""
        return self.session.is_drained

    def close(self) -> None:
        """Nobody needs what was kept of it. Once is enough."""
        if self.converting is not None and not self.is_closed:
            self.converting.give_back()
        self.is_closed = True

    def start(self) -> None:
        """Post the reads and go as far as that gets (over CMA a read is done when it is posted)."""
        if self._data.refusal is not None:
            self.fail(self._data.refusal)
            return
        self._guard(lambda: self._run(self.session.start()))
        self.step(self.clock())

    def step(self, now_ns: int) -> None:
        """Poll what is in flight and let time pass."""
        self._guard(lambda: self._step(now_ns))

    def _guard(self, act: Callable[[], None]) -> None:
        """A bug ends this transfer, not the engine; what is in flight drains as after any failure. One that
        comes again at every turn is told once: what it hides may still be written, and never drains."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told, logged with its traceback
            if repr(error) not in self._bugs:
                self._bugs.add(repr(error))
                self.fail(str(bug(f"the transfer of {self.ticket.request_id}", error)))

    def _step(self, now_ns: int) -> None:
        # Handling one may cancel others: look each up when its turn comes.
        for index in self._data.in_flight:
            for event in self._data.poll(index):
                self._handle(event, now_ns)
        for rank in tuple(self._waiting):
            if rank in self._waiting:
                for event in self._post_fence(rank):
                    self._handle(event, now_ns)
        for rank in tuple(self._fences):
            if rank in self._fences:
                self._poll_fence(rank, self._fences[rank][0], now_ns)
        self._handle(Tick(), now_ns)

    def fail(self, reason: str) -> None:
        """End it for a reason from outside (nothing if it is over)."""
        self._handle(Failed(reason), self.clock())

    def release(self) -> None:
        """Give up the lease that a mismatch kept."""
        self._run(self.session.release())

    def _lower(self, rows: range | None) -> list[BlockReads]:
        """Return the reads that bring these rows; None: all live ones."""
        tables = self.ticket.block_tables, self.block_tables
        return self.link.plan.lower(self.ticket.num_tokens, *tables, rows=rows)

    def _expected_generations(self) -> dict[int, s.Fence]:
        """Per producer rank, every block read from it, with its generation."""
        ticket = self.ticket
        known = [
            dict(zip(*of, strict=True)) for of in zip(ticket.block_tables, ticket.generations, strict=True)
        ]
        blocks: dict[int, dict[int, int]] = {}
        for read in self.reads:
            found = known[read.source_group]
            of_rank = blocks.setdefault(read.producer_rank, {})
            of_rank.update({block: found[block] for block in read.source_blocks.tolist()})
        assert all(NULL_BLOCK not in b for b in blocks.values())
        return {
            rank: s.Fence(tuple(b), tuple(b.values()), functools.partial(self._contents, rank))
            for rank, b in blocks.items()
        }

    def _contents(self, producer_rank: int, block: int) -> str:
        """Return what a producer rank's block holds of what this rank reads."""
        group, index = next(
            (g, table.index(block)) for g, table in enumerate(self.ticket.block_tables) if block in table
        )
        geometry = self.link.producers[producer_rank].geometry.groups[group]
        first = index * geometry.block_size
        last = min(first + geometry.block_size, self.ticket.num_tokens) - 1
        layers = ", ".join(map(str, geometry.layers))
        wanted = (producer_rank, group)
        read = next(r for r in self.link.plan.reads if (r.producer_rank, r.source_group) == wanted)
        # Fields with the same units are named once.
        named = dict.fromkeys(
            f"{geometry.field(name).field.unit_name}s {', '.join(map(str, units))}"
            for name, units in read.units.items()
        )
        return f"tokens {first} to {last} of layers {layers} (group {group}), {'; '.join(named)}"

    def _handle(self, event: s.Event, now_ns: int) -> None:
        self._run(self.session.handle(event, now_ns))

    def _run(self, actions: list[s.Action]) -> None:
        """Carry out actions and whatever follows from them."""
        todo = deque(actions)
        while todo:
            event = self._carry_out(todo.popleft())
            for e in event:
                todo.extend(self.session.handle(e, self.clock()))

    def _carry_out(self, action: s.Action) -> list[s.Event]:
        match action:
            case s.PostReads(reads):
                return [e for i in reads for e in self._data.post(i)]
            case s.PostFence(rank):
                self._stage("read")
                return self._post_fence(rank)
            case s.ComputeDigests():
                self._stage("fence" if "read" in self._stages else "read")
                return [s.Verified(self._verify())]
            case s.Cancel(reads, fences):
                return self._cancel(reads, fences)
            case s.Release(ranks):
                send_releases(self.agent, self.link, self.ticket.lease_id, ranks)
            case s.Renew(ranks, number):
                send_renewals(self.agent, self.link, self.ticket.lease_id, ranks, number)
            case Finish(error, is_draining):
                self._finish(error, is_draining)
            case Drained():
                pass
        return []

    def _post_fence(self, rank: int) -> list[s.Event]:
        blocks = self._expected[rank].blocks
        if len(blocks) > self.landing.num_slots:
            return [s.FenceEnded(rank, f"no room for the generations of {len(blocks)} blocks")]
        slots = self.landing.take(len(blocks))
        if slots is None:
            self._waiting.add(rank)
            return []
        self._waiting.discard(rank)
        began = self.clock()
        try:
            transfer = self.agent.read(
                self.link.fences[rank],
                np.arange(slots.start, slots.stop, dtype=np.int32),
                np.array(blocks, dtype=np.int32),
            )
        except TransferError as error:
            self.landing.give_back(slots)
            return [s.FenceEnded(rank, error.reason)]
        self._fences[rank] = (PostedRead(transfer, began, self.clock() - began), slots)
        return []

    def _poll_fence(self, rank: int, fence: PostedRead, now_ns: int) -> None:
        state = self.agent.poll(fence.transfer)
        if state is TransferState.PENDING:
            return
        _, slots = self._fences.pop(rank)
        self.agent.release(fence.transfer)
        generations = self.landing.give_back(slots)
        if state is TransferState.DONE:
            self._handle(s.FenceDone(rank, generations), now_ns)
        else:
            self._handle(s.FenceEnded(rank, f"reading generations of producer rank {rank} failed"), now_ns)

    def _cancel(self, reads: tuple[int, ...], fences: tuple[int, ...]) -> list[s.Event]:
        events: list[s.Event] = [s.ReadEnded(i, "cancelled") for i in reads if self._data.cancel(i)]
        for rank in fences:
            self._waiting.discard(rank)
            pending = self._fences.get(rank)
            if pending is None or self.agent.release(pending[0].transfer):
                if pending is not None:
                    self.landing.give_back(self._fences.pop(rank)[1])
                events.append(s.FenceEnded(rank, "cancelled"))
        return events

    def _verify(self) -> KVMismatch | None:
        ticket = self.ticket
        began = self.clock()
        what = ticket.num_tokens, self.rows_per_group, self.first_row
        if self.prove is None:
            found = compute_digests(self.views, self.block_tables, *what)
        else:
            found = self.prove(self.block_tables, ticket.num_tokens, self.first_row)
        sources = self.link.plan.sources(self.views.classes)
        self._wrong = compare_digests(self.views, ticket.digests, found, sources, *what)
        self._note_digest(self.clock() - began)
        mismatch = None
        if not self._wrong and self.converting is not None:
            mismatch = self.converting.finish(ticket, self.rows_per_group, self._data.rows, self.clock)
        self._stage("verify")
        if not self._wrong:
            return mismatch
        return digest_mismatch(ticket.request_id, self.views, self._wrong, *what)

    def _note_digest(self, took_ns: int) -> None:
        theirs = self.ticket.digest_ns
        for row in self._data.rows:
            row.digest_ns += took_ns + (theirs[row.producer_rank] if theirs else 0)

    def _finish(self, error: RaykError | None, is_draining: bool) -> None:
        verdict = "OK"
        checked = num_bytes_checked(self.views, self.ticket.num_tokens, self.first_row)
        if isinstance(error, TransferError):
            error.producer, error.consumer = self.link.engine, self.name
            verdict, checked = "TRANSFER_ERROR", 0
        elif error is not None:
            verdict = "KV_MISMATCH"
        for row in self._data.rows:
            row.verdict = verdict
            row.left_out = "; ".join(self.link.plan.left_out)
        if self.pushed is not None:
            self.pushed.stop()
        self.outcome = TransferOutcome(
            request_id=self.ticket.request_id,
            lease_id=self.ticket.lease_id,
            error=error,
            rows=self._data.rows,
            stage_ns=dict(self._stages),
            began_ns=self._began_ns,
            is_draining=is_draining,
            wrong_words=tuple(self._wrong),
            num_bytes_checked=checked,
            left_out=self.link.plan.left_out,
        )

    def _stage(self, name: str) -> None:
        """The named stage ends now (the first time it is named)."""
        if name not in self._stages:
            now = self.clock()
            self._stages[name] = now - self._stage_began_ns
            self._stage_began_ns = now
