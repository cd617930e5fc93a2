"""One side of a transfer without a model: ranks whose caches an oracle fills and checks, over NIXL.

An object of it lives in an actor of jobs/transfer_sweep.py. All ranks of an engine are in one process, each
with an agent of its own, which later cells use again.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.benchmarks.pull_rounds import DEADLINE_S, PASSES, measure_pulls
from jobs.benchmarks.raw_reads import Clock
from jobs.ranks import make_rank
from jobs.sweep_oracle import POISON, fill, make_specs, wrong_bytes
from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.groups import group_layers
from rayk.parallel.shard import EngineShape
from rayk.transfer.agent import DescriptorList, Handle, TransferState
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.nixl_agent import NixlAgent
from rayk.transfer.plan import BlockReads, consecutive_tables, plan_pushes
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.token_classes import ONE_CLASS
from rayk.types.errors import TransferError

Tables = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    shape: str
    tp: int
    layout: str
    block_size: int
    num_tokens: int
    scattered: bool
    """Whether block ids lie anywhere, or follow each other."""
    staging: str = "auto"
    num_blocks: int | None = None


@dataclass
class Measured:
    """What one rank pair after the other took; all ranks of a side share a process here. Seconds."""

    num_bytes: int = 0
    num_descriptors: int = 0
    num_merged: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    post_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)
    """As many bytes, in one dense copy."""
    run_bytes: int = 0
    loopback_bytes: int = 0
    """What the loopback network carried meanwhile."""
    staged: bool = False

    def summary(self) -> dict[str, Any]:
        """Medians, by name."""
        values = asdict(self)
        for name in ("wall_s", "cpu_s", "post_s", "memcpy_s"):
            values[name] = statistics.median(values[name]) if values[name] else None
        return values


class Host:
    """`name` is unique among hosts that meet."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self._name = name
        self._agents: list[NixlAgent] = []
        self._caches: list[CanonicalKVCaches] = []
        self._ranks: list[TransferRank] = []
        self._peers: list[CacheDescription] = []
        self._tables: Tables = []
        self._setup: Setup | None = None
        self._clock = Clock(is_wall=True)
        self._life = 0
        self._releases_s = 0.0

    def pid(self) -> int:
        return os.getpid()

    def build(self, setup: Setup) -> list[CacheDescription]:
        """Become an engine; the one before is gone."""
        self.close()
        self._setup = setup
        self._life += 1
        groups = group_layers(make_specs(setup.shape, setup.block_size))
        for rank in range(setup.tp):
            if rank == len(self._agents):
                self._agents.append(NixlAgent(f"{self._name}{rank}-{os.getpid()}"))
            caches, made = make_rank(
                groups,
                setup.layout,
                self._agents[rank],
                shape=EngineShape(setup.tp),
                rank=rank,
                num_blocks=setup.num_blocks or _num_blocks(groups, setup),
                engine=self._name,
                epoch=self._life,
                fill=POISON,
                staging=StagingSettings(mode=setup.staging),
                clock=self._clock.now_ns,
            )
            self._caches.append(caches)
            self._ranks.append(made)
        self._tables = _tables(self._caches[0], setup, self._name)
        return [rank.description for rank in self._ranks]

    def fill(self, lease: str) -> TransferTicket:
        """Fill the request's pages; its ticket, under a lease."""
        assert self._setup is not None
        for caches in self._caches:
            fill(caches, self._tables, self._setup.num_tokens)
        for rank in self._ranks:
            rank.lease(lease, time.monotonic_ns() + int(DEADLINE_S * 1e9))
        return self._ticket(lease, self._setup.num_tokens)

    def _ticket(self, lease: str, num_tokens: int) -> TransferTicket:
        return self._ranks[0].make_ticket(
            request_id=lease,
            lease_id=lease,
            num_tokens=num_tokens,
            block_tables=self._tables,
            digests=[rank.digests(num_tokens, self._tables) for rank in self._ranks],
        )

    def tables(self) -> Tables:
        """Block ids of the request, by group."""
        return self._tables

    def connect(self, producers: list[CacheDescription], consumers: list[CacheDescription]) -> None:
        self._peers = producers
        for rank in self._ranks:
            rank.connect(producers, consumers)

    def receive(self, ticket: TransferTicket) -> dict[str, Any]:
        """Pull a request to its verdict on every rank, one rank after the other. Raises what it ends with."""
        measured = Measured()
        self._receive(ticket, measured)
        return measured.summary()

    def push(
        self, ticket: TransferTicket, tables: Tables, consumers: list[CacheDescription]
    ) -> dict[str, Any]:
        """Write a request into the consumer's blocks, from every rank. Raises TransferError."""
        measured = Measured()
        self._push(self._prepare_writes(ticket, tables, consumers), measured)
        return measured.summary()

    def measure_push(
        self, ticket: TransferTicket, tables: Tables, consumers: list[CacheDescription], rounds: int
    ) -> dict[str, Any]:
        """Push the request over and over, beside a copy of as many bytes."""
        measured, writes = Measured(), self._prepare_writes(ticket, tables, consumers)
        self._push(writes, Measured())
        source = torch.empty(sum(w.num_bytes for w in writes), dtype=torch.int8).fill_(1)
        target = torch.empty_like(source).fill_(2)
        before = _loopback_bytes()
        for _ in range(rounds):
            self._push(writes, measured)
            began = time.perf_counter()
            target.copy_(source)
            measured.memcpy_s.append(time.perf_counter() - began)
        measured.loopback_bytes = (_loopback_bytes() - before) // rounds
        measured.num_bytes //= rounds
        measured.num_descriptors //= rounds
        measured.num_merged //= rounds
        measured.run_bytes = int(np.median(np.concatenate([w.lengths for w in writes])))
        return measured.summary()

    def verify(self, ticket: TransferTicket) -> int:
        """After a push: digests of what arrived against the ticket's; the number of words that differ."""
        from rayk.transfer.verify import compare_digests

        return sum(
            len(
                compare_digests(
                    rank._views,
                    ticket.digests,
                    rank.digests(ticket.num_tokens, self._tables),
                    rank.plan(ticket.engine).sources(ONE_CLASS),
                    ticket.num_tokens,
                    rank.description.rows_per_group,
                )
            )
            for rank in self._ranks
        )

    def check(self) -> list[tuple[int, str]]:
        """By rank: wrong bytes of all its pages, and the first of them."""
        assert self._setup is not None
        return [wrong_bytes(caches, self._tables, self._setup.num_tokens) for caches in self._caches]

    def released(self, lease: str) -> bool:
        """Wait until every rank was told that the lease is over; False when it never was."""
        left = set(range(len(self._ranks)))
        until = time.monotonic() + DEADLINE_S
        while left and time.monotonic() < until:
            for rank in tuple(left):
                self._ranks[rank].poll(time.monotonic_ns())
                if lease in self._ranks[rank].released():
                    left.discard(rank)
        return not left

    def measure(self, ticket: TransferTicket, rounds: int) -> dict[str, Any]:
        """Pull the request over and over, in turns with bare NIXL with the same descriptors."""
        once = Measured()
        self._receive(ticket, once)  # wires up, and makes every list
        sides = list(zip(self._agents, self._ranks, strict=False))
        before = _loopback_bytes()
        found = measure_pulls(sides, self._peers, ticket, self._tables, self._clock, rounds)
        return {
            **once.summary(),
            **found,
            "loopback_bytes": (_loopback_bytes() - before) // (PASSES * rounds),
        }

    def offer_cpu_s(self, rounds: int) -> float:
        """CPU seconds that a request costs the producer: digests, leases, ticket, and its release. The
        releases are those of the pulls that were measured, PASSES of each round."""
        assert self._setup is not None
        self.take_in()
        releases_s, self._releases_s = self._releases_s, 0.0
        began, num_tokens = time.process_time(), self._setup.num_tokens
        for i in range(rounds):
            for rank in self._ranks:
                rank.lease(f"offer-{i}", time.monotonic_ns() + int(DEADLINE_S * 1e9))
            self._ticket(f"offer-{i}", num_tokens)
        return (time.process_time() - began + releases_s / PASSES) / rounds

    def take_in(self) -> None:
        """Take in what consumers told of their pulls."""
        began = time.process_time()
        for rank in self._ranks:
            rank.poll(time.monotonic_ns())
        self._releases_s += time.process_time() - began

    def ucx_log(self) -> str:
        """What UCX said of its choices so far ("" where it was not asked to)."""
        path = os.environ.get("UCX_LOG_FILE", "").replace("%p", str(os.getpid()))
        return Path(path).read_text() if path and Path(path).is_file() else ""

    def close(self) -> None:
        """Forget the engine; agents stay."""
        for rank in self._ranks:
            rank.close()
        self._caches, self._ranks, self._tables = [], [], []

    def _receive(self, ticket: TransferTicket, measured: Measured) -> None:
        for rank in self._ranks:
            cpu = time.thread_time()
            rank.start(ticket, self._tables, time.monotonic_ns() + int(DEADLINE_S * 1e9))
            outcomes = rank.poll(time.monotonic_ns())
            while not outcomes:
                outcomes = rank.poll(time.monotonic_ns())
            (outcome,) = outcomes
            if outcome.error is not None:
                raise outcome.error
            measured.num_bytes += sum(row.bytes for row in outcome.rows)
            measured.num_descriptors += sum(row.num_descriptors for row in outcome.rows)
            measured.num_merged += sum(
                row.num_descriptors_merged or row.num_descriptors for row in outcome.rows
            )
            measured.staged |= any(row.staged for row in outcome.rows)
            measured.wall_s.append(outcome.stage_ns.get("read", 0) / 1e9)
            measured.post_s.append(sum(row.post_ns for row in outcome.rows) / 1e9)
            measured.cpu_s.append(time.thread_time() - cpu)
        if len(self._ranks) > 1:
            _fold(measured, len(self._ranks))

    def _prepare_writes(
        self, ticket: TransferTicket, tables: Tables, consumers: list[CacheDescription]
    ) -> list[_Write]:
        """Every write of every rank, its descriptor lists made."""
        mine = [rank.description for rank in self._ranks]
        geometries = [d.geometry for d in mine], [d.geometry for d in consumers]
        return [
            _Write.prepare(agent, me, consumers[consumer], read)
            for agent, me in zip(self._agents, mine, strict=False)
            for consumer, plan in plan_pushes(me.geometry, *geometries).items()
            for read in plan.lower(ticket.num_tokens, ticket.block_tables, tables)
        ]

    def _push(self, writes: Sequence[_Write], measured: Measured) -> None:
        began, cpu, post_s = time.perf_counter(), time.thread_time(), 0.0
        for write in writes:
            post_s += write.run()
            measured.num_bytes += write.num_bytes
            measured.num_descriptors += write.read.num_descriptors
            measured.num_merged += write.read.num_coalesced
        measured.wall_s.append(time.perf_counter() - began)
        measured.cpu_s.append(time.thread_time() - cpu)
        measured.post_s.append(post_s)


