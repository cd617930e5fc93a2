"""The host tier by itself, with engines that have no model: what it keeps, gives, refuses and lets go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rayk.offload.messages import StoreAnswer
from rayk.transfer.agent import TransferAgent
from rayk.transfer.faulty_agent import FaultyAgent, reuse_early
from rayk.types.errors import KVMismatch, UserError
from tests.markers import one_per
from tests.offload.cluster import BareNode, ByteEngine, Kind, open_node, random_values, tokens_of
from tests.offload.families import FAMILIES
from tests.transfer_faults import flip_bit, stall_reads

N = 96
"""Tokens: six blocks of 16."""
BY_LAYER = Kind(tp=2, layout="LBHNC", block_size=32)


class Faults:
    """Every agent of a node, with what is planted in it."""

    def __init__(self) -> None:
        self.agents: dict[str, FaultyAgent] = {}

    def __call__(self, name: str, agent: TransferAgent) -> FaultyAgent:
        self.agents[name] = FaultyAgent(agent)
        return self.agents[name]


class Clock:
    """Stands still but for a microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        self.now += 1_000
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


def store(
    node: BareNode, engine: ByteEngine, sequence: int, num_tokens: int = N, **how: object
) -> StoreAnswer:
    values = random_values(node.make, num_tokens, sequence)
    return node.store(engine, values, tokens_of(sequence, num_tokens), seed=sequence, **how)


def hit(node: BareNode, engine: ByteEngine, sequence: int, num_tokens: int = N) -> int:
    """Tokens that can be had, whose bytes are right; they count as used now."""
    tokens = tokens_of(sequence, num_tokens)
    answer = node.ask(engine, tokens)
    if answer.ticket is None:
        return 0
    loaded = node.take(engine, answer)
    assert loaded.errors == [None] * engine.tp
    engine.check(random_values(node.make, answer.num_tokens, sequence), loaded.tables)
    return answer.num_tokens


# Room.


