"""Draft layers in the host tier and on disk: stored and loaded beside the model's rows, or known to lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.handover.outbox_room import OutboxRoom
from rayk.kv.groups import group_layers
from rayk.kv.riders import Riders, add_riders
from rayk.offload.outbox import Outbox
from rayk.offload.pages import identity_of
from tests.offload.cluster import DRAFTS, BareNode, ByteEngine, Kind, open_node, random_values, tokens_of
from tests.offload.disk import finish
from tests.transfer.cluster import POISON, Values

N = 96
KINDS = [
    Kind(drafter="d"),
    Kind(tp=2, layout="LBNHC", drafter="d", block_size=32),
    Kind(tp=4, layout="LHBNC", drafter="d", draft_tp=4),
    Kind(tp=4, layout="BLNHC", drafter="d", draft_tp=2),
]
PLAIN = Kind(tp=2)


def of_model(values: Values) -> Values:
    return Values(values.num_tokens, {k: v for k, v in values.content.items() if k[0] < 900})


def expect_no_drafts(engine: ByteEngine) -> None:
    """No byte of a rider's pages was written."""
    for caches in engine.caches:
        for region in caches.geometry.regions[1:]:
            size = caches.geometry.num_blocks * region.block_bytes
            assert bool((caches.buffer[region.offset : region.offset + size] == POISON).all())


def load(node: BareNode, engine: ByteEngine, tokens: Any, **how: Any) -> tuple[Any, Any]:
    loaded = node.load(engine, tokens, **how)
    assert set(loaded.errors) == {None}
    return loaded, {o.left_out for o in loaded.outcomes.values()}


@pytest.mark.parametrize("stored", KINDS, ids=str)
@pytest.mark.parametrize("family", ["full", "gpt_oss", "deepseek", "qwen3_next"])
def test_drafts_come_back_at_any_tp_and_layout(stored: Kind, family: str):
    kinds = [k for k in KINDS if family == "full" or k.layout != "LHBNC"]
    if stored not in kinds:
        return  # that layout holds groups of one shape only
    node = open_node(family, drafter="d")
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(1, N)
    assert node.store(node.add(stored, "p"), values, tokens).ok
    for number, kind in enumerate(kinds):
        engine = node.add(kind, f"d{number}")
        loaded, left_out = load(node, engine, tokens)
        assert left_out == {()}
        assert loaded.answer.ticket.draft_row == 0
        assert loaded.answer.num_tokens == N
        engine.check(values, loaded.tables)
    # An engine without a drafter loads the same pages.
    plain = node.add(PLAIN, "plain")
    loaded, left_out = load(node, plain, tokens, drafts=False)
    assert left_out == {tuple(f"draft layer {i}: the consumer has none" for i in (0, 1))}
    plain.check_all(of_model(values), loaded.tables)
    node.expect_idle()


def test_what_was_stored_without_drafts_serves_no_drafter_until_it_is_stored_with():
    node = open_node("full", drafter="d")
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(2, N)
    plain, drafting = node.add(PLAIN, "plain"), node.add(KINDS[1], "drafting")
    assert node.store(plain, of_model(values), tokens).ok
    assert node.ask(drafting, tokens, drafts=True).ticket is None
    loaded, _ = load(node, plain, tokens, drafts=False)
    plain.check_all(of_model(values), loaded.tables)
    # Who asks all the same is told from which row on drafts are there: from none.
    loaded, left_out = load(node, drafting, tokens, drafts=False)
    assert (loaded.answer.ticket.draft_row, left_out) == (N, {()})
    drafting.check(of_model(values), loaded.tables)
    assert node.store(plain, of_model(values), tokens, seed=3).num_bytes == 0, "all of it is there"
    again = node.store(drafting, values, tokens)
    assert again.ok
    assert again.num_bytes > 0
    loaded, _ = load(node, drafting, tokens, drafts=True)
    assert loaded.answer.ticket.draft_row == 0
    drafting.check(values, loaded.tables)
    node.expect_idle()


def test_rows_that_the_engine_lacked_lack_in_the_tier():
    """A request of which the first 40 rows of drafts are missing: those behind them do not count."""
    node = open_node("full", drafter="d")
    engine = node.add(KINDS[0], "p")
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(3, N)
    tables = engine.tables(N)
    engine.write(values, tables)
    ticket = node.ticket(engine, tables, N, draft_row=40)
    found = node.begin_store(engine, ticket, tokens)
    node.turn_until(lambda: bool(found), engine)
    assert found[0].ok
    assert node.ask(engine, tokens).ticket is None
    offered = node.ask(engine, tokens, drafts=False)
    assert (offered.num_tokens, offered.ticket.draft_row) == (N, N)
    node.take(engine, offered)


