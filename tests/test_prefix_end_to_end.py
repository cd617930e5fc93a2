"""Prompts that share prefixes, prefilled and decoded on engines that both cache: tokens equal transformers', and
what the decode engine holds is not moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.pd import Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {"qwen3": ("qwen3", {})}


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
def test_what_the_decode_engine_holds_is_not_moved(
    answers: Callable[[str], Answers], tp: tuple[int, int]
) -> None:
    path, prompts, expected = answers("qwen3")
    prompt = prompts[2]
    with Pair.open(path, tp=tp, prefix_caching=True, num_blocks=64) as pair:
        moved = []
        for number in range(3):
            (done,) = pair.complete([make_request(f"r{number}", prompt, NUM_TOKENS)])
            assert done.token_ids == expected[2]
            rows = done.info["transfers"]
            moved.append((sum(r.bytes for r in rows), sum(r.held_bytes for r in rows)))
            assert done.info["num_cached_tokens"] == (288 if number else 0)
        whole = moved[0][0]
        assert moved[0][1] == 0
        # 256 of 300 tokens: the row groups that are held whole.
        assert moved[1] == moved[2] == (whole - moved[1][1], moved[1][1])
        assert 0.8 < moved[1][1] / whole < 256 / 300 + 0.02
        pair.check_all_free()
