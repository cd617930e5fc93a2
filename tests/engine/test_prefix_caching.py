"""Tokens of requests that share prefixes equal those of transformers, and what was shared is not computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import Completion, ThreadEngine
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.pd import NAN_POISON, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {"qwen3": ("qwen3", {})}


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


def run(engine: ThreadEngine, name: str, prompt: list[int], max_tokens: int = NUM_TOKENS) -> Completion:
    (done,) = engine.generate([make_request(name, prompt, max_tokens)])
    engine.leader.check_integrity()
    assert done.error is None
    return done


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prompt_that_came_before_is_taken_from_the_cache(
    answers: Callable[[str], Answers], tp: int
) -> None:
    path, prompts, expected = answers("qwen3")
    config = EngineConfig(model=str(path), tp=tp, prefix_caching=True, num_blocks=64)
    with ThreadEngine(config, poison=NAN_POISON) as engine:
        for index in (2, 1, 0):
            assert run(engine, f"a{index}", prompts[index]).info["num_cached_tokens"] == 0
            again = run(engine, f"b{index}", prompts[index])
            assert again.token_ids == expected[index]
            assert again.info["num_cached_tokens"] == (len(prompts[index]) - 1) // 16 * 16
            # The conversation goes on: what was generated is known, too, but for the last token.
            more = prompts[index] + expected[index][:20]
            done = run(engine, f"c{index}", more, NUM_TOKENS - 20)
            assert done.token_ids == expected[index][20:]
            assert done.info["num_cached_tokens"] == (len(more) - 1) // 16 * 16
        pool = engine.leader.manager.pool
        assert pool.num_free_blocks == pool.num_blocks - 1