def test_what_was_used_longest_ago_goes_first() -> None:
    """A tier of three sequences: loading one, or storing it again, makes another the oldest."""
    node = open_node("full", num_blocks=3 * N // 16 + 1)
    engine = node.add(Kind())
    for sequence in (0, 1, 2):
        assert store(node, engine, sequence).ok
    assert hit(node, engine, 0) == N
    assert store(node, engine, 1).num_bytes == 0
    assert store(node, engine, 3).ok  # in place of 2
    manager = node.tier.manager
    found = [manager.find_prefix(f"x{s}", tokens_of(s, N), N).num_tokens for s in range(4)]
    assert found == [N, N, 0, N]
    assert [hit(node, engine, s) for s in (0, 1, 3)] == [N] * 3
    node.expect_idle()


def test_a_sequences_first_blocks_outlast_its_last() -> None:
    """A tier that must give up a part of a sequence gives up its end: the beginning is still a hit."""
    node = open_node("full", num_blocks=N // 16 + 3)
    engine = node.add(Kind())
    assert store(node, engine, 0).ok
    assert store(node, engine, 1, 64).ok
    assert hit(node, engine, 1, 64) == 64
    assert 0 < hit(node, engine, 0) < N
    node.expect_idle()


def test_no_room_where_all_is_read_or_kept() -> None:
    node = open_node("full", num_blocks=2 * N // 16 + 1, clock=Clock())
    engine, other = node.add(Kind()), node.add(BY_LAYER)
    assert store(node, engine, 0, keep_as="kept").ok
    assert store(node, engine, 1).ok
    offered = node.ask(engine, tokens_of(1, N))
    refused = store(node, other, 2)
    assert not refused.ok
    assert refused.reason == "no room: what is not being read, kept or part of it is too little"
    assert (refused.num_tokens, refused.num_bytes) == (0, 0)
    assert node.tier.status()["num_used_blocks"] == 2 * N // 16
    node.take(engine, offered)
    assert store(node, other, 2).ok, "in place of what is no longer read"
    assert node.load(engine, kept_as="kept").errors == [None]
    assert hit(node, engine, 2) == N
    node.expect_idle()


def test_a_tier_without_room_for_two_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="has no room for 2 blocks") as error:
        open_node("full", num_blocks=1).add(Kind())
    assert error.value.where == "offload.host_gib"


# What is kept by name.


def test_kept_sequences_are_dropped_by_name_and_by_the_end_of_their_engine() -> None:
    node = open_node("gpt_oss")
    one, two = node.add(Kind(), "one"), node.add(BY_LAYER, "two")
    for engine, sequence in ((one, 0), (one, 1), (two, 2)):
        assert store(node, engine, sequence, 50 + sequence, keep_as=f"kept{sequence}").ok
    assert node.tier.status()["num_kept"] == 3
    node.tier.drop("kept0")
    node.tier.drop("kept0")
    assert node.ask(one, kept_as="kept0").reason == "nothing is kept as kept0"
    node.tier.detach("one")
    assert node.tier.status()["num_kept"] == 1
    assert node.ask(two, kept_as="kept1").ticket is None
    loaded = node.load(two, kept_as="kept2")
    two.check(random_values(node.make, 52, 2), loaded.tables)
    node.expect_idle()


def test_clearing_forgets_what_is_found_and_not_what_is_kept_or_read() -> None:
    node = open_node("full")
    engine = node.add(Kind())
    assert store(node, engine, 0).ok
    assert store(node, engine, 1, 70, keep_as="kept").ok
    offered = node.ask(engine, tokens_of(0, N))
    node.tier.clear()
    assert node.ask(engine, tokens_of(0, N)).ticket is None
    assert node.tier.status()["num_cached_blocks"] == 0
    loaded = node.take(engine, offered)
    assert loaded.errors == [None], "it was offered before"
    engine.check(random_values(node.make, N, 0), loaded.tables)
    loaded = node.load(engine, kept_as="kept")
    engine.check(random_values(node.make, 70, 1), loaded.tables)
    node.expect_idle()


# Refusals.


def test_a_ticket_that_was_changed_on_the_way_is_refused_and_stores_nothing() -> None:
    node = open_node("full")
    engine = node.add(Kind())
    tables = engine.tables(N)
    engine.write(random_values(node.make, N, 0), tables)
    ticket = node.ticket(engine, tables, N)
    changed = replace(ticket, block_tables=(ticket.block_tables[0][::-1],))
    found = node.begin_store(engine, changed, tokens_of(0, N))
    assert [a.reason for a in found] == ["its ticket was changed on the way"]
    assert node.tier.status()["num_used_blocks"] == 0
    assert hit(node, engine, 0) == 0
    found = node.begin_store(engine, ticket, tokens_of(0, N))
    node.turn_until(lambda: bool(found), engine)
    assert found[0].ok
    node.expect_idle()


def test_a_ticket_of_another_life_or_of_a_stranger_is_refused() -> None:
    node = open_node("full")
    engine = node.add(Kind(), "one", epoch=3)
    tables = engine.tables(N)
    for change in ({"epoch": 2}, {"engine": "two"}):
        ticket = replace(node.ticket(engine, tables, N), seal="", **change)
        found = node.begin_store(engine, ticket, tokens_of(0, N))
        assert found[0].reason.endswith("is not connected")
    assert node.tier.status()["store_failures"] == 2
    node.expect_idle()


def test_a_store_whose_beginning_is_gone_is_refused() -> None:
    """An engine that leaves out what it knows to be here, which was forgotten meanwhile."""
    node = open_node("full", num_blocks=100)
    engine = node.add(Kind(num_blocks=60))
    first, whole = 256, 512
    values = random_values(node.make, whole, 0)
    tables = engine.tables(whole)
    engine.write(values, tables)
    begun = node.begin_store(engine, node.ticket(engine, [tables[0][:16]], first), tokens_of(0, first))
    node.turn_until(lambda: bool(begun), engine)
    assert begun[0].ok
    for forget in (False, True):
        if forget:
            node.tier.clear()
        ticket = node.ticket(engine, tables, whole, first_row=first)
        found = node.begin_store(engine, ticket, tokens_of(0, whole))
        node.turn_until(lambda: bool(found), engine)  # noqa: B023 - called here
        assert found[0].ok is not forget
        node.expect_released(engine, ticket.lease_id)
    assert found[0].reason == "the first 256 tokens are not here any more"
    assert node.ask(engine, tokens_of(0, whole)).ticket is None
    node.expect_idle()


# Faults.


def test_a_flipped_bit_on_the_way_in_is_seen_and_nothing_is_kept() -> None:
    faults = Faults()
    node = open_node("full", wrap=faults)
    engine = node.add(Kind(tp=2))
    for read in range(2):
        faults.agents["tier"].plant(flip_bit(read=read, bit=3))
        answer = store(node, engine, 0)
        assert "differ" in answer.reason or "digest" in answer.reason, answer.reason
        assert hit(node, engine, 0) == 0
        assert node.tier.status()["mismatches"] == read + 1
        node.expect_idle()
        faults.agents["tier"].heal()
    assert store(node, engine, 0).ok
    assert hit(node, engine, 0) == N


def test_a_flipped_bit_on_the_way_out_is_seen_by_that_rank_and_the_page_is_still_good() -> None:
    faults = Faults()
    node = open_node("full", wrap=faults)
    engine = node.add(Kind(tp=2), "one")
    assert store(node, engine, 0).ok
    faults.agents["one/0.1"].plant(flip_bit(byte=5))
    loaded = node.load(engine, tokens_of(0, N))
    assert [type(error) for error in loaded.errors] == [type(None), KVMismatch]
    assert hit(node, engine, 0) == N
    node.expect_idle()


def test_a_store_that_never_comes_holds_its_blocks_until_nothing_writes_there() -> None:
    faults, clock = Faults(), Clock()
    node = open_node("full", wrap=faults, clock=clock)
    engine = node.add(Kind())
    faults.agents["tier"].plant(stall_reads())
    tables = engine.tables(N)
    found = node.begin_store(engine, node.ticket(engine, tables, N), tokens_of(0, N), deadline_s=5.0)
    for _ in range(5):
        node.turn(engine)
    assert not found
    clock.sleep(6)
    node.turn_until(lambda: bool(found), engine)
    assert "deadline passed" in found[0].reason
    assert node.tier.is_busy, "a read in flight may still write"
    assert node.tier.status()["num_used_blocks"] == N // 16
    faults.agents["tier"].heal()
    node.turn_until(lambda: not node.tier.is_busy, engine)
    node.expect_idle()


def test_blocks_that_an_engine_reuses_while_they_are_read_are_not_kept() -> None:
    node = open_node("full", delay_polls=3)
    engine = node.add(Kind())
    tables = engine.tables(N)
    engine.write(random_values(node.make, N, 0), tables)
    found = node.begin_store(engine, node.ticket(engine, tables, N), tokens_of(0, N))
    node.turn(engine)
    reuse_early(engine.caches[0], tables[0][2:4])
    node.turn_until(lambda: bool(found), engine)
    assert "was reused while being read" in found[0].reason
    assert hit(node, engine, 0) == 0
    node.expect_idle()


def test_an_engine_that_ends_while_it_is_read_from_costs_that_store_only() -> None:
    node = open_node("full", delay_polls=3)
    one, two = node.add(Kind(tp=2), "one"), node.add(Kind(), "two")
    found = []
    for engine, sequence in ((one, 0), (two, 1)):
        tables = engine.tables(N, sequence)
        engine.write(random_values(node.make, N, sequence), tables)
        ticket = node.ticket(engine, tables, N)
        found.append(node.begin_store(engine, ticket, tokens_of(sequence, N)))
    node.turn(one)
    node.tier.detach("one")
    node.turn_until(lambda: all(found), two)
    assert [a.ok for (a,) in found] == [False, True]
    assert "one is gone" in found[0][0].reason
    assert hit(node, two, 0) == 0
    assert hit(node, two, 1) == N
    node.turn_until(lambda: not node.tier.is_busy, two)
    node.expect_idle()
    node.attach(one)
    assert store(node, one, 0).ok
    assert hit(node, two, 0) == N


def test_what_is_offered_and_never_read_comes_free_when_its_lease_ends() -> None:
    clock = Clock()
    node = open_node("full", clock=clock, lease_s=20.0)
    engine = node.add(Kind())
    assert store(node, engine, 0).ok
    answer = node.ask(engine, tokens_of(0, N))
    assert answer.ticket is not None
    clock.sleep(19)
    node.turn(engine)
    assert node.tier.status()["num_lent"] == 1
    clock.sleep(2)
    node.turn(engine)
    assert node.tier.status()["num_lent"] == 0
    assert node.tier.status()["expired_loads"] == 1
    node.expect_idle()
    assert hit(node, engine, 0) == N


# Replicas.


@pytest.mark.parametrize(("family", "num_replicas"), [("deepseek", 4), ("gpt_oss", 2), ("full", 1)])
def test_replicas_are_read_in_turns(family: str, num_replicas: int) -> None:
    """Each rank of TP 4 as often, though a prompt is looked up before each store."""
    node = open_node(family, num_blocks=200)
    engine = node.add(Kind(tp=4))
    shares: Counter[int] = Counter()
    for sequence in range(8):
        assert node.ask(engine, tokens_of(100 + sequence, N)).ticket is None
        answer = store(node, engine, sequence)
        shares.update({row.producer_rank: row.bytes for row in answer.transfers})
        ranks = {row.producer_rank for row in answer.transfers}
        assert len(ranks) == 4 // num_replicas or family == "full"
    assert set(shares) == set(range(4))
    if num_replicas > 1:
        assert len(set(shares.values())) == 1, shares


# Disk.


@one_per()
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_on_disk_are_found_by_a_tier_of_another_layout_after_a_restart(
    family: str, tmp_path: Path
) -> None:
    """Stored at one engine, read back at others, by a tier whose memory lies otherwise."""
    kinds = Kind(tp=2, layout="LBHNC"), Kind(tp=4, block_size=32), Kind(layout="BLHNC", state_block_size=64)
    for number, layout in enumerate(("BHLNC", "LBNHC", "BHLNC")):
        node = open_node(family, layout=layout, folder=tmp_path)
        engines = [node.add(kind) for kind in kinds]
        num_tokens = node.whole(N)
        values = random_values(node.make, num_tokens)
        if number == 0:
            answer = node.store(engines[0], values, tokens_of(0, num_tokens))
            assert answer.ok
            node.tier.close()
            continue
        for first, engine in enumerate(engines):
            loaded = node.load(engine, tokens_of(0, num_tokens), seed=first)
            assert loaded.errors == [None] * engine.tp
            assert loaded.answer.num_disk_tokens == (0 if first else num_tokens)
            assert (loaded.answer.disk_bytes > 0) is (first == 0)
            engine.check(values, loaded.tables)
        node.check_tier(values, loaded.answer)
        node.expect_idle()
        node.tier.close()


def test_an_ask_with_too_many_tokens_or_too_few_is_refused_and_ends_nothing() -> None:
    """Whatever is wrong with one engine, the tier is there for the others."""
    node = open_node("full")
    engine = node.add(Kind())
    values = random_values(node.make, 100)
    tables = engine.tables(100)
    engine.write(values, tables)
    for num_given in (99, 101, 0):
        ticket = node.ticket(engine, tables, 100)
        found = node.begin_store(engine, ticket, tokens_of(0, num_given))
        node.turn_until(lambda found=found: bool(found), engine)
        assert f"{num_given} tokens" in found[0].reason
        node.expect_released(engine, ticket.lease_id)
    assert node.ask(engine, tokens_of(0, 100)).ticket is None
    assert node.store(engine, values, tokens_of(0, 100)).ok
    assert node.ask(engine, tokens_of(0, 100)).num_tokens == node.unit_tokens * (100 // node.unit_tokens)
