"""The caches of released hybrid models, from the numbers in their configs: groups, block sizes and waste.

bfloat16, blocks of 16 tokens, a request of 4096 tokens. Every number can be worked out by hand from the
sizes in MODELS; where a model is transformers' default of its family, that is compared. Where the numbers
come from: tests/models/released_mamba.py and released_experts.py; Falcon-H1-7B's stand in the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rayk.kv.geometry import layout_veto, plan_rank
from rayk.kv.groups import CacheKey, group_layers, measure_waste
from rayk.kv.layout import LAYOUTS
from rayk.kv.manager import KVCacheManager
from rayk.kv.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    SlidingWindowSpec,
    page_bytes,
)
from rayk.parallel.shard import EngineShape
from tests.each import each
from tests.kv.brute import keyed

POSITIONS = 262144


def attention(kv_heads: int, head_size: int, query_heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(16, kv_heads, head_size, head_size, "bfloat16", query_heads)


def mamba2(heads: int, head_size: int, groups: int, state: int) -> Mamba2Spec:
    return Mamba2Spec(POSITIONS, "bfloat16", 4, heads, head_size, groups, state)


@dataclass(frozen=True, kw_only=True)
class Released:
    """A model, and what must come out."""

    attention: KVCacheSpec | None = None
    attention_layers: tuple[int, ...] = ()
    state: KVCacheSpec | None = None
    state_layers: tuple[int, ...] = ()
    positions: int
    """Layers per group."""
    num_groups: tuple[int, int]
    """Of attention, of states."""
    block_size: int = 16
    """To which attention blocks grow."""
    pages: tuple[int, int]
    """Bytes of a page of attention (grown) and of a state."""
    blocks: int
    """That the request holds."""
    waste: int
    """Bytes."""
    percent: float

    @property
    def specs(self) -> dict[CacheKey, KVCacheSpec]:
        kept: dict[int, tuple[KVCacheSpec, ...]] = {}
        for spec, layers in ((self.attention, self.attention_layers), (self.state, self.state_layers)):
            for layer in layers:
                assert spec is not None
                kept[layer] = (*kept.get(layer, ()), spec)
        return keyed(kept)


def others(num_layers: int, attention_layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(num_layers) if i not in attention_layers)


NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
JAMBA, BAMBA, GRANITE = (4, 12, 20, 28), (9, 18, 27), (5, 15, 25, 35)
QWEN = tuple(range(3, 48, 4))
MIB = 1 << 20

MODELS = {
    # 4096 bytes per token: a block of 16 is 65536. A state: 8192 channels x (3 taps x 2 + 16 x 4 bytes).
    # 8 blocks fit, but 9 waste less: 144 tokens, 589824 bytes. 29 of these hold 80 rows too many, and 28
    # states are padded by 16384 bytes each; 8 would leave 49152 bytes in each page of 32 blocks.
    "Jamba-1.5-Mini": Released(
        attention=attention(8, 128, 32),
        attention_layers=JAMBA,
        state=Mamba1Spec(POSITIONS, "bfloat16", 4, 8192, 16),
        state_layers=others(32, JAMBA),
        positions=4,
        num_groups=(1, 7),
        block_size=144,
        pages=(589824, 8192 * 70),
        blocks=29 + 7,
        waste=(29 * 144 - 4096) * 4 * 4096 + 28 * 16384,
        percent=2.08,
    ),
    # A state: 128 heads x 64 x 128 x 4 bytes = 4 MiB, and (8192 + 2 x 128) x 3 taps x 2. 64 blocks of 16
    # tokens fit: 4 MiB. 3 and 29 layers have no common divisor: one position in 33 is padding, which is less
    # than 32 groups of one layer would cost the host and the wire.
    "Bamba-9B": Released(
        attention=attention(8, 128, 32),
        attention_layers=BAMBA,
        state=mamba2(128, 64, 1, 128),
        state_layers=others(32, BAMBA),
        positions=3,
        num_groups=(1, 10),
        block_size=1024,
        pages=(4 * MIB, 4 * MIB + 50688),
        blocks=4 + 10,
        waste=3 * 4 * 50688 + 4 * MIB + 50688,
        percent=2.72,
    ),
    "Granite-4.0-H-Small": Released(
        attention=attention(8, 128, 32),
        attention_layers=GRANITE,
        state=mamba2(128, 64, 1, 128),
        state_layers=others(40, GRANITE),
        positions=4,
        num_groups=(1, 9),
        block_size=1024,
        pages=(4 * MIB, 4 * MIB + 50688),
        blocks=4 + 9,
        waste=4 * 4 * 50688,
        percent=0.37,
    ),
    # As Bamba's but eight groups of B and C: (8192 + 2 x 8 x 128) x 3 taps x 2 bytes.
    "Nemotron-H-8B": Released(
        attention=attention(8, 128, 32),
        attention_layers=tuple(i for i, kind in enumerate(NEMOTRON) if kind == "*"),
        state=mamba2(128, 64, 8, 128),
        state_layers=tuple(i for i, kind in enumerate(NEMOTRON) if kind == "M"),
        positions=4,
        num_groups=(1, 6),
        block_size=1024,
        pages=(4 * MIB, 4 * MIB + 61440),
        blocks=4 + 6,
        waste=4 * 4 * 61440,
        percent=0.58,
    ),
    # 1024 bytes per token; a state of 24 x 128 x 256 x 4 + (3072 + 2 x 256) x 6 bytes: 193 blocks, 3088
    # tokens. Two of them hold 4096 tokens and leave 2 x 3167232 - 4 MiB in each of 44 positions.
    "Falcon-H1-7B": Released(
        attention=attention(2, 128, 12),
        attention_layers=tuple(range(44)),
        state=mamba2(24, 128, 1, 256),
        state_layers=tuple(range(44)),
        positions=44,
        num_groups=(1, 1),
        block_size=3088,
        pages=(3088 * 1024, 3 * MIB + 21504),
        blocks=2 + 1,
        waste=44 * (2 * (3 * MIB + 21504) - 4 * MIB),
        percent=22.52,
    ),
    # 2048 bytes per token; a state of 32 x 128 x 128 x 4 + (2 x 16 + 32) x 128 x 6 bytes: 65 blocks, 1040
    # tokens. Four hold 4096 and leave 4 x 2146304 - 8 MiB in each of 12 positions.
    "Qwen3-Next-80B": Released(
        attention=attention(2, 256, 16),
        attention_layers=QWEN,
        state=GatedDeltaNetSpec(POSITIONS, "bfloat16", 4, 16, 128, 32, 128),
        state_layers=others(48, QWEN),
        positions=12,
        num_groups=(1, 3),
        block_size=1040,
        pages=(1040 * 2048, 2 * MIB + 49152),
        blocks=4 + 3,
        waste=12 * (4 * (2 * MIB + 49152) - 8 * MIB),
        percent=1.31,
    ),
    # (512 + 64) x 2 bytes per token, the same on every rank.
    "DeepSeek-V3": Released(
        attention=MlaSpec(16, 512, 64, "bfloat16", 128),
        attention_layers=tuple(range(61)),
        positions=61,
        num_groups=(1, 0),
        pages=(16 * 1152, 0),
        blocks=256,
        waste=0,
        percent=0,
    ),
    "Mamba-Codestral-7B": Released(
        state=mamba2(128, 64, 8, 128),
        state_layers=tuple(range(64)),
        positions=64,
        num_groups=(0, 1),
        pages=(0, 4 * MIB + 61440),
        blocks=1,
        waste=0,
        percent=0,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_groups_and_waste(name: str):
    model = MODELS[name]
    groups = group_layers(model.specs)
    assert {g.num_positions for g in groups} == {model.positions}
    by_part = {part: [g for g in groups if g.spec.part == part] for part in ("attention", "state")}
    assert (len(by_part["attention"]), len(by_part["state"])) == model.num_groups
    for part, layers in (("attention", model.attention_layers), ("state", model.state_layers)):
        assert sorted(layer for g in by_part[part] for layer in g.layers) == list(layers)
    assert {g.spec.block_size for g in by_part["attention"]} <= {model.block_size}
    assert {g.spec.block_size for g in by_part["state"]} <= {POSITIONS}
    for part, size in zip(by_part, model.pages, strict=True):
        assert {page_bytes(g.spec) for g in by_part[part]} == ({size} if size else set())
    waste = measure_waste(groups)
    assert waste.allocated_bytes == model.blocks * model.positions * max(model.pages)
    assert waste.bytes == model.waste
    assert round(waste.percent, 2) == model.percent


SCOUT = tuple(i for i in range(48) if i % 4 != 3)
"""Layers of Llama 4 Scout and Maverick that attend in chunks of 8192; the others see everything."""


def llama4(hybrid_kv: bool = True) -> dict[CacheKey, KVCacheSpec]:
    """The two differ in their experts only: 40 query heads, 8 KV heads of 128."""
    full, chunk = attention(8, 128, 40), ChunkedLocalSpec(16, 8, 128, 128, "bfloat16", 40, 8192)
    return keyed({i: chunk if i in SCOUT and hybrid_kv else full for i in range(48)})


def test_llama4_keeps_a_chunk_in_three_groups_of_four():
    """4096 bytes per token: 65536 per block of 16. Nothing is padded, and up to a chunk nothing is freed."""
    groups = group_layers(llama4())
    assert [(g.spec.kind, g.num_positions) for g in groups] == [("chunked", 12)] * 3 + [("full", 12)]
    assert sorted(n for g in groups[:3] for n in g.layers) == list(SCOUT)
    assert {g.spec.block_size for g in groups} == {16}
    assert measure_waste(groups).bytes == 0
    # Beyond, of 131072 tokens each chunked layer keeps 8191 rows, and one of its 512 blocks' is free.
    long = measure_waste(groups, 131072)
    assert long.allocated_bytes == (3 * 512 + 8192) * 12 * 65536
    assert long.bytes == 36 * 4096
    (whole,) = group_layers(llama4(hybrid_kv=False))
    assert (whole.spec.kind, whole.layers) == ("full", tuple(range(48)))
    assert measure_waste([whole], 131072).allocated_bytes == 8192 * 48 * 65536
    # A prompt computed in steps of 2048 needs room for a chunk's rows and those of the step.
    managers = [KVCacheManager(made, 10) for made in (groups, [whole])]
    assert [m.max_request_blocks(131072, 2048) for m in managers] == [3 * (512 + 128) + 8192, 8192]


@pytest.mark.parametrize(("num_layers", "num_shared"), [(30, 10), (35, 15)], ids=["E2B", "E4B"])
def test_gemma3n_keeps_the_layers_that_do_not_share(num_layers: int, num_shared: int):
    """Every fifth layer sees everything, the others a window of 512; the last 10 or 15 keep nothing, so that
    either model keeps 20 layers, in five groups of four."""
    window = SlidingWindowSpec(16, 2, 256, 256, "bfloat16", 8, 512)
    kept = range(num_layers - num_shared)
    groups = group_layers(keyed({i: attention(2, 256, 8) if i % 5 == 4 else window for i in kept}))
    assert [(g.spec.kind, len(g.layers)) for g in groups] == [("sliding", 4)] * 4 + [("full", 4)]
    # 2048 bytes per token: of each window 511 rows live, in 32 blocks.
    assert measure_waste(groups).allocated_bytes == (4 * 32 + 256) * 4 * 32768
    assert measure_waste(groups).bytes == 16 * 2048


@each("layout", LAYOUTS)
@each("name", MODELS)
def test_every_layout_holds_them_or_says_why(name: str, layout: str):
    """One buffer, at TP 1, 2 and 4; nothing but LHBNC over unlike pages is refused."""
    model = MODELS[name]
    groups = group_layers(model.specs)
    reason = layout_veto(groups, LAYOUTS[layout])
    assert (reason is not None) == (layout == "LHBNC" and 0 not in model.num_groups)
    if reason is not None:
        assert "holds groups of one shape only" in reason
        return
    for tp_size in (1, 2, 4):
        rank = plan_rank(groups, LAYOUTS[layout], shape=EngineShape(tp_size), rank=tp_size - 1, num_blocks=3)
        largest = max(g.page_bytes for g in rank.groups)
        # Nothing but rounding to 16 bytes comes on top of the largest page.
        assert 0 <= rank.block_bytes - model.positions * largest < 16 * model.positions
        if tp_size == 1:
            assert largest == max(model.pages)


def test_transformers_defaults_are_the_same():
    transformers = pytest.importorskip("transformers")
    jamba = transformers.JambaConfig()
    kinds = jamba.layer_types
    assert tuple(i for i, kind in enumerate(kinds) if kind in ("attention", "full_attention")) == JAMBA
    assert (jamba.num_hidden_layers, jamba.num_attention_heads, jamba.num_key_value_heads) == (32, 32, 8)
    inner = jamba.mamba_expand * jamba.hidden_size
    assert (inner, jamba.mamba_d_state, jamba.mamba_d_conv) == (8192, 16, 4)
    qwen = transformers.Qwen3NextConfig()
    assert tuple(i for i, kind in enumerate(qwen.layer_types) if kind == "full_attention") == QWEN
    assert (qwen.num_attention_heads, qwen.num_key_value_heads, qwen.head_dim) == (16, 2, 256)
    assert (qwen.linear_num_key_heads, qwen.linear_num_value_heads) == (16, 32)
    assert (qwen.linear_key_head_dim, qwen.linear_value_head_dim) == (128, 128)
    deepseek = transformers.DeepseekV3Config()
    assert (deepseek.num_hidden_layers, deepseek.num_attention_heads) == (61, 128)
    assert (deepseek.kv_lora_rank, deepseek.qk_rope_head_dim) == (512, 64)
    codestral = transformers.Mamba2Config()
    assert (codestral.num_hidden_layers, codestral.num_heads, codestral.head_dim) == (64, 128, 64)
    assert (codestral.n_groups, codestral.state_size, codestral.conv_kernel) == (8, 128, 4)
    llama = transformers.Llama4TextConfig()
    assert tuple(i for i, kind in enumerate(llama.layer_types) if kind == "chunked_attention") == SCOUT
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim) == (40, 8, 128)
    assert (llama.num_hidden_layers, llama.attention_chunk_size) == (48, 8192)
    gemma = transformers.Gemma3nTextConfig()
    assert (gemma.num_hidden_layers, gemma.num_kv_shared_layers, gemma.sliding_window) == (35, 15, 512)
    kinds = gemma.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == list(range(4, 35, 5))
    assert (gemma.num_attention_heads, gemma.num_key_value_heads, gemma.head_dim) == (8, 2, 256)
    nemotron = transformers.NemotronHConfig()
    assert (nemotron.mamba_num_heads, nemotron.mamba_head_dim, nemotron.n_groups) == (128, 64, 8)
    assert (nemotron.ssm_state_size, nemotron.num_key_value_heads, nemotron.head_dim) == (128, 8, 128)
