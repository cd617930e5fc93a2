"""Staged reads bring the same bytes as direct ones, in any room, and however they end they leave nothing."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
import torch

from rayk.kernels.copy_runs import copy_runs
from rayk.kv.layout import LAYOUTS
from rayk.transfer import costs, staging
from rayk.transfer.agent import TransferState
from rayk.transfer.extents import make_extents
from rayk.transfer.local_agent import LocalAgent
from rayk.transfer.staging import StagingSettings
from rayk.types.errors import KVMismatch, TransferError
from tests.each import each
from tests.transfer.cluster import Pair, Shape, local_pair

MODES = ("never", "always", "auto")
ALWAYS = StagingSettings("always")


def buffers(pair: Pair) -> list[torch.Tensor]:
    """The consumer's whole memory, generations aside."""
    return [c.buffer[: c.geometry.pages_bytes].clone() for c in pair.consumer.caches]


def assert_nothing_is_left(pair: Pair) -> None:
    """No stretch of a staging buffer is lent or waited for, no list prepared for a chunk is kept."""
    for rank, agent in zip(pair.consumer.ranks, pair.consumer.agents, strict=True):
        buffer = rank._staging.buffer
        assert buffer is None or (buffer.num_lent, buffer.num_waiting) == (0, 0)
        assert isinstance(agent, LocalAgent)
        assert not agent._in_flight
        kept = {p.handle for link in rank._links.values() for p in link.prepared._kept.values()}
        kept |= {handle for link in rank._links.values() for handle in link.fences.values()}
        assert set(agent._handles) == kept


def transfer_in(shape: Shape, mode: str, num_tokens: int, num_bytes: int = 1 << 20, delay_polls: int = 1):
    """(consumer's memory, outcomes) after one request."""
    pair = local_pair(shape, delay_polls, staging=StagingSettings(mode, num_bytes))
    values = shape.values(num_tokens)
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None] * len(outcomes)
    pair.consumer.check_all(values, tables)
    assert pair.released() == [["lease-r"]] * len(pair.producer.ranks)
    assert_nothing_is_left(pair)
    return buffers(pair), outcomes


@each("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
def test_the_bytes_are_the_same_in_every_mode(layouts):
    """All layout pairs, each with another pair of TP sizes, odd head bytes and windows."""
    index = list(itertools.product(LAYOUTS, repeat=2)).index(layouts)
    tp = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (1, 4), (3, 2)][index % 7]
    shape = Shape(
        tp=tp,
        units=4,
        query_heads=24,
        layouts=layouts,
        dtype="bfloat16",
        head_sizes=(6, 5),
        window=None if "LHBNC" in layouts else 7,
        block_sizes=(6, 4),
    )
    found = {mode: transfer_in(shape, mode, 33) for mode in MODES}
    for mode in MODES:
        for ours, direct in zip(found[mode][0], found["never"][0], strict=True):
            assert torch.equal(ours, direct), mode
    staged = {m: {r.staged for o in found[m][1].values() for r in o.rows} for m in MODES}
    assert staged["never"] == {False}
    assert staged["always"] == {True}


