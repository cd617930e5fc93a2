"""Planted faults in the plan, in the page map and in transit: caught by digests that do not use the map, then
named by layer, group, head and token, with the right classification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayk.kv import maps
from rayk.transfer import plan as plan_module
from rayk.transfer.faulty_agent import FaultyAgent, reuse_early
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import BlockReads, TransferPlan, UnitReads
from rayk.transfer.staging import StagingSettings
from rayk.types.errors import KVMismatch, TransferError
from tests.transfer.cluster import Pair, Shape, make_engine
from tests.transfer_faults import flip_bit, stall_reads

TOKENS = 30
"""Seven whole blocks of 4 and half of an eighth."""


def run(shape: Shape, *, fault=None, before_read=None) -> tuple[Pair, dict, list[list[int]]]:
    """Transfer one request; `fault` strikes at consumer rank 0, `before_read(pair, tables)` after start."""
    network = LocalNetwork()

    def make_agent(name: str) -> FaultyAgent:
        return FaultyAgent(LocalAgent(name, network, 1))

    # Faults are planted in what runs bring straight into pages.
    direct = StagingSettings("never")
    pair = Pair(*(make_engine(shape, side, make_agent, staging=direct) for side in (0, 1)))
    pair.connect()
    values = shape.values(TOKENS)
    tables = pair.producer.tables(TOKENS)
    pair.producer.write(values, tables)
    ticket = pair.producer.ticket(TOKENS, tables)
    if fault is not None:
        pair.consumer.agents[0].plant(fault)
    pair.start(ticket, pair.consumer.tables(TOKENS))
    if before_read is not None:
        before_read(pair, tables)
    return pair, pair.finish(ticket), tables


def diagnose(pair: Pair, outcome: Any, rank: int, tables: list[list[int]]) -> KVMismatch:
    """The exact first wrong byte, as an engine would find it from the producer's raw rows."""
    assert isinstance(outcome.error, KVMismatch), outcome.error
    first = outcome.error
    assert (first.group, first.layer) == (outcome.wrong_words[0].group, outcome.wrong_words[0].layer)
    fetched = {
        p: r.fetch_rows(first.layer, first.group, tables[first.group], TOKENS)
        for p, r in enumerate(pair.producer.ranks)
    }
    found = pair.consumer.ranks[rank].diagnose("r", first.layer, first.group, fetched)
    assert found is not None
    assert (found.layer, found.group, found.field, found.head) == (
        first.layer,
        first.group,
        first.field,
        first.head,
    )
    assert found.num_bytes_mismatched > 0
    return found


def where(error: KVMismatch) -> tuple[int, int, str, int, int]:
    return error.layer, error.group, error.field, error.head, error.token


# Faults are planted in the plan (what is lowered) and in the run algebra (what the plan is made of).


def head_off_by_one_in_plan(monkeypatch):
    """Every run is read one head further."""
    original = TransferPlan._pattern

    def shifted(self: TransferPlan, read: UnitReads, *rows: int):
        good = original(self, read, *rows)
        step = self.producers[read.producer_rank].groups[read.group].fields[0].unit_stride
        return replace(good, runs=replace(good.runs, source=good.runs.source + step))

    monkeypatch.setattr(TransferPlan, "_pattern", shifted)


def swap_kv_in_plan(monkeypatch):
    """K's runs take V's source and the other way round."""
    original = TransferPlan._pattern

    def swapped(self: TransferPlan, read: UnitReads, *rows: int):
        good = original(self, read, *rows)
        k, v = self.producers[read.producer_rank].groups[read.group].fields
        size = k.field.row_bytes
        assert size == v.field.row_bytes
        # Cut the runs into rows of one field, then exchange the sources of neighbours.
        counts = good.runs.lengths // size
        within = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size
        source = (np.repeat(good.runs.source, counts) + within).reshape(-1, 2)[:, ::-1].reshape(-1)
        destination = np.repeat(good.runs.destination, counts) + within
        runs = maps.Runs(source, destination, np.full(len(source), size, dtype=np.int64))
        strides = (
            np.full(len(source), good.source_strides[0]),
            np.full(len(source), good.destination_strides[0]),
        )
        return replace(good, runs=runs, source_strides=strides[0], destination_strides=strides[1])

    monkeypatch.setattr(TransferPlan, "_pattern", swapped)


def drop_last_block_in_plan(monkeypatch):
    original = TransferPlan.lower

    def shortened(self: TransferPlan, *args, **kwargs) -> list[BlockReads]:
        return [
            replace(r, source_blocks=r.source_blocks[:-1], destination_blocks=r.destination_blocks[:-1])
            for r in original(self, *args, **kwargs)
        ]

    monkeypatch.setattr(TransferPlan, "lower", shortened)


