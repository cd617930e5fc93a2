"""Options by vLLM's names are what rayk's own names say."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.types.errors import SpecError
from tests.specs.test_server_plan import plan


@pytest.mark.parametrize(
    ("vllm", "own"),
    [
        ({"tensor_parallel_size": 2}, {"mode": "aggregated", "prefill_tp": 2}),
        (
            {"tensor_parallel_size": 2, "mode": "disaggregated", "num_decode": 2},
            {"prefill_tp": 2, "decode_tp": 2, "num_decode": 2},
        ),
        ({"max_num_seqs": 3}, {"overrides": ("engine.max_seqs=3",)}),
        ({"kv_cache_dtype": "fp8"}, {"overrides": ("kv_dtype=fp8_e4m3",)}),
        ({"kv_cache_dtype": "nvfp4"}, {"overrides": ("kv_dtype=nvfp4",)}),
        ({"kv_cache_dtype": "auto"}, {}),
        ({"pipeline_parallel_size": 1}, {"overrides": ("engine.pp=1",)}),
        (
            {"decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 4},
            {"overrides": ("engine.dcp=1", "engine.dcp_interleave=4")},
        ),
    ],
)
def test_names_of_vllm(checkpoint: Any, vllm: dict[str, Any], own: dict[str, Any]) -> None:
    model = checkpoint("qwen3")
    assert plan(model, **vllm) == plan(model, **own)


def test_sizes_of_a_side_make_it_disaggregated(checkpoint: Any) -> None:
    found = plan(checkpoint("qwen3"), decode_pp=1, overrides=("prefill.dcp_interleave=8",))
    assert [engine.role for engine in found.engines] == ["prefill", "decode"]
    assert [engine.config.dcp_interleave for engine in found.engines] == [8, 1]


def test_a_shorter_context_and_another_name(checkpoint: Any) -> None:
    model = checkpoint("qwen3")
    whole, found = plan(model), plan(model, max_model_len=64, served_model_name="org/Model-7B")
    assert (found.model.max_positions, found.model.model_id) == (64, "org/Model-7B")
    assert found.engines[0].config.num_blocks < whole.engines[0].config.num_blocks
    most = whole.model.max_positions
    assert plan(model, max_model_len=most) == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2, "decode_tp": 1}, "--tensor-parallel-size 2: TP sizes are given twice"),
        ({"tensor_parallel_size": 2, "num_decode": 1}, "no decode engines"),
        ({"max_num_seqs": 3, "overrides": ("engine.max_seqs = 4",)}, "engine.max_seqs is given twice"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "one of auto, fp8, fp8_e4m3, nvfp4"),
        ({"max_model_len": 10**9}, "--max-model-len 1000000000: the model has .* positions"),
        ({"max_model_len": 0}, "--max-model-len 0"),
        ({"served_model_name": "two words"}, "visible ASCII"),
        ({"served_model_name": ""}, "visible ASCII"),
        (
            {"overrides": ("engine.record_steps=true",)},
            "--set engine.record_steps=true: a server has no cells",
        ),
    ],
)
def test_what_is_refused(checkpoint: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan(checkpoint("qwen3"), **options)
