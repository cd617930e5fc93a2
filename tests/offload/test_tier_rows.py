"""Which rows a host tier says it has: those behind what an engine holds, and none that were never stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offload.cluster import Kind, open_node, random_values, tokens_of
from tests.offload.families import WINDOW
from tests.offload.test_tier import BY_LAYER, Clock, N, hit, store

ROW_GROUP = 256
"""Rows that are digested together: what an engine holds is told apart at multiples of it."""


@pytest.mark.parametrize("kind", [Kind(num_blocks=60), Kind(tp=2, layout="LBHNC", block_size=32)], ids=str)
def test_what_an_engine_holds_is_not_loaded_again(kind: Kind) -> None:
    node = open_node("full", num_blocks=100)
    engine = node.add(kind)
    values, tokens = random_values(node.make, 2 * ROW_GROUP), tokens_of(0, 2 * ROW_GROUP)
    engine.poison()
    stored = node.store(engine, values, tokens)
    assert node.ask(engine, tokens, num_local_tokens=ROW_GROUP, min_tokens=ROW_GROUP + 1).ticket is None
    ticket = node.ask(engine, tokens, num_local_tokens=ROW_GROUP, min_tokens=ROW_GROUP).ticket
    assert ticket is not None
    assert (ticket.num_tokens, ticket.first_row) == (2 * ROW_GROUP, ROW_GROUP)
    assert ticket.block_tables[0][: ROW_GROUP // 16] == (0,) * (ROW_GROUP // 16)
    tables = engine.tables(2 * ROW_GROUP, 5)
    engine.poison()
    engine.write(random_values(node.make, ROW_GROUP), tables)
    for rank in engine.ranks:
        rank.start(ticket, tables, node.clock() + 10**11, ROW_GROUP)
    outcomes: dict[int, object] = {}
    node.turn_until(lambda: len(outcomes) == engine.tp, engine, outcomes)  # type: ignore[arg-type]
    assert [o.error for o in outcomes.values()] == [None] * engine.tp  # type: ignore[attr-defined]
    engine.check_all(values, tables)
    num_bytes = sum(row.bytes for o in outcomes.values() for row in o.rows)  # type: ignore[attr-defined]
    assert num_bytes == stored.num_bytes // 2
    node.turn_until(lambda: not node.tier.is_busy, engine)
    node.expect_idle()


@pytest.mark.parametrize("has_restarted", [False, True])
def test_rows_that_were_never_stored_are_not_served(has_restarted: bool, tmp_path: Path) -> None:
    """Of a window's first block only the last rows came: a shorter prompt, which needs others, is a miss."""
    node = open_node("gpt_oss", folder=tmp_path)
    engine = node.add(Kind())
    engine.poison()
    assert store(node, engine, 0).ok
    if has_restarted:
        node.tier.close()
        node = open_node("gpt_oss", folder=tmp_path)
        engine = node.add(Kind())
    # After 80 tokens rows 41 to 79 are seen; stored were those from 57 on.
    assert N + 1 - WINDOW == 57
    for num_tokens in (80, 64, 48):
        answer = node.ask(engine, tokens_of(0, num_tokens))
        assert answer.ticket is None, num_tokens
    assert hit(node, engine, 0) == N
    assert store(node, engine, 0, 80).num_bytes > 0, "it was not held"
    assert hit(node, engine, 0, 80) == 80
    assert hit(node, engine, 0) == N
    node.expect_idle()
    node.tier.close()


def test_a_load_that_comes_after_its_lease_is_told_that_the_blocks_were_reused() -> None:
    clock = Clock()
    node = open_node("full", num_blocks=N // 16 + 1, clock=clock, lease_s=5.0)
    engine = node.add(Kind(tp=2))
    assert store(node, engine, 0).ok
    late = node.ask(engine, tokens_of(0, N))
    clock.sleep(6)
    node.turn(engine)
    assert store(node, engine, 1).ok, "in the same blocks"
    errors = node.take(engine, late).errors
    assert all("was reused while being read" in str(error) for error in errors)
    node.expect_idle()


def test_a_load_is_not_disturbed_by_a_longer_store_of_the_same() -> None:
    """They share blocks, which nobody writes."""
    node = open_node("full", num_blocks=100)
    one, two = node.add(Kind(num_blocks=60), "one"), node.add(BY_LAYER, "two")
    assert store(node, one, 0, ROW_GROUP).ok
    offered = node.ask(two, tokens_of(0, ROW_GROUP))
    values = random_values(node.make, ROW_GROUP, 0)
    longer = random_values(node.make, ROW_GROUP + 64, 0)
    answer = node.store(one, longer, tokens_of(0, ROW_GROUP + 64))
    assert answer.ok
    assert answer.num_known_tokens == ROW_GROUP
    loaded = node.take(two, offered)
    assert loaded.errors == [None, None]
    two.check(values, loaded.tables)
    loaded = node.load(one, tokens_of(0, ROW_GROUP + 64))
    one.check(longer, loaded.tables)
    node.expect_idle()


def test_two_engines_that_store_the_same_at_once_leave_one_copy() -> None:
    node = open_node("full", delay_polls=3)
    one, two = node.add(Kind(), "one"), node.add(BY_LAYER, "two")
    values, found = random_values(node.make, N), []
    for engine in (one, two):
        tables = engine.tables(N)
        engine.write(values, tables)
        found.append(node.begin_store(engine, node.ticket(engine, tables, N), tokens_of(0, N)))
    assert node.tier.status()["num_used_blocks"] == 2 * N // 16, "neither is there yet"
    node.turn_until(lambda: all(found), one)
    assert [answer.ok for (answer,) in found] == [True, True]
    assert node.tier.status()["num_cached_blocks"] == N // 16
    loaded = node.load(two, tokens_of(0, N))
    two.check(values, loaded.tables)
    node.expect_idle()


def test_a_kept_sequence_that_is_dropped_on_its_way_in_is_not_kept() -> None:
    node = open_node("full", delay_polls=3)
    engine = node.add(Kind())
    tables = engine.tables(N)
    found = node.begin_store(engine, node.ticket(engine, tables, N), tokens_of(0, N), keep_as="kept")
    node.tier.drop("kept")
    node.turn_until(lambda: bool(found), engine)
    assert found[0].ok
    assert node.tier.status()["num_kept"] == 0
    node.expect_idle()
