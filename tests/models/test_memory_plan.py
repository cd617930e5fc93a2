"""Large releases through `rayk explain` and the memory plan, from config.json alone, against published
counts, transformers' own models and numbers computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rayk.explain.explanation import explain_pair
from rayk.models.families import parse_config, read_config
from rayk.models.memory_plan import GPU_GB, USED_SHARE, MemoryPlan, SizePlan, parse_gpus, plan_memory
from rayk.models.stored_sizes import num_parameters, rank_bytes
from rayk.types.errors import UnsupportedArchitecture, UserError
from tests.markers import thorough
from tests.models.released_large import LARGE, LLAMA_31_405B
from tests.models.test_families import config_class

WriteConfig = Callable[[dict[str, Any]], Path]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}

PUBLISHED = {
    "DeepSeek-V3": 671e9,
    "gpt-oss-120b": 116.83e9,  # its model card, Table 1
    "Qwen3-235B-A22B-FP8": 235e9,
    "Qwen3-Next-80B-A3B": 80e9,
    "Llama-3.1-405B": 405e9,
    "Nemotron-H-56B": 56e9,
}
"""Parameters; gemma-3n-E4B's 8e9 count encoders of pictures and sound, which are not read."""
KV_AND_STATES = {
    "DeepSeek-V3": (61 * (512 + 64) * 2, 0),
    "gpt-oss-120b": (2 * 36 * 8 * 64 * 2, 0),
    "Qwen3-235B-A22B-FP8": (2 * 94 * 4 * 128 * 2, 0),
    # Three taps of 2 x 16 x 128 key and 32 x 128 value channels, and 32 float32 states of 128 x 128.
    "Qwen3-Next-80B-A3B": (2 * 12 * 2 * 256 * 2, 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
    "Llama-3.1-405B": (516_096, 0),
    # Three taps of 256 x 64 channels of x and 2 x 8 x 256 of B and C; states of 64 x 256.
    "Nemotron-H-56B": (2 * 10 * 8 * 128 * 2, 54 * (3 * (16384 + 4096) * 2 + 256 * 64 * 256 * 4)),
    "gemma-3n-E4B": (2 * 20 * 2 * 256 * 2, 0),
}
"""Bytes of a token's KV, and of a request's states, in bfloat16."""
MOVED: dict[str, Callable[[int], int]] = {
    "DeepSeek-V3": lambda tokens: 4 * tokens * 70_272,  # every rank has all latents
    "gpt-oss-120b": lambda tokens: 2 * 18 * 8 * 64 * 2 * (tokens + 128),  # the window's 127, in whole blocks
    "Qwen3-235B-A22B-FP8": lambda tokens: tokens * 192_512,
    "Llama-3.1-405B": lambda tokens: tokens * 516_096,
}
"""Bytes that `explain` tells of a hand-over of so many tokens, a multiple of 16, to TP 4."""
QUICK = "Llama-3.1-405B"
each_release = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == QUICK else thorough) for n in LARGE]
)


@pytest.fixture
def write(tmp_path: Path) -> WriteConfig:
    def write_config(raw: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return write_config


def whole(plan: MemoryPlan) -> list[SizePlan]:
    """Engines of one stage whose ranks keep every token."""
    return [size for size in plan.sizes if size.pp == size.dcp == 1]


@each_release
def test_parameters_are_those_of_transformers_and_as_published(name: str, write: WriteConfig) -> None:
    config = read_config(write(LARGE[name]))
    raw = {key: value for key, value in LARGE[name].items() if key != "quantization_config"}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_class(raw))
    # The bias of DeepSeek's choices is stored, but no parameter.
    biases = (b for key, b in theirs.named_buffers() if key.endswith("e_score_correction_bias"))
    found = num_parameters(config)
    assert found == sum(p.numel() for p in (*theirs.parameters(), *biases))
    if name in PUBLISHED:
        assert found == pytest.approx(PUBLISHED[name], rel=0.01)


@each_release
def test_kv_is_as_computed_by_hand(name: str, write: WriteConfig) -> None:
    plan = plan_memory(write(LARGE[name]), "1xH200")
    assert (plan.kv_token_bytes, plan.state_bytes) == KV_AND_STATES[name]
    assert plan.dtype == "bfloat16"
    assert (plan.stored_as == "bfloat16") == ("quantization_config" not in LARGE[name])


def test_deepseek_keeps_70272_bytes_of_a_token() -> None:
    assert KV_AND_STATES["DeepSeek-V3"][0] == 70_272


@pytest.mark.parametrize("name", LARGE)
def test_explain_needs_no_weights(name: str, write: WriteConfig) -> None:
    path = write(LARGE[name])
    found = explain_pair(str(path), {"dtype": "bfloat16", "prefill": {"tp": 2}, "decode": {"tp": 4}})
    assert found.supported
    is_quantised = "quantization_config" in LARGE[name]
    assert not any("KV counts in" in note for note in found.notes)
    assert any("dequantised in float32" in note for note in found.notes) == is_quantised
    if name in MOVED:
        assert found.bytes == MOVED[name](found.num_tokens)


