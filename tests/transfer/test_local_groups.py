"""Layers that see the current chunk hand over its blocks alone, and layers that share hand over nothing: the
plan's numbers against counts by position, and what digests say of the rows that live."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import EnginePlan, plan_engine
from rayk.models.fingerprint import fingerprint
from rayk.transfer.handshake import check
from rayk.transfer.plan import consecutive_tables, plan_transfer
from rayk.transfer.segments import CopySegments
from rayk.types.config import EngineConfig
from rayk.types.errors import HandshakeMismatch
from tests.kv.decoders import decoder
from tests.transfer.cluster import Pair, Shape, local_pair
from tests.transfer.families import FAMILIES, Specs, attention, chunked
from tests.transfer.test_guards import describe
from tests.transfer.test_verify import TOKENS, diagnose, run, where
from tests.transfer_faults import flip_bit

CHUNK = 12
LLAMA4 = ("chunked", "chunked", "chunked", "full")
SHARED = (*LLAMA4, "chunked:2", "chunked:2", "full:3")
ROW_BYTES = 2 * 8 * 4
"""K and V of a head and token, float32."""
LENGTHS = (1, 5, 11, 12, 13, 23, 24, 25, 36, 40, 47, 48)
"""Chunks of 12: their last tokens, their borders, and within."""


@cache
def planned(
    kinds: tuple[str, ...], tp: int, block_size: int, kernel: int | None, hybrid_kv: bool
) -> EnginePlan:
    config = EngineConfig(
        model="made", tp=tp, block_size=block_size, kernel_block_size=kernel, hybrid_kv=hybrid_kv
    )
    return plan_engine(config, decoder(*kinds, chunk=CHUNK))


def sent(producer: EnginePlan, consumer: EnginePlan, num_tokens: int) -> dict[str, list[int]]:
    """Kind of group -> [bytes, descriptors] over all consumer ranks."""
    found: dict[str, list[int]] = {g.spec.kind: [0, 0] for g in consumer.groups}
    tables = [consecutive_tables(side.ranks[0], num_tokens) for side in (producer, consumer)]
    for rank in consumer.ranks:
        for reads in plan_transfer(producer.ranks, rank).lower(num_tokens, *tables):
            total = found[consumer.groups[reads.group].spec.kind]
            total[0] += reads.num_bytes
            total[1] += reads.num_descriptors
    return found


def rows_to_send(num_tokens: int, blocks: tuple[int, int], is_local: bool) -> int:
    """Positions that lie in one block with a live one on both sides, looked at one by one."""

    def is_live(position: int) -> bool:
        return position < num_tokens and (not is_local or position // CHUNK == num_tokens // CHUNK)

    def place(position: int) -> tuple[int, int]:
        return position // blocks[0], position // blocks[1]

    wanted = {place(p) for p in range(num_tokens) if is_live(p)}
    return sum(place(p) in wanted for p in range(num_tokens + max(blocks)))


BLOCKS = [(4, 4), (4, 8), (6, 4), (16, 12), (8, 24)]


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_local_layers_send_the_blocks_of_their_chunk_and_sharing_ones_nothing(tp: tuple[int, int]):
    """Three chunked layers and a full one are sent, three more use their pages."""
    num_pages = max(2, tp[1])
    for number, (blocks, num_tokens) in enumerate(itertools.product(BLOCKS, LENGTHS)):
        # Kernel blocks as they come (what divides blocks and chunks), or cut further on either side.
        kernels = ((None, None), (2, None), (None, 1))[number % 3]
        producer, consumer = (planned(SHARED, tp[side], blocks[side], kernels[side], True) for side in (0, 1))
        found = sent(producer, consumer, num_tokens)
        for kind, layers in (("chunked", 3), ("full", 1)):
            rows = rows_to_send(num_tokens, blocks, kind == "chunked")
            assert found[kind][0] == rows * layers * num_pages * ROW_BYTES, (kind, blocks, num_tokens)
            assert (found[kind][1] == 0) == (rows == 0)
        assert (found["chunked"] == [0, 0]) == (num_tokens % CHUNK == 0)


def test_descriptors_by_hand():
    """Blocks of 4, one group: a descriptor per block; of a chunk of 12 positions three at most."""
    counts = {}
    for num_tokens in LENGTHS:
        (own,), (shared,) = (
            {tuple(sent(made, made, num_tokens).items())[0][1][1]}
            for made in (
                planned(("chunked",), 1, 4, None, True),
                planned(("chunked", "chunked:0", "chunked:0"), 1, 4, None, True),
            )
        )
        assert own == shared
        counts[num_tokens] = own
    assert counts == {1: 1, 5: 2, 11: 3, 12: 0, 13: 1, 23: 3, 24: 0, 25: 1, 36: 0, 40: 1, 47: 3, 48: 0}


@pytest.mark.parametrize("hybrid_kv", itertools.product((True, False), repeat=2), ids=str)
def test_only_what_layers_see_is_sent_whatever_their_groups_keep(hybrid_kv: tuple[bool, bool]):
    """Without hybrid_kv chunked layers lie in the full group, whose kernel blocks are cut where chunks begin.

    After 40 tokens they see four, of the third block of 16; the full layer's three blocks are sent whole."""
    producer, consumer = (planned(SHARED, 2, 16, None, value) for value in hybrid_kv)
    assert [len(side.groups) > 1 for side in (producer, consumer)] == list(hybrid_kv)
    if not hybrid_kv[1]:
        assert consumer.ranks[0].groups[0].kernel_block_size == 4
    found = sent(producer, consumer, 40)
    assert sum(num_bytes for num_bytes, _ in found.values()) == (48 + 3 * 16) * 2 * ROW_BYTES


