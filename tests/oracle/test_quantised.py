"""The reference's rounding of keys and values, against rayk's kernels, which were written apart from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayk.kernels.quantise import dequantise, quantise
from rayk.kv.formats import FORMATS, engine_format
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.quantised import KVRounding
from rayk.oracle.reference import Reference

ROUNDINGS = {
    "fp8": KVRounding("fp8_e4m3"),
    "token-head": KVRounding("fp8_e4m3", "token_head"),
    "nvfp4": KVRounding("nvfp4"),
}


@pytest.mark.parametrize("scale", [1.0, 0.037])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounds_as_the_kernels_do(name: str, scale: float) -> None:
    rounding = ROUNDINGS[name]
    kv_format = FORMATS[engine_format("float32", rounding.kv_dtype, rounding.kv_scales)]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 300, 32, generator=generator) * torch.logspace(-6, 4, 300)[:, None]
    values[0, 7] = 0.0
    values[1, 8, :16] = 0.0
    layer = scale if kv_format.has_layer_scales else 1.0
    expected = dequantise(
        quantise(values, kv_format, layer, impl="reference"), kv_format, layer, impl="reference"
    )
    found = rounding.round(values, layer, 0)
    off = (found - expected).abs() / expected.abs().clamp_min(1e-30)
    # Products in another order: the last bit of a float32.
    assert float(off.max()) <= 2.0**-22


def test_jitter_flips_few_steps_and_is_the_same_again() -> None:
    values = torch.randn(2, 500, 32, generator=torch.Generator().manual_seed(1))
    plain = ROUNDINGS["fp8"].round(values, 1.0, 5)
    jittered = ROUNDINGS["fp8"].jittered(2.0**-14)
    found = jittered.round(values, 1.0, 5)
    assert torch.equal(found, jittered.round(values, 1.0, 5))
    flipped = (found != plain).float().mean()
    assert 0 < float(flipped) < 0.01


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


def test_what_is_cached_is_rounded_and_the_answers_differ(qwen3: Path) -> None:
    prompt = read_marker(qwen3)["probes"][1]["prompt"]
    plain, rounded = (Reference(qwen3, rounding=r) for r in (None, ROUNDINGS["fp8"]))
    cached = rounded.caches(prompt)
    for fields in cached:
        for values in fields.values():
            assert torch.equal(values, ROUNDINGS["fp8"].round(values, 1.0, 0)), "rounded already"
    first, other = plain.caches(prompt)[0], cached[0]
    assert torch.equal(ROUNDINGS["fp8"].round(first["k"], 1.0, 0), other["k"]), (
        "the first layer's inputs agree"
    )
    outputs = plain.generate([prompt], max_tokens=6)[0].token_ids
    assert plain.score(prompt, outputs) != rounded.score(prompt, outputs)


def test_a_converted_cache_is_rounded_after_the_prompt(qwen3: Path) -> None:
    """The prompt's own tokens are likely as P's format has it; later ones see both roundings."""
    prompt = read_marker(qwen3)["probes"][1]["prompt"]
    kept = KVRounding("auto")
    only, then = Reference(qwen3), Reference(qwen3, rounding=replace(kept, then=ROUNDINGS["nvfp4"]))
    outputs = only.generate([prompt], max_tokens=6)[0].token_ids
    exact, converted = only.score(prompt, outputs), then.score(prompt, outputs)
    torch.testing.assert_close(
        torch.tensor(converted.prompt_logprobs), torch.tensor(exact.prompt_logprobs), rtol=0, atol=2e-4
    )
    assert abs(converted.output_logprobs[0] - exact.output_logprobs[0]) < 2e-4, "P sampled the first"
    later = [a - b for a, b in zip(converted.output_logprobs[1:], exact.output_logprobs[1:], strict=True)]
    assert max(map(abs, later)) > 1e-2
    forced = then.teacher_force(prompt, outputs)
    assert [s.chosen_logprob for s in forced] == pytest.approx(list(converted.output_logprobs), abs=1e-4)