@dataclass(frozen=True, eq=False)
class _Write:
    """One pattern's blocks from a producer rank to a consumer rank."""

    agent: NixlAgent
    handle: Handle
    read: BlockReads
    indices: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def prepare(agent: NixlAgent, me: CacheDescription, peer: CacheDescription, read: BlockReads) -> _Write:
        agent.add_peer(peer.agent_name, peer.agent_metadata)
        pattern, runs = read.pattern, read.pattern.runs
        counts = me.geometry.num_blocks, peer.geometry.num_blocks
        local = DescriptorList(me.base_address + runs.source, runs.lengths, pattern.source_strides, counts[0])
        remote = DescriptorList(
            peer.base_address + runs.destination, runs.lengths, pattern.destination_strides, counts[1]
        )
        return _Write(agent, agent.prepare(peer.agent_name, local, remote), read, read.indices(*counts))

    @property
    def num_bytes(self) -> int:
        return self.read.num_bytes

    @property
    def lengths(self) -> np.ndarray:
        return np.repeat(self.read.pattern.runs.lengths, len(self.read.source_blocks))

    def run(self) -> float:
        """Post it and wait for it; the seconds that posting took. Raises TransferError."""
        began = time.perf_counter()
        transfer = self.agent.write(self.handle, *self.indices)
        post_s = time.perf_counter() - began
        while (state := self.agent.poll(transfer)) is TransferState.PENDING:
            pass
        self.agent.release(transfer)
        if state is not TransferState.DONE:
            raise TransferError("", "a write failed")
        return post_s


def _fold(measured: Measured, num_ranks: int) -> None:
    """The last times, of one rank each, into one of all."""
    for times in (measured.wall_s, measured.post_s, measured.cpu_s):
        last = sum(times[-num_ranks:])
        del times[-num_ranks:]
        times.append(last)


def _num_blocks(groups: Sequence[Any], setup: Setup) -> int:
    """Three times what the request needs, and the null block."""
    needed = sum(-(-setup.num_tokens // g.spec.block_size) for g in groups)
    return 3 * needed + 4


def _tables(caches: CanonicalKVCaches, setup: Setup, name: str) -> Tables:
    tables = consecutive_tables(caches.geometry, setup.num_tokens)
    if not setup.scattered:
        return tables
    ids = 1 + np.random.default_rng(len(name)).permutation(caches.geometry.num_blocks - 1)
    return [[0 if block == 0 else int(ids[block - 1]) for block in table] for table in tables]


def _loopback_bytes() -> int:
    """Received by the loopback interface since boot."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0