def head_off_by_one_in_map(monkeypatch):
    """The map finds the rows of slot s at slot s + 1, on the source's side."""
    original = maps._rows
    calls = []

    def shifted(group, field, units, rows):
        calls.append(field)
        is_source = len(calls) % 2 == 1
        good = original(group, field, units, rows)
        return good + field.unit_stride if is_source else good

    monkeypatch.setattr(maps, "_rows", shifted)


def swap_kv_in_map(monkeypatch):
    """The map takes the other field's offset, on the source's side."""
    original = maps._rows
    calls = []

    def swapped(group, field, units, rows):
        calls.append(field)
        other = next(f for f in group.fields if f.field.name != field.field.name)
        chosen = replace(field, offset=other.offset) if len(calls) % 2 == 1 else field
        return original(group, chosen, units, rows)

    monkeypatch.setattr(maps, "_rows", swapped)


def token_off_by_one_in_map(monkeypatch):
    original = maps._rows
    calls = []

    def shifted(group, field, units, rows):
        calls.append(field)
        good = original(group, field, units, rows)
        return good + field.row_stride if len(calls) % 2 == 1 else good

    monkeypatch.setattr(maps, "_rows", shifted)


def drop_last_rows_in_map(monkeypatch):
    """The map forgets the last two rows of every block."""
    original = maps.match_rows

    def shortened(*args, num_rows, **kwargs):
        return original(*args, num_rows=num_rows - 2, **kwargs)

    monkeypatch.setattr(plan_module, "match_rows", shortened)


# P holds heads 0..3, D rank 0 reads 0 and 1: a source one head further is still P's memory.
HEADS = Shape(units=4, tp=(1, 2), layouts=("LBHNC", "BLNHC"), num_layers=2)


@pytest.mark.parametrize("plant", [head_off_by_one_in_plan, head_off_by_one_in_map], ids=["plan", "map"])
def test_head_offset_off_by_one(monkeypatch, plant):
    plant(monkeypatch)
    pair, outcomes, tables = run(HEADS)
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "k", 0, 0)
    assert found.classification == "head 0 holds head 1 of the producer"
    words = {(w.layer, w.field_index, w.unit) for w in outcomes[0].wrong_words}
    assert words == {(layer, field, unit) for layer in (0, 1) for field in (0, 1) for unit in (0, 1)}


@pytest.mark.parametrize("plant", [swap_kv_in_plan, swap_kv_in_map], ids=["plan", "map"])
def test_k_and_v_swapped(monkeypatch, plant):
    plant(monkeypatch)
    pair, outcomes, tables = run(replace(HEADS, tp=(2, 1), layouts=("BHLNC", "BHLNC")))
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "k", 0, 0)
    assert found.classification == "K and V swapped"


def test_last_block_dropped_from_the_plan(monkeypatch):
    drop_last_block_in_plan(monkeypatch)
    pair, outcomes, tables = run(HEADS)
    for rank, first_head in ((0, 0), (1, 2)):
        found = diagnose(pair, outcomes[rank], rank, tables)
        assert where(found) == (0, 0, "k", first_head, 28)
        assert found.classification == ("tail not written: tokens 28 to 29 hold only 0x5a")


def test_last_block_dropped_over_stale_content(monkeypatch):
    """In a used cache the missing block holds another request's KV, not poison."""
    shape = HEADS
    network = LocalNetwork()
    pair = Pair(*(make_engine(shape, side, lambda n: LocalAgent(n, network)) for side in (0, 1)))
    pair.connect()
    outcomes, _ = pair.transfer(shape.values(TOKENS, seed=1), "old")
    assert outcomes[0].ok
    pair.consumer.ranks[0].disconnect("p")
    pair.consumer.ranks[1].disconnect("p")
    drop_last_block_in_plan(monkeypatch)
    pair.connect()
    outcomes, _ = pair.transfer(shape.values(TOKENS, seed=2), "r")
    found = diagnose(pair, outcomes[0], 0, pair.producer.tables(TOKENS))
    assert where(found) == (0, 0, "k", 0, 28)
    assert found.classification == (
        "block 7 of the sequence missing: tokens 28 to 29 hold stale or foreign content"
    )


def test_rows_dropped_from_the_map(monkeypatch):
    drop_last_rows_in_map(monkeypatch)
    pair, outcomes, tables = run(HEADS)
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "k", 0, 2)
    assert found.classification == "never written: tokens 2 to 27 hold only 0x5a"


def test_tokens_off_by_one(monkeypatch):
    token_off_by_one_in_map(monkeypatch)
    pair, outcomes, tables = run(replace(HEADS, block_sizes=(32, 32), num_blocks=(4, 4), tp=(1, 1)))
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "k", 0, 0)
    assert found.classification == "rows shifted: token t holds token t+1"


