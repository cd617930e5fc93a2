"""Specs against their definitions: fields, live rows, and the most blocks a window can touch."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rayk.kv.fields import FIELD_IDS, ITEMSIZE, PageField
from rayk.kv.specs import (
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba1Spec,
    Mamba2Spec,
    max_live_blocks,
    num_kept_blocks,
    page_bytes,
    rows_per_block,
    with_block_size,
)
from rayk.types.errors import Unsupported
from tests.each import each
from tests.house import ROOT, python_files
from tests.kv.brute import (
    ITEMSIZES,
    brute_bundles,
    brute_page_bytes,
    brute_rows,
    chunked,
    full,
    gdn,
    ident,
    mamba1,
    mamba2,
    mla,
    sliding,
)

SPECS = [
    full(),
    full(kv_heads=4, dtype="bfloat16"),
    sliding(9),
    chunked(9),
    mla(),
    mamba1(),
    mamba1(channels=96, state=5),
    *(mamba2(groups, 24) for groups in (1, 2, 8)),
    gdn(),
    gdn(value_heads=24),
    full(dtype="fp8_e4m3"),
    full(dtype="fp8_e4m3_token_head", head_k=5, head_v=3),
    *(mla(dtype=dtype) for dtype in ("fp8_e4m3", "fp8_e4m3_token_head")),
    mla(latent=48, rope=16, dtype="nvfp4"),
    sliding(9, full(dtype="nvfp4", head_k=48, head_v=16)),
]


@each("spec", SPECS, ids=ident)
def test_fields_are_what_each_family_keeps(spec: KVCacheSpec):
    """Names, sizes and readers against heads, groups and channels counted one by one."""
    pieces = [piece for bundle in brute_bundles(spec) for piece in bundle]
    fields = spec.fields()
    assert [f.name for f in fields] == [p.name for p in pieces]
    for f, p in zip(fields, pieces, strict=True):
        assert (f.units, f.rows, f.row_bytes) == (p.num_units, brute_rows(spec), p.row_bytes), f.name
        assert ITEMSIZE[f.dtype] == p.itemsize
        for tp_size in (1, 2, 3, 4, 6, 8, 12):
            if f.readers % tp_size == p.num_readers % tp_size == 0:
                for tp_rank in range(tp_size):
                    assert list(f.shard(tp_size, tp_rank)) == p.units(tp_size, tp_rank), (f.name, tp_size)
    bundles = [len(bundle) for bundle in brute_bundles(spec)]
    assert [
        sum(f.bundle == name for f in fields) for name in dict.fromkeys(f.bundle for f in fields)
    ] == bundles
    assert page_bytes(spec) == brute_page_bytes(spec)
    assert rows_per_block(spec) == brute_rows(spec)


def test_every_field_has_a_number_of_its_own():
    names = {f.name for spec in SPECS for f in spec.fields()}
    assert names == set(FIELD_IDS)
    assert sorted(FIELD_IDS.values()) == list(range(len(FIELD_IDS)))


def test_published_sizes_of_states():
    """FAMILIES section 7, in elements: Mamba2 heads * hd * N (float32) plus (I + 2 G N)(width - 1); Mamba1
    inner * N plus inner * (width - 1); GDN Hv * dk * dv plus (2 Hk dk + Hv dv)(width - 1)."""
    heads, size, groups, n, width = 128, 64, 8, 128, 4
    spec: KVCacheSpec = Mamba2Spec(99, "bfloat16", width, heads, size, groups, n)
    assert page_bytes(spec) == 4 * heads * size * n + 2 * (heads * size + 2 * groups * n) * (width - 1)
    spec = Mamba1Spec(99, "bfloat16", width, num_channels=8192, state_size=16)
    assert page_bytes(spec) == 4 * 8192 * 16 + 2 * 8192 * (width - 1)
    spec = GatedDeltaNetSpec(99, "bfloat16", width, 16, 128, 32, 128)
    assert page_bytes(spec) == 4 * 32 * 128 * 128 + 2 * (2 * 16 * 128 + 32 * 128) * (width - 1)


@each("spec", SPECS, ids=ident)
def test_block_sizes_can_be_changed_and_nothing_else(spec: KVCacheSpec):
    changed = with_block_size(spec, 24)
    assert (changed.block_size, type(changed)) == (24, type(spec))
    assert with_block_size(changed, spec.block_size) == spec
    per_block = 24 / spec.block_size if spec.part == "attention" else 1
    assert page_bytes(changed) == page_bytes(spec) * per_block


def test_fields_in_global_units():
    spec = full(block_size=16, kv_heads=4, head_k=8, head_v=6, dtype="bfloat16", query_heads=32)
    assert spec.fields() == (
        PageField("k", units=4, rows=16, row_bytes=16, dtype="bfloat16", readers=32),
        PageField("v", units=4, rows=16, row_bytes=12, dtype="bfloat16", readers=32),
    )
    assert page_bytes(spec) == 4 * 16 * (8 + 6) * 2
    assert [f.unit_bytes for f in spec.fields()] == [256, 192]
    assert [f.canonical_bytes for f in spec.fields()] == [1024, 768]
    assert sliding(9, spec).fields() == spec.fields()
    assert (spec.kind, sliding(9, spec).kind) == ("full", "sliding")


def test_itemsizes_are_torch_ones():
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
    assert ITEMSIZE["float16"] == np.dtype("float16").itemsize
    assert ITEMSIZE == ITEMSIZES


def test_specs_of_unlike_kinds_are_unlike():
    """Layers group by equality: a window is part of what a layer keeps, and so is its class."""
    assert len({full(), full(), sliding(3), sliding(3), sliding(4)}) == 3


@each("kv_heads", [1, 2, 3, 4, 6, 12])
@each("tp_size", [1, 2, 3, 4, 6, 12])
def test_shard_of_a_field(kv_heads: int, tp_size: int):
    spec = full(kv_heads=kv_heads)
    pieces = brute_bundles(spec)[0]
    for tp_rank in range(tp_size):
        for field, piece in zip(spec.fields(), pieces, strict=True):
            assert list(field.shard(tp_size, tp_rank)) == piece.units(tp_size, tp_rank)


def test_shard_refuses_what_the_model_cannot_run():
    for spec, what in (
        (full(query_heads=12), "12 query heads"),
        (mla(), "12 query heads"),
        (mamba1(), "3 runs of 8 channels"),
        (mamba2(), "12 Mamba heads"),
        (gdn(), "6 value heads"),
    ):
        for field in spec.fields():
            with pytest.raises(Unsupported, match=f"TP 8 does not divide the model's {what}"):
                field.shard(8, 0)


@pytest.mark.parametrize("window", [1, 2, 3, 16, 17, 50])
def test_live_rows_are_what_a_later_token_sees(window: int):
    """Attention as DESIGN's kernels define it: a query at q sees keys k with q - window < k <= q."""
    for num_tokens in range(70):
        seen = [
            k for k in range(num_tokens) if any(q - window < k for q in range(num_tokens, num_tokens + 70))
        ]
        assert list(sliding(window).live_rows(num_tokens)) == seen
        assert list(full().live_rows(num_tokens)) == list(range(num_tokens))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 17, 64])
