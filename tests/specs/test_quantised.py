"""Cells of quantised KV: what they keep, what the model cannot, and what is refused with a mend."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.specs import load_spec, plan_cells
from tests.specs.models import decoder, spec


def cell_of(config: Any = None, **changes: Any) -> Any:
    ((cell, _),) = plan_cells(load_spec(spec(**changes)), config or decoder(), device="cpu")
    return cell


def test_formats_of_both_sides() -> None:
    cell = cell_of(kv_dtype="fp8_e4m3", decode={"kv_scales": "token_head"})
    assert cell.kv_formats == ("fp8_e4m3", "fp8_e4m3_token_head")
    assert cell.is_quantised
    assert cell.is_converted
    plain = cell_of()
    assert plain.kv_formats == ("float32", "float32")
    assert not plain.is_quantised
    assert not plain.is_converted
    assert not cell_of(kv_dtype="nvfp4").is_converted


def test_default_checks_are_those_of_the_dtype() -> None:
    assert cell_of(kv_dtype="nvfp4").checks == ("tokens", "kv_bytes")
    assert cell_of(kv_dtype="nvfp4", dtype="bfloat16").checks == ("logprobs", "kv_bytes")


def test_heads_that_blocks_of_16_do_not_divide_are_unsupported_by_name() -> None:
    odd = decoder(head_size=24)
    why = cell_of(odd, kv_dtype="nvfp4").unsupported
    assert "nvfp4 of heads of 24 and 24 elements" in why
    assert "mend: kv_dtype fp8_e4m3 or auto" in why
    assert cell_of(odd, kv_dtype="fp8_e4m3").unsupported is None


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_conversion_works_in_both_modes(mode: str) -> None:
    cell = cell_of(decode={"kv_dtype": "nvfp4"}, transfer={"mode": mode})
    assert cell.is_converted
    assert cell.unsupported is None
