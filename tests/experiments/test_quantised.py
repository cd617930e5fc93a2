"""How quantised cells are judged: their tokens teacher-forced, their values dequantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.engine.build import ThreadEngine
from rayk.experiments.dequantised import dequantised
from rayk.experiments.quantised import compare_forced, rounding_of
from rayk.experiments.references import References
from rayk.kv.formats import FORMATS
from rayk.kv.groups import group_layers
from rayk.kv.specs import FullAttentionSpec
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.quantised import KVRounding
from rayk.specs import load_spec, plan_cells
from rayk.types.config import EngineConfig
from rayk.types.rows import RequestRow
from tests.pd import make_request
from tests.specs.models import decoder, spec

PROMPTS = [[1, 2, 3], [4, 5]]


def cell_of(**changes: Any) -> Any:
    ((cell, _),) = plan_cells(load_spec(spec(**changes)), decoder(), device="cpu")
    return cell


def test_the_rounding_of_a_cell() -> None:
    assert rounding_of(cell_of()) is None
    both = cell_of(kv_dtype="fp8_e4m3", kv_scales="token_head")
    assert rounding_of(both) == KVRounding("fp8_e4m3", "token_head")
    converted = cell_of(decode={"kv_dtype": "nvfp4"})
    assert rounding_of(converted) == KVRounding("auto", then=KVRounding("nvfp4"))


def test_tokens_are_the_twins_or_good_enough(checkpoint: Callable[..., Path]) -> None:
    """A right engine's pass; unquantised ones, and others altogether, are told from them."""
    path = checkpoint("qwen3")
    prompt: list[int] = read_marker(path)["probes"][1]["prompt"]

    def run(**settings: Any) -> RequestRow:
        config = EngineConfig(model=str(path), num_blocks=32, **settings)
        with ThreadEngine(config) as engine:
            (done,) = engine.generate([make_request("r", prompt, 12)])
        return RequestRow(
            cell_id="c", repeat=0, request_id="r", prompt_index=0, prompt_token_ids=prompt,
            output_token_ids=done.token_ids, num_prompt_tokens=len(prompt), arrival_ns=0,
        )  # fmt: skip

    references = References(str(path), None, rounding=KVRounding("nvfp4"))
    right, plain = run(kv_dtype="nvfp4"), run()
    assert right.output_token_ids != plain.output_token_ids
    tolerance = 1e-3
    assert compare_forced(right, right.output_token_ids, references, tolerance).first_divergence is None
    assert compare_forced(right, None, references, tolerance).first_divergence is None
    wrong = compare_forced(plain, None, references, tolerance)
    assert wrong.first_divergence is not None
    assert not wrong.near_tie
    against = compare_forced(plain, right.output_token_ids, references, tolerance)
    first = next(
        i
        for i, (a, b) in enumerate(zip(plain.output_token_ids, right.output_token_ids, strict=True))
        if a != b
    )
    assert (against.first_divergence, against.near_tie) == (first, False)
    assert "the aggregated engine's is" in against.reason
    assert compare_forced(plain, right.output_token_ids, references, 1e6).near_tie
    short = compare_forced(right, [*right.output_token_ids, 5], references, 1e6)
    assert "12 tokens, the aggregated engine has 13" in short.reason


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_token_head", "nvfp4"])
def test_captured_rows_become_the_values_they_stand_for(name: str) -> None:
    from rayk.kernels.quantise import dequantise, quantise

    groups = group_layers({(0, "attention"): FullAttentionSpec(8, 2, 32, 32, name, 4)})
    kv_format = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    scales = (0.1, 0.3)
    rows: dict[tuple[str, int], np.ndarray] = {}
    expected = {}
    for of, scale in zip("kv", scales, strict=True):
        for unit in range(2):
            values = torch.randn(5, 32, generator=generator)
            layer = scale if kv_format.has_layer_scales else 1.0
            stored = quantise(values, kv_format, layer, impl="reference")
            rows[of, unit] = stored.data.view(torch.uint8).numpy()
            if stored.scales is not None:
                rows[f"{of}_scale", unit] = stored.scales.view(torch.uint8).numpy()
            expected[of, unit] = dequantise(stored, kv_format, layer, impl="reference").numpy()
    rows["ssm", 0] = np.arange(8, dtype=np.uint8).reshape(1, 8)
    told = {0: scales} if kv_format.has_layer_scales else {}
    (found,), plain = dequantised([{0: rows}], groups, told)
    assert set(found[0]) == {*expected, ("ssm", 0)}
    for key, values in expected.items():
        assert np.array_equal(found[0][key].view(np.float32), values)
    assert [f.name for f in plain[0].spec.fields()] == ["k", "v"]
    assert plain[0].spec.dtype == "float32"