@pytest.mark.parametrize(
    ("layouts", "fault", "expected"),
    [
        # P TP 2 -> D TP 1; BHLNC on both sides: one run per (block, head), layers inside it.
        (("BHLNC", "BHLNC"), flip_bit(), (0, 0, "k", 0, 0)),
        (("BHLNC", "BHLNC"), flip_bit(descriptor=3, byte=2 * 128 + 32 + 16 + 5, bit=6), (2, 0, "v", 0, 13)),
        (("BHLNC", "BHLNC"), flip_bit(read=1, descriptor=7, byte=128 + 32 + 15, bit=7), (1, 0, "k", 1, 29)),
        # One run per (layer, token), run-major: descriptor = run * 8 blocks + block.
        (("LBNHC", "BLNHC"), flip_bit(read=1, descriptor=(1 * 4 + 2) * 8 + 5, byte=17), (1, 0, "v", 1, 22)),
    ],
    ids=["first", "layer2-v", "last-token", "LBNHC-BLNHC"],
)  # fmt: skip
def test_one_flipped_bit_is_named(layouts, fault, expected):
    pair, outcomes, tables = run(Shape(tp=(2, 1), layouts=layouts), fault=fault)
    assert len(outcomes[0].wrong_words) == 1
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == expected
    assert found.num_bytes_mismatched == 1
    assert found.classification.startswith("one flipped bit in byte ")
    assert found.classification.endswith(f"of token {expected[-1]}")


def test_every_single_bit_of_a_page_counts():
    """Each byte of one block's descriptor, some bit of it: always caught, unless the row is not live."""
    shape = Shape(num_layers=1, units=1, query_heads=1, dtype="bfloat16")
    for byte in range(4 * 8 * 2):
        pair, outcomes, _ = run(shape, fault=flip_bit(descriptor=7, byte=byte, bit=byte % 8))
        is_live = 28 + byte // 16 < TOKENS
        assert isinstance(outcomes[0].error, KVMismatch) == is_live, byte


def test_a_block_reused_early_is_refused_by_name():
    def strike(pair: Pair, tables: list[list[int]]) -> None:
        reuse_early(pair.producer.caches[0], [tables[0][2]])

    _, outcomes, tables = run(Shape(tp=(1, 2)), before_read=strike)
    for outcome in outcomes.values():
        assert isinstance(outcome.error, TransferError)
        assert f"block {tables[0][2]} was reused while being read" in str(outcome.error)


def test_content_replaced_without_a_new_generation_is_caught_by_digests():
    """A producer that forgets to bump: the digests still see it."""

    def strike(pair: Pair, tables: list[list[int]]) -> None:
        caches = pair.producer.caches[0]
        reuse_early(caches, [tables[0][2]])
        caches.generations[tables[0][2]] -= 1

    pair, outcomes, _ = run(Shape(layouts=("BHLNC", "LBHNC")), before_read=strike)
    assert isinstance(outcomes[0].error, KVMismatch)
    assert {w.layer for w in outcomes[0].wrong_words} == {0, 1, 2}


def test_stalled_reads_drain_before_the_blocks_are_safe():
    shape = Shape()
    network = LocalNetwork()
    engines = [make_engine(shape, side, lambda n: FaultyAgent(LocalAgent(n, network))) for side in (0, 1)]
    pair = Pair(*engines)
    pair.connect()
    tables = [[1, 2, 3]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    pair.consumer.agents[0].plant(stall_reads())
    pair.start(ticket, tables, deadline_s=0.05)
    (outcome,) = pair.finish(ticket).values()
    assert "deadline" in str(outcome.error)
    assert outcome.is_draining
    pair.poll()
    consumer = pair.consumer.ranks[0]
    assert consumer.drained() == []
    pair.consumer.agents[0].heal()
    pair.poll()
    assert consumer.drained() == ["lease-r"]
    assert consumer.drained() == []


def test_equal_layers_have_no_difference():
    pair, outcomes, tables = run(Shape(tp=(2, 2)))
    assert all(o.ok for o in outcomes.values())


def test_replicas_are_judged_by_the_rank_that_was_read():
    """Producer ranks that share a head may differ in the last bit; only the elected one's digest counts."""
    shape = Shape(units=1, tp=(2, 1))
    network = LocalNetwork()
    pair = Pair(*(make_engine(shape, side, lambda n: LocalAgent(n, network)) for side in (0, 1)))
    pair.connect()
    values, tables = shape.values(TOKENS), pair.producer.tables(TOKENS)
    pair.producer.write(values, tables)
    unread = ({0, 1} - set(pair.consumer.ranks[0].plan("p").producer_ranks)).pop()
    pair.producer.caches[unread].view(1)[tables[0][0], 0, 1, 2] += 0.5
    ticket = pair.producer.ticket(TOKENS, tables)
    assert not np.array_equal(ticket.digests[0], ticket.digests[1])
    consumer_tables = pair.consumer.tables(TOKENS)
    pair.start(ticket, consumer_tables)
    assert pair.finish(ticket)[0].ok
    pair.consumer.check(values, consumer_tables)
