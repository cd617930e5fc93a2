"""Outboxes by themselves, with engines that have no model: what a tier reads there is what the ranks hold,
and it reads nothing else of theirs. On a CPU, whose memory stands for a GPU's, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rayk.handover.commands import TicketPart
from rayk.handover.outbox_room import OutboxRoom
from rayk.handover.tickets import make_ticket
from rayk.kv.caches import allocate
from rayk.kv.outbox import num_outbox_blocks
from rayk.offload import outbox
from rayk.offload.outbox import Outbox, outbox_name
from rayk.parallel.shard import EngineShape
from rayk.transfer.agent import DescriptorList, Handle, Ints32, Transfer, TransferAgent
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import OutOfBlocks, UserError
from rayk.types.offload import GPU_OUTBOX_BYTES, OffloadSettings
from tests.markers import gpu, one_per, sweep
from tests.offload.cluster import (
    BareNode,
    ByteEngine,
    Kind,
    Tables,
    open_node,
    random_values,
    tokens_of,
)
from tests.offload.families import FAMILIES

N = 96
"""Tokens: six blocks of 16."""
KINDS = (Kind(tp=2, layout="LBNHC", block_size=32), Kind(tp=4, layout="BLHNC"), Kind(state_block_size=32))


class Watched:
    """The tier's agent, and where what it read was: (peer, device, first and last byte)."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._lists: dict[Handle, tuple[str, str, DescriptorList]] = {}
        self.reads: list[tuple[str, str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        handle = self._agent.prepare(peer, local, remote, remote_device)
        self._lists[handle] = peer, remote_device, remote
        return handle

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        peer, device, lists = self._lists[handle]
        ends = lists.addresses + (lists.num_blocks - 1) * lists.strides + lists.lengths
        self.reads.append((peer, device, int(lists.addresses.min()), int(ends.max())))
        return self._agent.read(handle, local_indices, remote_indices)


@dataclass(eq=False)
class Boxed:
    """An engine whose ranks have outboxes, attached to a node's tier."""

    node: BareNode
    engine: ByteEngine
    boxes: list[Outbox]
    room: OutboxRoom

    @classmethod
    def add(cls, node: BareNode, kind: Kind, num_blocks: int | None = None) -> Boxed:
        engine = node.add(kind)
        geometry = engine.caches[0].geometry
        groups = [g.group for g in geometry.groups]
        num_bytes = 64 << 20
        if num_blocks is not None:
            num_bytes = num_blocks * max(
                outbox.outbox_geometry(c.geometry, num_bytes).block_bytes for c in engine.caches
            )
        pairs = zip(engine.agents, engine.caches, strict=True)
        boxes = [Outbox(agent, caches, num_bytes) for agent, caches in pairs]
        told = [box.describe(d) for box, d in zip(boxes, engine.descriptions, strict=True)]
        node.tier.attach(engine.descriptions, told)
        there = num_outbox_blocks(groups, EngineShape(kind.tp), geometry.num_blocks, num_bytes)
        assert {box.caches.geometry.num_blocks for box in boxes} == {there}
        return cls(node, engine, boxes, OutboxRoom(groups, there))

    def ticket(self, tables: Tables, num_tokens: int, first_row: int = 0) -> tuple[TransferTicket, Any]:
        """Copy, digest and lease, as every rank does; the engine's own blocks are spoiled thereafter."""
        own = tuple(map(tuple, tables))
        taken = self.room.take(own, range(first_row, num_tokens))
        name = f"{self.engine.name}/store{next(self.node._ids)}"
        parts = []
        for rank, box in zip(self.engine.ranks, self.boxes, strict=True):
            rank.lease(name, self.node.clock() + 60_000_000_000)
            generations = box.hand_out(taken)
            with box.copying(own, taken):
                digests = rank.digests(num_tokens, tables, first_row)
            parts.append(TicketPart(digests, generations))
        self.engine.poison()
        what = {"num_tokens": num_tokens, "block_tables": taken, "first_row": first_row}
        names = {"request_id": name, "lease_id": name, "engine": outbox_name(self.engine.name), "epoch": 0}
        return make_ticket(parts, **names, **what), taken

    def store(self, sequence: int, num_tokens: int = N) -> None:
        """Values of a sequence, by way of the outboxes."""
        values = random_values(self.node.make, num_tokens, sequence)
        tables = self.engine.tables(num_tokens, sequence)
        self.engine.write(values, tables)
        ticket, taken = self.ticket(tables, num_tokens)
        found = self.node.begin_store(self.engine, ticket, tokens_of(sequence, num_tokens))
        self.node.turn_until(lambda: bool(found), self.engine)
        assert found[0].ok, found[0].reason
        self.node.expect_released(self.engine, ticket.lease_id)
        self.room.give_back(taken)
        loaded = self.node.load(self.engine, tokens_of(sequence, num_tokens), seed=sequence + 1)
        assert loaded.errors == [None] * self.engine.tp
        self.engine.check(values, loaded.tables)
        self.node.check_tier(values, loaded.answer)

    def expect_free(self) -> None:
        self.room.pool.check_integrity()
        assert self.room.pool.num_free_blocks == self.room.num_blocks


def watched_node(family: str, **how: Any) -> tuple[BareNode, list[Watched]]:
    made: list[Watched] = []

    def wrap(name: str, agent: TransferAgent) -> Any:
        if name != "tier":
            return agent
        made.append(Watched(agent))
        return made[-1]

    return open_node(family, wrap=wrap, **how), made


@sweep(3)
@one_per()
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_bytes", [outbox.CHUNK_BYTES, 1])
def test_a_tier_reads_outboxes_alone(
    family: str, kind: Kind, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format and kind of state, all bytes right, though the ranks' own blocks were spoiled when the
    tier began to read."""
    monkeypatch.setattr(outbox, "CHUNK_BYTES", chunk_bytes)
    node, agents = watched_node(family)
    boxed = Boxed.add(node, kind)
    (watched,) = agents
    for sequence in range(2):
        boxed.store(sequence, node.whole(N))
    boxed.expect_free()
    node.expect_idle()
    regions = [(b.caches.buffer.data_ptr(), b.caches.buffer.numel()) for b in boxed.boxes]
    assert watched.reads
    for _, device, first, stop in watched.reads:
        assert device == "cpu"
        assert any(start <= first and stop <= start + size for start, size in regions)


def test_what_the_tier_has_is_not_copied_again() -> None:
    node, _ = watched_node("full")
    boxed = Boxed.add(node, Kind(tp=2))
    values = random_values(node.make, 512)
    tables = boxed.engine.tables(512)
    boxed.engine.write(values, tables)
    taken = boxed.room.take(tuple(map(tuple, tables)), range(256, 512))
    assert [sum(b != 0 for b in table) for table in taken] == [16]
    assert taken[0][:16] == (0,) * 16
    boxed.room.give_back(taken)
    boxed.expect_free()


def test_free_blocks_of_an_outbox_lie_anywhere() -> None:
    """Of three blocks one is in use: two are copied in one piece, and the next ones behind a gap."""
    node = open_node("full")
    boxed = Boxed.add(node, Kind(tp=2))
    all_blocks = boxed.room.pool.allocate(boxed.room.num_blocks)
    used = [block for block in all_blocks if block % 3 == 0]
    boxed.room.pool.free([block for block in all_blocks if block % 3])
    boxed.store(0)
    boxed.room.pool.free(used)
    boxed.expect_free()
    node.expect_idle()


def test_blocks_that_are_handed_out_again_spoil_a_late_read_only() -> None:
    node = open_node("full", delay_polls=3)
    boxed = Boxed.add(node, Kind(tp=2))
    tables = boxed.engine.tables(N)
    boxed.engine.write(random_values(node.make, N), tables)
    ticket, taken = boxed.ticket(tables, N)
    found = node.begin_store(boxed.engine, ticket, tokens_of(0, N))
    node.turn(boxed.engine)
    for box in boxed.boxes:
        box.hand_out(taken)
        box.caches.buffer[: box.caches.geometry.pages_bytes].fill_(7)
    node.turn_until(lambda: bool(found), boxed.engine)
    assert "was reused while being read" in found[0].reason
    boxed.room.give_back(taken)
    node.turn_until(lambda: not node.tier.is_busy, boxed.engine)
    boxed.store(1)
    boxed.expect_free()
    node.expect_idle()


def test_a_wrong_byte_in_an_outbox_is_found() -> None:
    """Digests are of the ranks' own blocks: whatever the copy does is proven."""
    node = open_node("full")
    boxed = Boxed.add(node, Kind())
    tables = boxed.engine.tables(N)
    boxed.engine.write(random_values(node.make, N), tables)
    ticket, taken = boxed.ticket(tables, N)
    box = boxed.boxes[0]
    box.caches.buffer[taken[0][2] * box.caches.geometry.block_bytes + 5] ^= 1
    found = node.begin_store(boxed.engine, ticket, tokens_of(0, N))
    node.turn_until(lambda: bool(found), boxed.engine)
    assert "digests differ" in found[0].reason
    assert node.tier.counts["mismatches"] == 1


def test_an_engine_goes_with_its_outboxes() -> None:
    node = open_node("full", delay_polls=3)
    boxed = Boxed.add(node, Kind(), num_blocks=20)
    tables = boxed.engine.tables(N)
    ticket, _ = boxed.ticket(tables, N)
    found = node.begin_store(boxed.engine, ticket, tokens_of(0, N))
    node.turn(boxed.engine)
    node.tier.detach(boxed.engine.name)
    node.turn_until(lambda: bool(found), boxed.engine)
    assert "is gone" in found[0].reason
    late = node.begin_store(boxed.engine, ticket, tokens_of(0, N))
    assert "is not connected" in late[0].reason


# Room.


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_fit_and_cover_all_rows(family: str) -> None:
    node = open_node(family)
    engine = node.add(Kind(num_blocks=400))
    groups = engine.groups()
    for num_blocks in (5, 19, 40, 90):
        room = OutboxRoom(groups, num_blocks + 1)
        parts = list(room.parts(range(64, 1000), 64))
        assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (64, 1000)
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            if after is not None:
                longer = range(part.start, min(part.stop + 64, 1000))
                assert not room.can_hold(longer), "no part is shorter than it may be"
            tables = tuple(map(tuple, engine.tables(part.stop)))
            needed = room.num_needed(tables, part)
            assert room.can_hold(part) == (needed <= num_blocks)


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    node = open_node("gpt_oss")
    engine = node.add(Kind())
    tables = tuple(map(tuple, engine.tables(N)))
    room = OutboxRoom(engine.groups(), 8)
    with pytest.raises(OutOfBlocks):
        room.take(tables, range(N))
    assert room.pool.num_free_blocks == 7


def test_an_outbox_that_holds_nothing_is_refused() -> None:
    groups = open_node("gpt_oss").add(Kind()).groups()
    with pytest.raises(UserError, match="outbox_mib"):
        num_outbox_blocks(groups, EngineShape(), 40, 100)
    assert num_outbox_blocks(groups, EngineShape(), 40, 1 << 40) == 40, "no larger than what it copies"


@pytest.mark.parametrize(
    ("asked", "device", "num_bytes"),
    [
        (None, "cuda", GPU_OUTBOX_BYTES),
        (None, "cuda:1", GPU_OUTBOX_BYTES),
        (None, "cpu", 0),
        (7, "cpu", 7),
        (0, "cuda", 0),
    ],
)
def test_gpus_have_outboxes_unless_told_otherwise(asked: int | None, device: str, num_bytes: int) -> None:
    settings = OffloadSettings(host_bytes=1, outbox_bytes=asked)
    assert settings.on(device).outbox_bytes == num_bytes


# Streams.


def test_copies_are_queued_on_a_stream_of_the_outboxs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    made: list[torch.device] = []
    copy_runs = outbox.copy_runs

    def own_stream(device: torch.device) -> Any:
        made.append(device)

        @contextmanager
        def stream() -> Iterator[None]:
            current.append(1)
            yield
            current.pop()

        return stream

    def copy(*what: Any) -> None:
        assert current, "copies are queued on a stream of their own"
        copy_runs(*what)

    monkeypatch.setattr(outbox, "own_stream", own_stream)
    monkeypatch.setattr(outbox, "copy_runs", copy)
    boxed = Boxed.add(open_node("full"), Kind(tp=2))
    assert len(made) == 2
    boxed.store(0)


def halves(tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Some blocks in the middle of a long run are null."""
    return tuple(tuple(0 if i % 5 == 2 else b for i, b in enumerate(table)) for table in tables)


@gpu
@pytest.mark.parametrize("family", ["full", "gpt_oss", "granite", "nvfp4"])
def test_a_gpu_stores_and_loads_by_pinned_memory(family: str) -> None:
    node, agents = watched_node(family, device=torch.device("cuda:0"))
    boxed = Boxed.add(node, Kind(tp=2, layout="LBNHC"))
    assert all(box.caches.is_pinned for box in boxed.boxes)
    for sequence in range(2):
        boxed.store(sequence, node.whole(N))
    boxed.expect_free()
    node.expect_idle()
    assert {device for _, device, _, _ in agents[0].reads} == {"cpu"}


@gpu
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BHLNC"])
def test_a_gpus_copies_do_not_wait_for_its_steps(layout: str) -> None:
    """A kernel that sleeps stands for a step: the copies are done while it runs."""
    device = torch.device("cuda:0")
    node = open_node("full")
    geometry = node.add(Kind(layout=layout, num_blocks=200)).caches[0].geometry
    there, here = allocate(geometry, device), allocate(geometry, torch.device("cpu"))
    here.buffer.random_(-128, 128)
    there.buffer.copy_(here.buffer)
    agent = node.agent("outboxes")
    ours, theirs = Outbox(agent, here, 64 << 20), Outbox(agent, there, 64 << 20)
    assert theirs.caches.is_pinned
    own = halves([range(1, 200)])
    to = halves([range(1, 200)])
    ours.caches.buffer.zero_()
    theirs.caches.buffer.zero_()
    for box in (theirs, ours):  # the first time it compiles
        with box.copying(own, to):
            pass
    assert torch.equal(theirs.caches.buffer, ours.caches.buffer)
    theirs.caches.buffer.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    step = torch.cuda.Event()
    step.record()
    with theirs.copying(own, to):
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
    assert not step.query(), "the step runs still"
    assert torch.equal(theirs.caches.buffer, ours.caches.buffer)
    torch.cuda.synchronize()