def test_explain_says_that_it_counts_in_another_dtype(write: WriteConfig) -> None:
    path = str(write(LLAMA_31_405B))
    found = explain_pair(path, {"dtype": "float32"})
    assert found.notes == ("KV counts in float32, and the model is in bfloat16: --dtype auto counts in that",)
    own = explain_pair(path, {"dtype": "auto"})
    assert (own.notes, 2 * own.bytes) == ((), found.bytes)


def test_the_405b_on_8_h200(write: WriteConfig) -> None:
    """Each rank has an eighth of the matrices and every norm, two per layer and the last."""
    plan = plan_memory(write(LLAMA_31_405B), "8xH200", tokens=1000)
    assert [size.tp for size in whole(plan)] == [1, 2, 4, 8]
    assert [size.reason for size in whole(plan)] == ["the weights do not fit"] * 3 + [""]
    assert plan.fits
    last = whole(plan)[-1]
    norms = (2 * 126 + 1) * 16384
    assert last.weight_bytes == 2 * ((plan.num_parameters - norms) // 8 + norms)
    assert last.block_bytes == 16 * 516_096 // 8
    assert last.num_blocks == (int(141e9 * USED_SHARE) - last.weight_bytes) // last.block_bytes
    assert last.num_requests == last.num_blocks // 63
    assert last.num_tokens == 1000 * last.num_requests
    # Eight KV heads are no rank's twice, so that no tokens can be dealt; stages take all GPUs.
    staged = [size for size in plan.sizes if size.pp > 1]
    assert [(size.tp, size.pp, size.dcp) for size in staged] == [(4, 2, 1), (2, 4, 1), (1, 8, 1)]
    assert {size.reason for size in staged if size.tp == 4} == {""}
    first = staged[0]
    # The first stage has the embedding, the last one the head and the last norm, of 63 layers each.
    layers = (plan.num_parameters - 2 * 128_256 * 16_384 - norms) // 2
    ends = 128_256 * 16_384
    assert first.weight_bytes == 2 * ((layers + ends) // 4 + 2 * 63 * 16_384 + 16_384)
    assert first.block_bytes == 16 * 516_096 // 8
    assert first.num_blocks == (int(141e9 * USED_SHARE) - first.weight_bytes) // first.block_bytes
    assert not plan_memory(write(LLAMA_31_405B), "8xH100").fits


def test_dealt_tokens_take_the_place_of_replicas(write: WriteConfig) -> None:
    """Every rank of TP keeps all latents; of dealt ones it keeps its part of a block of all their tokens."""
    plan = plan_memory(write(LARGE["DeepSeek-V3"] | {"num_hidden_layers": 4}), "4xH200", tokens=4096)
    found = {(size.tp, size.pp, size.dcp): size for size in plan.sizes}
    assert list(found) == [
        (1, 1, 1),
        (2, 1, 1),
        (2, 1, 2),
        (4, 1, 1),
        (4, 1, 4),
        (2, 2, 1),
        (2, 2, 2),
        (1, 4, 1),
    ]
    copies, dealt = found[4, 1, 1], found[4, 1, 4]
    assert (dealt.weight_bytes, dealt.block_bytes) == (copies.weight_bytes, copies.block_bytes)
    assert dealt.num_blocks == copies.num_blocks
    # 256 blocks of 16 tokens, or 64 of 64.
    assert (copies.num_requests, dealt.num_requests) == (copies.num_blocks // 256, copies.num_blocks // 64)
    # Four layers of latents: a rank of 4 keeps a quarter of a request's.
    assert copies.request_bytes == 4096 * 4 * (512 + 64) * 2 == 4 * dealt.request_bytes
    assert dealt.reason == copies.reason == ""
    # Two layers of latents on each of two stages.
    assert found[2, 2, 1].block_bytes == 16 * 2 * (512 + 64) * 2


def test_stages_tear_no_sharing_layers_apart(write: WriteConfig) -> None:
    """Layers 20 to 34 share keys and values of 18 and 19: the last stage begins at 18 at the latest."""
    plan = plan_memory(write(LARGE["gemma-3n-E4B"]), "8xL4")
    staged = [size for size in plan.sizes if size.pp > 1 and size.dcp == 1]
    assert {size.pp: size.pp_layers for size in staged} == {
        2: None,  # 18 and 17
        4: (9, 8, 1, 17),
        8: (4, 4, 4, 3, 1, 1, 1, 17),
    }
    assert [size.reason for size in staged] == [""] * 3


def test_requests_at_a_time_are_counted_at_their_fullest(write: WriteConfig) -> None:
    """The 127 positions before a token lie in 9 blocks of 16, unless they begin with one."""
    two_layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    (size,) = whole(plan_memory(write(LARGE["gpt-oss-120b"] | two_layers), "1xH200", tokens=4096))
    assert size.num_requests == size.num_blocks // (256 + 9)


def test_the_plan_counts_the_rank_that_holds_most(write: WriteConfig) -> None:
    uneven = {"num_hidden_layers": 1, "intermediate_size": 53251, "vocab_size": 128259}
    path = write(LLAMA_31_405B | uneven)
    config = read_config(path)
    ranks = [rank_bytes(config, 8, rank) for rank in range(8)]
    assert len(set(ranks)) > 1
    assert whole(plan_memory(path, "8xH200"))[-1].weight_bytes == max(ranks)


@thorough
def test_weights_count_as_ranks_hold_them(write: WriteConfig) -> None:
    """fp8 stays where GPUs multiply it; what has no such kernels is dequantised."""
    path = write(LARGE["DeepSeek-V3"])
    config = read_config(path)
    plain = rank_bytes(replace(config, quantisation=None), 8, 7)
    kept = plan_memory(path, "8xH200")
    assert whole(kept)[-1].weight_bytes == rank_bytes(config, 8, 7) < 0.51 * plain
    assert kept.held_as == "in fp8 as stored, the rest in bfloat16"
    without = plan_memory(path, "8xA100")
    assert (whole(without)[-1].weight_bytes, without.held_as) == (plain, "dequantised in bfloat16")
    plan = plan_memory(write(LARGE["gpt-oss-120b"]), "2xH200")
    assert plan.held_as == "dequantised in bfloat16"
    assert plan.sizes[0].weight_bytes == 2 * plan.num_parameters
    assert [size.reason for size in whole(plan)] == ["the weights do not fit", ""]


@thorough
def test_gpt_oss_weighs_what_its_card_says(write: WriteConfig) -> None:
    """60.8 GiB (the model card, Table 1)."""
    config = read_config(write(LARGE["gpt-oss-120b"]))
    assert rank_bytes(config, 1, 0) == pytest.approx(60.8 * 2**30, rel=0.002)


@pytest.mark.parametrize(
    ("name", "shape", "quantisation", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (256, 300), {}, 2 * 256 * 300),
        ("model.layers.0.mlp.up_proj.weight", (256, 300), FP8, 256 * 300 + 2 * 3 * 4),
        ("model.layers.0.mlp.up_proj.weight", (256, 300), {"quant_method": "fp8"}, 256 * 300 + 4),
        ("model.layers.0.mlp.gate.weight", (256, 300), FP8, 2 * 256 * 300),
        ("model.layers.0.mlp_norm.weight", (300,), FP8, 2 * 300),
        ("lm_head.weight", (256, 300), FP8, 2 * 256 * 300),
        (
            "model.layers.3.mlp.up_proj.weight",
            (256, 300),
            FP8 | {"modules_to_not_convert": ["model.layers.*.mlp"]},
            2 * 256 * 300,
        ),
        ("model.layers.0.mlp.experts.down_proj", (3, 64, 64), MXFP4, 3 * 64 * 64 // 2 + 3 * 64 * 2),
        ("model.layers.0.mlp.experts.down_proj_bias", (3, 64), MXFP4, 2 * 3 * 64),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), MXFP4, 2 * 64 * 64),
    ],
)
def test_bytes_as_stored(
    name: str, shape: tuple[int, ...], quantisation: dict[str, Any], expected: int
) -> None:
    config = parse_config(LLAMA_31_405B | {"quantization_config": quantisation or None})
    found = config.quantisation
    assert (found.stored_bytes(name, shape, 2) if found else math.prod(shape) * 2) == expected


def test_what_is_refused(write: WriteConfig) -> None:
    path = write(LLAMA_31_405B | {"num_hidden_layers": 1, "quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(UnsupportedArchitecture, match="`quant_method` 'hqq'"):
        plan_memory(path, "1xH100")
    for text in ("8xTPU", "0xH100", "H100x8", "", "99999xH100"):
        with pytest.raises(UserError, match="is not understood"):
            parse_gpus(text)
    assert parse_gpus("h100") == (1, "H100")
    assert parse_gpus("8xH200") == (8, "H200")
    assert (GPU_GB["H100"], GPU_GB["H200"]) == (80, 141)


def test_a_shape_without_quantisation_is_the_plain_one(write: WriteConfig) -> None:
    path = write(LLAMA_31_405B | {"quantization_config": FP8})
    config = read_config(path)
    assert config.quantisation is not None
    assert replace(config, quantisation=None) == parse_config(LLAMA_31_405B)


def test_a_tp_size_that_does_not_divide_is_named(write: WriteConfig) -> None:
    path = write(LLAMA_31_405B | {"num_hidden_layers": 1, "num_attention_heads": 8})
    (_, _, third, *_) = plan_memory(path, "6xH200").sizes
    assert third.tp == 3
    assert third.reason == "TP 3 does not divide the model's 8 query heads"
