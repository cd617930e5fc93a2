"""The map of vLLM's CPU backend, learned from its own kernel, against what that kernel writes."""

from __future__ import annotations

from pathlib import Path

from tests.markers import needs_vllm
from tests.vllm.cpu_store import BLOCK_SIZES, HEAD_SIZES
from tests.vllm.interpreter import told_by


@needs_vllm
def test_what_the_cpu_kernel_stores_is_read_back_by_its_map(vllm_python: Path) -> None:
    told = told_by(vllm_python, "tests.vllm.cpu_store")
    cases, roundings = (
        [case for case in told if ("cut" in case) is of_roundings] for of_roundings in (False, True)
    )
    assert len(cases) - 2 * len(HEAD_SIZES) * len(BLOCK_SIZES) in (0, 1)
    for case in roundings:  # a fault of vLLM's, predicted to the bit
        assert (case["cut"], case["nearest"]) == ([True, True], [False, False]), case
    for case in cases:
        assert case["right"] == [True, True], case
        assert case["untouched"], case
        # K is transposed: the cache's shape, [heads, tokens, K and V], does not tell.
        size = case["block_size"]
        assert case["keys"] == f"from 0: head {2 * case['head_size'] * size}, element {size}, token 1"