def test_live_rows_of_a_chunk_are_what_a_later_token_sees(chunk: int):
    """A query at q sees the keys up to its own of the chunk that it is in."""
    spec = chunked(chunk)
    for num_tokens in range(3 * chunk + 2):
        later = range(num_tokens, num_tokens + 2 * chunk)
        seen = [k for k in range(num_tokens) if any(k // chunk == q // chunk for q in later)]
        assert list(spec.live_rows(num_tokens)) == seen
        assert (not seen) == (num_tokens % chunk == 0), "nothing lives where a chunk begins"
        assert spec.live_rows(num_tokens).start % spec.live_step == 0


@each("spec", [*SPECS, *(chunked(n) for n in (1, 2, 7, 16, 64))], ids=ident)
def test_the_fullest_moment_of_a_sequence(spec: KVCacheSpec):
    """The last of those with most live rows."""
    for max_tokens in range(140):
        moments = [(len(spec.live_rows(n)), n) for n in range(max_tokens + 1)]
        assert spec.fullest_at(max_tokens) == max(moments)[1]


@each("spec", [*SPECS, sliding(1), *(chunked(n) for n in (1, 2, 7, 16, 64))], ids=ident)
def test_a_row_is_dead_once_no_later_token_reads_it_or_one_before(spec: KVCacheSpec):
    for row in range(1, 70):
        moments = (n for n in range(row, 200) if spec.live_rows(n).start >= row)
        assert spec.dead_at(row) == next(moments, None)


def kept_blocks(spec: KVCacheSpec, num_computed: int, num_tokens: int) -> int:
    """Blocks there for `num_tokens`, but for those that `num_computed` tokens have left wholly behind."""
    kept = -(-num_tokens // spec.block_size)
    first_live = next(iter(spec.live_rows(num_computed)), num_computed)
    while kept and first_live >= spec.block_size:
        kept, first_live = kept - 1, first_live - spec.block_size
    return kept


@each("spec", [*SPECS, *(chunked(n) for n in (1, 2, 7, 16, 64)), sliding(1)], ids=ident)
def test_blocks_are_held_until_nobody_reads_or_writes_them(spec: KVCacheSpec):
    num_kept = [num_kept_blocks(spec, n) for n in range(140)]
    assert num_kept == [kept_blocks(spec, n, n) for n in range(140)]
    assert max(num_kept) <= max_live_blocks(spec, 139)


@each("block_size", [1, 2, 4, 6, 9])
@each("chunk", [1, 2, 3, 4, 6, 7, 12])
@each("num_new", [0, 1, 2, 7, 13])
def test_most_blocks_of_a_chunk_is_the_maximum_over_all_places(block_size: int, chunk: int, num_new: int):
    """Exact: chunks begin at few places of a block, unlike windows; blocks of earlier ones are given back,
    but for the one in which the next row lies (which is all that chunks of one position keep)."""
    spec = chunked(chunk, full(block_size=block_size))
    enough = block_size * chunk + chunk + num_new
    for max_tokens in range(1, enough + 1):
        most = 0
        for start in range(max_tokens + 1):
            most = max(most, kept_blocks(spec, start, min(start + num_new, max_tokens)))
        assert max_live_blocks(spec, max_tokens, num_new) >= most
    assert max_live_blocks(spec, enough, num_new) == most


def test_only_the_last_state_lives():
    for spec in (mamba1(), mamba2(), gdn()):
        assert [list(spec.live_rows(n)) for n in (0, 1, 2, 9)] == [[], [0], [1], [8]]


@pytest.mark.parametrize(("window", "blocks"), [(2048, 129), (512, 33)])
def test_published_window_block_counts(window: int, blocks: int):
    """FIXTURES: blocks exchanged for a sliding window at block size 16, at most."""
    spec = sliding(window, full(block_size=16))
    assert max_live_blocks(spec, 10**6) == blocks
    touched = [len({row // 16 for row in spec.live_rows(n)}) for n in range(3 * window)]
    assert max(touched) == blocks


@each("block_size", [1, 2, 4, 5])
@each("window", [1, 2, 3, 4, 5, 9, 13])
@each("num_new", [0, 1, 2, 7])
def test_most_blocks_is_the_maximum_over_all_places(block_size: int, window: int, num_new: int):
    spec = sliding(window, full(block_size=block_size))
    enough = window + num_new + 3 * block_size
    for max_tokens in range(1, enough):
        most = 0
        for start in range(max_tokens + 1):
            most = max(most, kept_blocks(spec, start, min(start + num_new, max_tokens)))
        assert max_live_blocks(spec, max_tokens, num_new) >= most
        if max_tokens == enough - 1:
            assert max_live_blocks(spec, max_tokens, num_new) == most
        assert max_live_blocks(full(block_size=block_size), max_tokens, num_new) == -(
            -max_tokens // block_size
        )


KIND_QUESTION = re.compile(
    r"""\.part\s*(==|!=|in\b|not in\b)\s*["'({]|\bpart\s*(==|!=)\s*["']|["']part["']\]\s*(==|!=)"""
    r"""|spec\.kind\s*(==|!=|in\b|not in\b)\s*["'({]"""
    r"""|(isinstance|type)\(.*(Full|Sliding|Window|Chunked|Mla|State|Mamba1|Mamba2|DeltaNet)\w*Spec\b"""
    r"""|startswith\(["']conv_"""
)
"""How a kind of spec, or of field, would be asked for."""


@pytest.mark.parametrize(
    "line",
    [
        'if spec.part == "state":',
        'views if part == "state" else view',
        'token = "" if found["part"] == "state" else "t"',
        'if g.spec.kind in ("mamba1", "mamba2"):',
        "assert isinstance(spec, MlaSpec)",
        'if name.startswith("conv_"):',
    ],
)
def test_such_a_question_is_recognised(line: str):
    assert KIND_QUESTION.search(line)


def test_nobody_asks_what_kind_of_spec_it_has():
    """As kv/specs.py promises: what callers have to know is a property."""
    files = python_files(ROOT, "rayk")
    lines = [
        (f, n)
        for f in files
        for n, line in enumerate(f.read_text().splitlines(), 1)
        if KIND_QUESTION.search(line)
    ]
    assert len(files) > 200
    assert lines == []