def moved(shape: Shape, num_tokens: int) -> tuple[Pair, dict[int, Any]]:
    pair = local_pair(shape, delay_polls=1)
    values = shape.values(num_tokens)
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None] * shape.tp[1]
    pair.consumer.check_all(values, tables)
    assert pair.released() == [["lease-r"]] * shape.tp[0]
    return pair, outcomes


def only_chunks(block: int, state: int) -> Specs:
    return {(layer, "attention"): chunked(block, 8) for layer in range(2)}


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (2, 4)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_a_sequence_that_ends_with_its_chunk_arrives_with_nothing(
    tp: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """No block, no read, no byte to check; the transfer ends well, and P's lease with it."""
    monkeypatch.setitem(FAMILIES, "only chunks", only_chunks)
    shape = Shape(family="only chunks", tp=tp, block_sizes=(4, 8))
    for num_tokens, rows in ((16, 0), (24, 0), (9, 1), (23, 7)):
        pair, outcomes = moved(shape, num_tokens)
        tables = pair.consumer.tables(num_tokens)
        assert [len(t) - t.count(0) for t in tables] == [-(-rows // 8)] * len(tables)
        for rank, outcome in outcomes.items():
            num_units = (
                sum(len(f.units) for f in pair.consumer.views(rank, pair.consumer.groups()[0], 0)) // 2
            )
            assert outcome.num_bytes_checked == rows * num_units * 2 * (6 + 4) * 2
            assert (sum(r.bytes for r in outcome.rows) > 0) == (rows > 0)


# --- digests: rows of the chunk count, others do not --------------------------------------------------

FLIPPED = Shape(family="one chunk", num_blocks=(40, 50))
"""Layers 0 and 1 in chunks of 9 positions, layer 2 full: of 30 tokens 27 to 29 live in the former."""
CONTENT = (6 + 4) * 2
PAGE = 4 * CONTENT


def one_chunk(block: int, state: int) -> Specs:
    return {
        (0, "attention"): chunked(block, 9),
        (1, "attention"): chunked(block, 9),
        (2, "attention"): attention(block),
        (3, "attention"): attention(block),
    }


def test_a_flipped_bit_counts_where_its_row_is_of_the_chunk(monkeypatch: pytest.MonkeyPatch):
    """BHLNC: block 6 of the sequence holds, for each of 3 heads, both layers' tokens 24 to 27."""
    monkeypatch.setitem(FAMILIES, "one chunk", one_chunk)
    caught = set()
    for byte in range(3, 3 * 2 * PAGE, 17):
        pair, outcomes, tables = run(FLIPPED, fault=flip_bit(descriptor=0, byte=byte, bit=byte % 8))
        (head, rest), error = divmod(byte, 2 * PAGE), outcomes[0].error
        layer, (token, content) = rest // PAGE, divmod(rest % PAGE, CONTENT)
        if 24 + token < 27:
            assert error is None, f"token {24 + token} is of the chunk before"
            continue
        found = diagnose(pair, outcomes[0], 0, tables)
        assert where(found) == (layer, 0, "k" if content < 12 else "v", head, 27)
        in_field = content if content < 12 else content - 12
        assert found.classification == f"one flipped bit in byte {in_field} of token 27"
        caught.add((layer, head))
    assert caught == set(itertools.product(range(2), range(3)))


def first_block_left_out(segments: CopySegments, live: range) -> range:
    return HOLDING(segments, live)[1:] if len(live) < TOKENS else HOLDING(segments, live)


HOLDING = CopySegments.holding


def test_a_chunk_whose_first_block_is_not_sent_is_named(monkeypatch: pytest.MonkeyPatch):
    """A fault planted in the plan, of the local group alone: digests do not use it."""
    monkeypatch.setitem(FAMILIES, "one chunk", one_chunk)
    monkeypatch.setattr(CopySegments, "holding", first_block_left_out)
    pair, outcomes, tables = run(FLIPPED)
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "k", 0, 27)
    assert found.classification == "block 6 of the sequence never written: token 27 holds only 0x5a"
    assert {w.layer for w in outcomes[0].wrong_words} == {0, 1}


def test_rows_of_the_chunk_before_do_not_make_up_for_it(monkeypatch: pytest.MonkeyPatch):
    """A producer whose plan counts chunks from one position later sends a block that was filled, but not with
    this chunk: what is missing is named all the same."""
    monkeypatch.setitem(FAMILIES, "one chunk", one_chunk)

    def shifted(segments: CopySegments, live: range) -> range:
        return HOLDING(segments, live if len(live) == TOKENS else range(live.start + 1, live.stop))

    monkeypatch.setattr(CopySegments, "holding", shifted)
    pair, outcomes, tables = run(FLIPPED)
    assert where(diagnose(pair, outcomes[0], 0, tables)) == (0, 0, "k", 0, 27)


# --- both sides must mean the same ---------------------------------------------------------------------


def differing(
    ours: tuple[DecoderConfig, EngineConfig], theirs: tuple[DecoderConfig, EngineConfig], folder: Path
) -> list[str]:
    """What a handshake of two engines says differs."""
    sides = []
    for config, engine in (ours, theirs):
        geometry = plan_engine(engine, config).ranks[0]
        sides.append(replace(describe(), geometry=geometry, fingerprint=fingerprint(folder, config)))
    with pytest.raises(HandshakeMismatch) as caught:
        check(*sides)
    assert all(a != b for _, a, b in caught.value.fields)
    return [name for name, _, _ in caught.value.fields]


ENGINE = EngineConfig(model="made")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's, as far as its weights go."""
    save_file({"some": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_engines_that_share_otherwise_are_refused_by_name(folder: Path):
    one, other = decoder(*LLAMA4, "chunked:2"), decoder(*LLAMA4, "chunked:1")
    own = decoder(*LLAMA4, "chunked")
    assert differing((one, ENGINE), (other, ENGINE), folder) == ["model.kv_sources"]
    named = differing((one, ENGINE), (own, ENGINE), folder)
    assert named[0] == "model.kv_sources"
    assert "layer 4.attention.cache" in named
    check(*(replace(describe(), fingerprint=fingerprint(folder, one)) for _ in range(2)))


@pytest.mark.parametrize("chunks", [(12, 24), (32, 64), (8192, 4096)], ids=str)
def test_engines_of_other_chunks_are_refused_by_name(chunks: tuple[int, int], folder: Path):
    """By the model's facts, and by the rows that live in its groups: also where a million tokens end a chunk
    of either length."""
    ours, theirs = (decoder("chunked", "full", chunk=chunk) for chunk in chunks)
    assert differing((ours, ENGINE), (theirs, ENGINE), folder) == [
        "model.chunks",
        "layer 0.attention.live_rows(1000000)",
    ]


def test_an_engine_that_keeps_everything_meets_one_that_does_not(folder: Path):
    """Their layers see the same, and of what they do not see nothing is moved. A layer of another window or
    chunk is refused all the same."""
    whole, config = replace(ENGINE, hybrid_kv=False), decoder("chunked", "sliding", "full", chunk=32)
    for engines in ((ENGINE, whole), (whole, ENGINE), (whole, whole)):
        sides = [replace(describe(), geometry=plan_engine(e, config).ranks[0]) for e in engines]
        check(*sides)
        other = (decoder("chunked", "sliding", "full", chunk=48), engines[1])
        named = differing((config, engines[0]), other, folder)
        assert "layer 0.attention.live_rows(1000000)" in named