def test_a_tier_without_a_drafter_leaves_drafts_out():
    node = open_node("full")
    engine = node.add(KINDS[2], "p")
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(4, N)
    assert node.store(engine, values, tokens).ok
    loaded, left_out = load(node, engine, tokens)
    assert left_out == {tuple(f"draft layer {i}: the producer has none" for i in (0, 1))}
    engine.check(of_model(values), loaded.tables)
    expect_no_drafts(engine)


def test_another_drafter_is_another():
    node = open_node("full", drafter="other")
    engine = node.add(KINDS[0], "p")
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(5, N)
    assert node.store(engine, values, tokens).ok
    assert node.ask(engine, tokens).ticket is None
    loaded, (left_out,) = load(node, engine, tokens, drafts=False)
    assert "its drafter is other at the producer, d at the consumer" in left_out[0]
    engine.check(of_model(values), loaded.tables)
    expect_no_drafts(engine)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_pages_on_disk_hold_drafts(tmp_path: Path, kind: Kind):
    node = open_node("full", drafter="d", folder=tmp_path, disk_bytes=1 << 24)
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(6, N)
    engine = node.add(kind, "p")
    assert node.store(engine, values, tokens).ok
    disk = node.tier.pages._disk
    finish(disk)
    node.tier.turn()
    node.tier.clear()
    node.tier.caches.buffer[: node.tier.caches.geometry.pages_bytes].fill_(POISON)
    loaded, _ = load(node, engine, tokens)
    assert loaded.answer.num_disk_tokens == N
    assert loaded.answer.ticket.draft_row == 0
    engine.check(values, loaded.tables)


def test_pages_on_disk_that_lack_drafts_serve_no_drafter(tmp_path: Path):
    node = open_node("full", drafter="d", folder=tmp_path, disk_bytes=1 << 24)
    values, tokens = random_values(node.make, N, drafts=True), tokens_of(7, N)
    plain, drafting = node.add(PLAIN, "plain"), node.add(KINDS[0], "drafting")
    assert node.store(plain, of_model(values), tokens).ok
    finish(node.tier.pages._disk)
    node.tier.turn()
    node.tier.clear()
    assert node.ask(drafting, tokens, drafts=True).ticket is None
    loaded, _ = load(node, plain, tokens, drafts=False)
    assert loaded.answer.num_disk_tokens == N
    plain.check_all(of_model(values), loaded.tables)


def test_a_folder_is_of_one_drafter():
    """What pages mean names the draft layers and their drafter: others look into another subfolder."""
    node = open_node("full", drafter="d")
    like = node.add(KINDS[0]).descriptions[0]
    groups = group_layers(node.make(16, 16))
    without = identity_of(groups, like, "float32")
    found = {
        name: identity_of(add_riders(groups, Riders(DRAFTS, drafter=name)), like, "float32") for name in "de"
    }
    assert len({i.folder_name for i in (without, *found.values())}) == 3
    text = found["d"].facts[f"group.{len(groups)}"]
    assert text.startswith("draft layer 0 of drafter d, on group 0")
    one = sum(f.canonical_bytes for spec in DRAFTS.values() for f in spec.fields())
    assert [a - b for a, b in zip(found["d"].page_bytes, without.page_bytes, strict=True)] == [
        one, *[0] * (len(groups) - 1)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outboxes_hold_drafts(kind: Kind):
    """What is copied to an outbox is what the rank's views show, rider by rider."""
    node = open_node("full", drafter="d")
    engine = node.add(kind, "p")
    values = random_values(node.make, N, drafts=True)
    tables = engine.tables(N)
    engine.write(values, tables)
    boxes = [
        Outbox(agent, caches, 1 << 22) for agent, caches in zip(engine.agents, engine.caches, strict=True)
    ]
    groups = engine.groups()
    room = OutboxRoom(groups, boxes[0].caches.geometry.num_blocks)
    needed = room.num_needed(tuple(map(tuple, tables)), range(N))
    own = [g for g in groups if g.rides is None]
    assert needed == sum(-(-N // g.spec.block_size) for g in own)
    taken = room.take(tuple(map(tuple, tables)), range(N))
    assert [taken[g.index] for g in groups if g.rides is not None] == [taken[0]] * 2
    for box in boxes:
        box.caches.buffer.fill_(POISON)
        box.copy(tables, taken)
    there = ByteEngine(replace(kind, layout="BHLNC").shape(node.make), 0, caches=[b.caches for b in boxes])
    there.check(values, [list(t) for t in taken])
    room.give_back(taken)
    assert room.pool.num_free_blocks == room.num_blocks
    for box in boxes:
        written = np.zeros(box.caches.geometry.pages_bytes, dtype=bool)
        written[:] = box.caches.buffer[: len(written)].numpy() != POISON
        first = min(taken[0])
        assert not written[: first * box.caches.geometry.regions[0].block_bytes].any(), "the null block"
    assert isinstance(boxes[0].caches.buffer, torch.Tensor)
