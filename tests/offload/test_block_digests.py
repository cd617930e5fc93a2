"""Digests that a host tier keeps by block are those of what was stored, and tell who changed it since."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rayk.offload import block_digests
from rayk.offload.block_digests import BlockDigests
from rayk.transfer.connectors import layer_views
from rayk.transfer.layer_view import LayerView
from rayk.transfer.verify import CanonicalViews, compute_digests, sorted_views
from rayk.types.errors import KVMismatch
from tests.each import each
from tests.markers import one_per
from tests.offload.cluster import Kind, open_node, random_values, tokens_of
from tests.offload.families import FAMILIES
from tests.offload.test_pages import finish_writes
from tests.offload.test_tier import BY_LAYER, N, hit, store

PER_GROUP = 256
MOST_TOKENS = 700
Tables = list[list[int]]


def open_views(family: str, block_size: int = 16) -> tuple[CanonicalViews, int]:
    """Of a tier whose pages hold random bytes, and how many blocks it has."""
    node = open_node(family, num_blocks=400, block_size=block_size)
    node.add(Kind())
    caches = node.tier.caches
    torch.manual_seed(1)
    caches.buffer.copy_(torch.randint(-128, 128, caches.buffer.shape, dtype=torch.int8))
    return sorted_views(list(layer_views(caches))), caches.geometry.num_blocks


def draw_tables(views: CanonicalViews, num_blocks: int, rng: random.Random) -> Tables:
    """Of a sequence of the most tokens; no block twice."""
    sizes = {v.group.index: v.group.spec.block_size for v in views}
    ids = rng.sample(range(1, num_blocks), sum(-(-MOST_TOKENS // size) for size in sizes.values()))
    return [[ids.pop() for _ in range(-(-MOST_TOKENS // sizes[g]))] for g in range(len(sizes))]


def flip(views: CanonicalViews, tables: Sequence[Sequence[int]], row: int, rng: random.Random) -> int:
    """Change a byte of a live row; the block it lies in."""
    view = rng.choice([v for v in views if row in v.live_rows(row + 1)])
    ids, slots, positions = view.places(tables[view.group.index], row + 1)
    at = int((positions == row).nonzero()[0, 0])
    field = rng.choice(view.fields)
    content = field.view[int(ids[at]), rng.randrange(len(field.units)), int(slots[at])].view(torch.uint8)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return tables[view.group.index][row // view.group.spec.block_size]


@each("block_size", [16, 48])
@each("family", sorted(FAMILIES))
def test_they_are_those_of_the_rows_however_much_is_known(family: str, block_size: int) -> None:
    views, num_blocks = open_views(family, block_size)
    kept, rng = BlockDigests(views, num_blocks, PER_GROUP), random.Random(family)
    sequences = [draw_tables(views, num_blocks, rng)]
    for _ in range(60):
        tables, num_tokens = rng.choice(sequences), rng.randint(1, MOST_TOKENS)
        first_row = rng.choice([r for r in (0, 256, 512) if r < num_tokens])
        match rng.randrange(6):
            case 0:
                found = kept.prove(tables, num_tokens, first_row)
            case 1:
                changed = flip(views, tables, num_tokens - 1, rng)
                kept.forget([changed])
                continue
            case 2:
                # Blocks that another sequence goes on from in its own way.
                sequences.append([[*t[: len(t) // 2], *t[len(t) // 2 :]] for t in tables])
                continue
            case _:
                found = kept.recall(tables, num_tokens, first_row)
        expected = compute_digests(views, tables, num_tokens, PER_GROUP, first_row)
        assert np.array_equal(found, expected), (num_tokens, first_row)


@pytest.mark.parametrize("family", ["full", "gpt_oss", "llama4", "jamba", "qwen3_next", "fp8_token_head"])
def test_they_stay_what_they_were_and_name_the_blocks_that_did_not(family: str) -> None:
    views, num_blocks = open_views(family)
    rng = random.Random(family)
    for _ in range(12):
        kept, tables = BlockDigests(views, num_blocks, PER_GROUP), draw_tables(views, num_blocks, rng)
        num_tokens = rng.randint(300, MOST_TOKENS)
        proven = kept.prove(tables, num_tokens)
        assert kept.find_changed(tables, num_tokens) == []
        changed = {flip(views, tables, num_tokens - 1, rng) for _ in range(3)}
        assert not np.array_equal(compute_digests(views, tables, num_tokens, PER_GROUP), proven)
        assert set(kept.find_changed(tables, num_tokens)) == changed
        assert np.array_equal(kept.recall(tables, num_tokens), proven)


@one_per()
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("family", ["full", "gpt_oss", "gemma3", "llama4", "fp8_token_head"])
def test_a_change_is_lent_to_nobody_whatever_prefix_is_asked_for(family: str, block_size: int) -> None:
    """Stores of many lengths, a change, then prefixes of others: windows begin and end within blocks."""
    views, num_blocks = open_views(family, block_size)
    rng, num_met = random.Random(family), 0
    for _ in range(8):
        kept, tables = BlockDigests(views, num_blocks, PER_GROUP), draw_tables(views, num_blocks, rng)
        stored = sorted(rng.sample(range(20, MOST_TOKENS), 12))
        for num_tokens in stored:
            kept.prove(tables, num_tokens)
        asked = [n for n in range(20, stored[-1]) if all(_is_stored(v, n, stored) for v in views)]
        asked = sorted(rng.sample(asked, min(len(asked), 40)))
        before = {n: compute_digests(views, tables, n, PER_GROUP) for n in asked}
        block = flip(views, tables, rng.choice(asked[len(asked) // 2 :]) - 1, rng)
        for num_tokens in rng.sample(asked, len(asked)):
            now = compute_digests(views, tables, num_tokens, PER_GROUP)
            if np.array_equal(now, before[num_tokens]):
                continue
            num_met += 1
            recalled = kept.recall(tables, num_tokens)
            wrong = now != before[num_tokens]
            # Of a cell that is cut, what lies beside its rows may have changed, too.
            assert (recalled != now)[wrong].all()
            assert (recalled == now)[~wrong].all()
            assert kept.find_changed(tables, num_tokens) == [block]
    assert num_met > 20


@one_per()
@pytest.mark.parametrize("family", ["full", "gpt_oss", "llama4", "jamba", "qwen3_next", "fp8_token_head"])
def test_blocks_that_changed_are_named_also_where_their_rows_are_dead(family: str) -> None:
    views, num_blocks = open_views(family)
    rng = random.Random(family)
    for _ in range(8):
        kept, tables = BlockDigests(views, num_blocks, PER_GROUP), draw_tables(views, num_blocks, rng)
        for num_tokens in range(1, MOST_TOKENS, 8):
            kept.prove(tables, num_tokens)
        assert kept.find_changed_in(tables) == []
        block = flip(views, tables, 200, rng)
        assert kept.find_changed_in(tables) == [block]
        # Nobody asks for that one, or for others.
        assert kept.find_changed_in([[0 if b == block else b for b in table] for table in tables]) == []
        assert kept.find_changed_in([[b if b == block else 0 for b in table] for table in tables]) == [block]


def _is_stored(view: LayerView, num_tokens: int, stored: Sequence[int]) -> bool:
    """Whether all rows that are live at some length were so at ones that were stored."""
    left = view.live_rows(num_tokens).start
    for rows in map(view.live_rows, stored):
        left = max(left, rows.stop) if rows.start <= left else left
    return left >= num_tokens


@pytest.mark.parametrize("family", ["full", "gpt_oss", "qwen3_next"])
def test_what_is_lent_is_not_read_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = open_node(family, num_blocks=100)
    engine = node.add(BY_LAYER)
    engine.poison()
    assert store(node, engine, 0).ok

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("pages are read")

    monkeypatch.setattr(block_digests, "digest_places", fail)
    assert hit(node, engine, 0) == N
    node.expect_idle()


@pytest.mark.parametrize("kind", [Kind(), BY_LAYER], ids=str)
def test_pages_that_change_in_host_memory_are_not_served_and_then_forgotten(kind: Kind) -> None:
    node = open_node("full", num_blocks=100)
    engine = node.add(kind)
    engine.poison()
    assert store(node, engine, 0).ok
    first = node.load(engine, tokens_of(0, N)).answer
    assert first.ticket is not None
    page = node.tier.caches.geometry.block_bytes
    node.tier.caches.buffer[first.ticket.block_tables[0][3] * page + 7] ^= 4
    answer = node.ask(engine, tokens_of(0, N))
    assert answer.ticket is not None
    loaded = node.take(engine, answer)
    assert any(isinstance(error, KVMismatch) for error in loaded.errors)
    node.tier.doubt(answer.ticket)
    assert node.tier.status()["changed_pages"] == 1
    assert hit(node, engine, 0) == 3 * 16
    assert store(node, engine, 0).num_bytes > 0
    assert hit(node, engine, 0) == N
    # What an engine reads wrong does no harm to the tier's pages; nor does one that is late.
    node.tier.doubt(answer.ticket)
    assert node.tier.status()["changed_pages"] == 1
    assert hit(node, engine, 0) == N
    engine.check(random_values(node.make, N, 0), node.load(engine, tokens_of(0, N)).tables)
    node.expect_idle()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "gemma3n"])
def test_a_changed_row_of_a_window_that_begins_within_a_block_is_not_served(family: str) -> None:
    """It was stored for other lengths than the one that is asked for."""
    node = open_node(family, num_blocks=300)
    engine = node.add(Kind(num_blocks=80))
    engine.poison()
    for num_tokens in (64, 96, 128):
        assert store(node, engine, 1, num_tokens).ok
    tokens = tokens_of(1, 112)
    found = node.tier.manager.find_prefix("x", tokens, 112)
    node.tier.manager.free("x")
    num_tokens, tables = found.num_tokens, found.tables
    views = sorted_views(list(layer_views(node.tier.caches)))
    view = next(v for v in views if v.live_rows(num_tokens).start > 0)
    ids, slots, _ = view.places(tables[view.group.index], num_tokens)
    view.fields[0].view[int(ids[0]), 0, int(slots[0])].view(torch.uint8)[0] ^= 4
    for _ in range(2):
        answer = node.ask(engine, tokens)
        assert answer.ticket is not None
        loaded = node.take(engine, answer)
        assert any(isinstance(error, KVMismatch) for error in loaded.errors)
    node.tier.doubt(answer.ticket)
    assert node.tier.status()["changed_pages"] == 1
    assert hit(node, engine, 1, 112) < num_tokens
    node.expect_idle()


def test_pages_from_disk_are_not_taken_for_what_was_in_their_blocks(tmp_path: Path) -> None:
    """Room for one sequence: each that is asked for comes into the blocks of the other."""
    node = open_node("full", num_blocks=N // 16 + 1, folder=tmp_path)
    engine = node.add(Kind())
    engine.poison()
    for sequence in (0, 1):
        assert store(node, engine, sequence).ok
        finish_writes(node, (sequence + 1) * N // 16)
    assert [hit(node, engine, sequence) for sequence in (0, 1, 0, 0)] == [N] * 4
    assert node.tier.status()["disk_hits"] == 3
    node.expect_idle()
    node.tier.close()