@pytest.mark.parametrize("num_bytes", [512, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("family", ["everything", "bamba"])
def test_room_for_less_than_a_read(family, num_bytes):
    """Extents of unlike layers, states and windows; those that fit nowhere go directly."""
    shape = Shape(family=family, tp=(3, 2), layouts=("BLNHC", "LBHNC"), num_blocks=(60, 70))
    ours, outcomes = transfer_in(shape, "always", 130, num_bytes)
    direct, _ = transfer_in(shape, "never", 130)
    for one, other in zip(ours, direct, strict=True):
        assert torch.equal(one, other)
    rows = [r for o in outcomes.values() for r in o.rows]
    assert any(r.staged for r in rows)
    if num_bytes > 4096:
        assert all(r.staged and r.repack_ns > 0 for r in rows)


def test_requests_that_wait_for_room_take_turns():
    """Each chunk takes half of the buffer, and six requests want theirs at once."""
    shape = Shape(tp=(1, 2), layouts=("BLNHC", "BHLNC"), num_blocks=(100, 100))
    pair = local_pair(shape, 2, staging=StagingSettings("always", 2 * 16 * 64 + 2 * 64))
    requests = []
    for i in range(6):
        tables = [list(range(1 + 10 * i, 11 + 10 * i))]
        values = shape.values(37, seed=i)
        pair.producer.write(values, tables)
        requests.append((values, tables, pair.producer.ticket(37, tables, f"r{i}")))
    for _, tables, ticket in requests:
        pair.start(ticket, tables)
    buffer = pair.consumer.ranks[0]._staging.buffer
    assert buffer is not None
    assert buffer.num_waiting >= 4
    outcomes = []
    until = time.monotonic() + 60
    while len(outcomes) < 12 and time.monotonic() < until:
        outcomes += pair.poll()
    assert [o.error for _, o in outcomes] == [None] * 12
    for values, tables, _ in requests:
        pair.consumer.check(values, tables)
    assert_nothing_is_left(pair)


class Stubborn(LocalAgent):
    """Reads in flight cannot be cancelled, as over NIXL."""

    def release(self, transfer):
        return False if self.poll(transfer) is TransferState.PENDING else super().release(transfer)


def started(kind: type[LocalAgent] = LocalAgent, delay_polls: int = 3, deadline_s: float = 60.0):
    """A pair in the middle of a staged read of four chunks, two of which are under way."""
    shape = Shape(layouts=("BLNHC", "BHLNC"), tp=(2, 1))
    pair = local_pair(shape, delay_polls, staging=StagingSettings("always", 2048), kind=kind)
    tables = pair.producer.tables(37)
    pair.producer.write(shape.values(37), tables)
    ticket = pair.producer.ticket(37, tables)
    ours = pair.consumer.tables(37)
    pair.start(ticket, ours, deadline_s)
    buffer = pair.consumer.ranks[0]._staging.buffer
    assert buffer is not None
    assert (buffer.num_lent, buffer.num_waiting) == (2, 2)
    return pair, ticket, buffer, ours


@each("num_polls", [0, 3, 5])
@each("kind", [LocalAgent, Stubborn])
@each("how", ["cancel", "deadline", "disconnect", "peer lost"])
def test_an_end_in_the_middle_leaves_nothing(how, kind, num_polls):
    pair, ticket, buffer, tables = started(kind)
    rank = pair.consumer.ranks[0]
    outcomes = [o for _ in range(num_polls) for _, o in pair.poll()]
    assert not outcomes, "it is in its middle"
    pages = buffers(pair)
    if how == "cancel":
        rank.cancel("r")
    elif how == "deadline":
        outcomes += rank.poll(time.monotonic_ns() + int(100e9))
        pages = buffers(pair)  # what had arrived by then may have been copied still
    elif how == "disconnect":
        rank.disconnect("p")
    else:
        for agent in pair.producer.agents:
            agent.close()
    until = time.monotonic() + 60
    while buffer.num_lent or not outcomes:
        assert time.monotonic() < until
        outcomes += rank.poll(time.monotonic_ns())
    drained = rank.drained()
    (outcome,) = outcomes
    assert isinstance(outcome.error, TransferError)
    assert outcome.is_draining == (drained == ["lease-r"])
    if kind is LocalAgent or how == "peer lost":
        assert not outcome.is_draining
    if how != "peer lost":
        # What arrives late stays in the staging buffer: the pages are not touched again.
        assert all(torch.equal(a, b) for a, b in zip(pages, buffers(pair), strict=True))
        assert pair.released() == [["lease-r"]] * 2
        assert_nothing_is_left(pair)


def test_a_lease_is_kept_and_its_blocks_are_taboo_until_late_chunks_are_here():
    pair, *_ = started(Stubborn, delay_polls=6)
    rank = pair.consumer.ranks[0]
    rank.cancel("r")
    (outcome,) = rank.poll(time.monotonic_ns())
    assert outcome.is_draining
    assert rank.drained() == []
    for _ in range(8):
        rank.poll(time.monotonic_ns())
    assert rank.drained() == ["lease-r"]
    assert_nothing_is_left(pair)


@pytest.mark.parametrize("at", [0, 41, 300])
def test_a_wrong_copy_is_caught_by_the_digests(monkeypatch, at):
    """One byte of one chunk lands elsewhere."""
    calls = itertools.count()

    def wrong(source, destination, runs, here, there):
        copy_runs(source, destination, runs, here, there)
        if next(calls) == 1:
            first = int(runs.host[1, 0] + there[0] * runs.host[4, 0])
            destination[first + at % int(runs.host[2, 0])] ^= 1

    monkeypatch.setattr(staging, "copy_runs", wrong)
    shape = Shape(layouts=("BLNHC", "BHLNC"))
    pair = local_pair(shape, staging=StagingSettings("always", 2048))
    outcomes, _ = pair.transfer(shape.values(36))
    assert isinstance(outcomes[0].error, KVMismatch)
    assert next(calls) > 1


def test_too_many_descriptors_are_staged_or_refused_before_the_first_byte(monkeypatch):
    monkeypatch.setattr(costs, "MAX_DESCRIPTORS", 100)
    shape = Shape(layouts=("BLNHC", "BHLNC"))
    pair = local_pair(shape, staging=StagingSettings("never"))
    outcomes, tables = pair.transfer(shape.values(37))
    assert isinstance(outcomes[0].error, TransferError)
    assert "descriptors, over 100, must be staged, and staging is `never`" in str(outcomes[0].error)
    assert outcomes[0].rows == ()
    blocks = pair.consumer.caches[0].buffer[: pair.consumer.caches[0].geometry.pages_bytes]
    assert bool((blocks == 0x5A).all())
    assert pair.released() == [["lease-r"]]
    for mode in ("auto", "always"):
        _, outcomes = transfer_in(shape, mode, 37)
        assert all(r.staged and r.num_descriptors <= 100 for r in outcomes[0].rows)


def test_rows_say_what_was_chosen_and_what_the_other_would_have_cost():
    shape = Shape(layouts=("BLNHC", "BHLNC"), head_sizes=(8, 8))
    rows = {mode: transfer_in(shape, mode, 36)[1][0].rows[0] for mode in MODES}
    # 9 blocks of 3 layers x 4 tokens x 2 heads: a run of each, or all of a block at once.
    assert rows["never"].num_descriptors == 9 * 3 * 4 * 2
    assert rows["always"].num_descriptors == 9
    assert rows["never"].repack_ns == 0 < rows["always"].repack_ns
    for row in rows.values():
        assert row.bytes == 36 * 3 * 2 * 16 * 4
        assert (row.direct_cost_us, row.staged_cost_us) == (
            rows["auto"].direct_cost_us,
            rows["auto"].staged_cost_us,
        )
        assert row.direct_cost_us is not None
        assert row.staged_cost_us is not None
    assert rows["auto"].staged == (rows["auto"].staged_cost_us < rows["auto"].direct_cost_us)


@pytest.mark.parametrize(("mode", "num_bytes"), [("never", 512), ("always", 512), ("always", 1 << 20)])
def test_rows_count_what_the_transport_was_asked_for(monkeypatch, mode, num_bytes):
    """Whole stretches, of however many chunks, or runs; the reads of generations do not count."""
    shape = Shape(tp=(1, 2), layouts=("BLNHC", "BHLNC"))
    pair = local_pair(shape, staging=StagingSettings(mode, num_bytes))
    asked: Counter[str] = Counter()
    read = LocalAgent.read
    fences = {
        (agent.name, handle)
        for rank, agent in zip(pair.consumer.ranks, pair.consumer.agents, strict=True)
        for link in rank._links.values()
        for handle in link.fences.values()
    }

    def counted(self, handle, local, remote):
        if (self.name, handle) not in fences:
            asked[self.name] += len(local)
        return read(self, handle, local, remote)

    monkeypatch.setattr(LocalAgent, "read", counted)
    outcomes, _ = pair.transfer(shape.values(36))
    for rank, outcome in outcomes.items():
        assert {row.staged for row in outcome.rows} == {mode == "always"}
        name = pair.consumer.agents[rank].name
        assert sum(row.num_descriptors for row in outcome.rows) == asked[name] > 0


def test_what_could_not_be_posted_was_not_asked(monkeypatch):
    shape = Shape(layouts=("BLNHC", "BHLNC"))
    counts = {}
    for mode in ("never", "always"):
        pair = local_pair(shape, staging=StagingSettings(mode, 1 << 20))

        def refuse(self, *lists):
            raise TransferError("", "no route")

        with monkeypatch.context() as patched:
            patched.setattr(LocalAgent, "read", refuse)
            outcomes, _ = pair.transfer(shape.values(36))
        assert "no route" in str(outcomes[0].error)
        counts[mode] = [row.num_descriptors for row in outcomes[0].rows]
    assert counts == {"never": [0], "always": [0]}


def test_consecutive_blocks_are_one_descriptor():
    """Dense on the source's side is enough where the buffer lies between."""
    shape = Shape(layouts=("BLNHC", "BHLNC"))
    pair = local_pair(shape, staging=ALWAYS)
    tables = [[*range(1, 7), 20, 21, 22, 9]]
    values = shape.values(40)
    pair.producer.write(values, tables)
    pair.start(ticket := pair.producer.ticket(40, tables), [list(range(10, 0, -1))])
    (row,) = pair.finish(ticket)[0].rows
    assert (row.num_descriptors, row.num_descriptors_merged) == (10, 3)
    pair.consumer.check(values, [list(range(10, 0, -1))])


@each("seed", range(40))
def test_extents_cover_every_run_and_nothing_twice(seed):
    """Random patterns: in what is read, every run lies where it says; areas of a chunk do not overlap."""
    rng = np.random.default_rng(seed)
    names = list(LAYOUTS)
    shape = Shape(
        units=4,
        dtype="int8",
        head_sizes=(int(rng.integers(1, 9)), int(rng.integers(1, 9))),
        layouts=(names[rng.integers(6)], names[rng.integers(6)]),
        tp=[(1, 1), (2, 1), (4, 2)][seed % 3],
        block_sizes=(int(rng.integers(1, 9)), int(rng.integers(1, 9))),
    )
    pair = local_pair(shape)
    plan = pair.consumer.ranks[0].plan("p")
    pattern = plan.pattern(plan.first_patterns[0])
    gap, capacity = int(rng.integers(0, 200)), int(rng.integers(100, 3000))
    parts = make_extents(pattern, gap, capacity)
    if parts is None:
        assert int(pattern.runs.lengths.max()) > capacity - 100
        return
    runs = set()
    for part in parts:
        assert part.max_blocks(capacity) >= 1
        blocks = int(rng.integers(1, part.max_blocks(capacity) + 1))
        areas, size = part.areas(blocks)
        assert size <= capacity
        assert np.all(areas % 64 == 0)
        ends = areas + part.shifts + part.staged_strides * (blocks - 1) + part.lengths
        assert np.all(ends <= [*areas[1:], size])
        assert np.all((areas + part.shifts - part.starts) % 16 == 0)
        assert np.all(part.run_offsets >= 0)
        assert np.all(part.run_offsets + part.run_lengths <= part.lengths[part.run_extents])
        assert np.all(part.lengths <= part.strides), "NIXL takes no strides below the length"
        source = part.starts[part.run_extents] + part.run_offsets
        runs |= set(zip(source.tolist(), part.destinations.tolist(), part.run_lengths.tolist(), strict=True))
        # A gap that is read along is no longer than allowed.
        read = np.zeros(int((part.starts + part.lengths).max()), dtype=bool)
        for start, length in zip(source, part.run_lengths, strict=True):
            read[start : start + length] = True
        for start, length in zip(part.starts, part.lengths, strict=True):
            inside = np.flatnonzero(read[start : start + length])
            assert (inside[0], inside[-1]) == (0, length - 1)
            assert np.diff(inside).max(initial=1) <= gap + 1
    assert runs == set(pattern.runs.tuples())
