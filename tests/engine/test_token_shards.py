"""Engines whose ranks deal the tokens of each sequence: greedy output is transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import ThreadEngine
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per, sweep, thorough
from tests.pd import HANG_S, NAN_POISON, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3n": ("gemma3n", {}),
    "falcon_h1": ("falcon_h1", {}),
    "llama4": ("llama4", {}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def engine_of(model: Answers, **config: Any) -> ThreadEngine:
    settings = {"num_blocks": 64, "model": str(model.path), **config}
    return ThreadEngine(EngineConfig(**settings), poison=NAN_POISON, timeout_s=HANG_S)


def tokens_of(engine: ThreadEngine, model: Answers, name: str = "r") -> list[list[int]]:
    requests = [make_request(f"{name}{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)]
    results = engine.generate(requests)
    assert [r.error for r in results] == [None] * len(results)
    return [r.token_ids for r in results]


@sweep(2)
@one_per()
@pytest.mark.parametrize(
    ("model", "tp", "dcp", "interleave"),
    [
        ("llama", 4, 2, 1),
        ("llama", 8, 4, 16),
        ("deepseek_v3", 2, 2, 1),
        ("gpt_oss", 4, 2, 8),
        ("gemma3n", 4, 2, 1),
        ("falcon_h1", 4, 2, 4),
        ("llama4", 4, 2, 1),
    ],
)
def test_tokens_are_transformers(
    answers: Callable[[str], Answers], model: str, tp: int, dcp: int, interleave: int
) -> None:
    """Chunked prefill beside decode, then the same prompts by way of the prefix cache."""
    found = answers(model)
    shape = {"tp": tp, "dcp": dcp, "dcp_interleave": interleave}
    with engine_of(found, **shape, max_batch_tokens=70, prefix_caching=True) as engine:
        assert "(token shards)" in engine.ranks[0].backends.implementation
        assert f"dcp {dcp}" in engine.ranks[0].graphs_note
        assert tokens_of(engine, found) == found.expected
        assert tokens_of(engine, found, "again") == found.expected


@thorough
def test_preempted_requests_and_fast_prefill(answers: Callable[[str], Answers]) -> None:
    """46 blocks of 8 tokens hold all prompts, but not all that follows."""
    llama = answers("llama")
    with engine_of(llama, tp=4, dcp=2, block_size=4, num_blocks=47) as engine:
        assert tokens_of(engine, llama) == llama.expected
        assert engine.leader.scheduler.num_preemptions > 0
    gemma3n = answers("gemma3n")
    with engine_of(gemma3n, tp=4, dcp=2, fast_prefill=True, max_batch_tokens=70) as engine:
        assert engine.ranks[0].fast_prefill_layers
        assert tokens_of(engine, gemma3n) == gemma3n.expected


@sweep(2)
@one_per()
@pytest.mark.parametrize(
    "kept",
    [{"kv_dtype": "nvfp4"}, {"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_e4m3", "kv_scales": "token_head"}],
    ids="-".join,
)
def test_quantised_rows_are_those_of_ranks_that_deal_none(
    answers: Callable[[str], Answers], kept: dict[str, Any]
) -> None:
    """In a step of one token half of the ranks have none to store, in every format."""
    qwen3, found = answers("qwen3"), []
    for shape in ({}, {"dcp": 2, "pp": 2}):
        with engine_of(qwen3, tp=4, **shape, **kept, max_batch_tokens=70) as engine:
            found.append(tokens_of(engine, qwen3))
    assert found[0] == found[1]


def test_a_rank_keeps_half_of_what_it_would(answers: Callable[[str], Answers]) -> None:
    """Of as many tokens, which half as many blocks hold."""
    llama = answers("llama")
    sizes = []
    for shape in ({"dcp": 1, "num_blocks": 64}, {"dcp": 2, "num_blocks": 32}):
        with engine_of(llama, tp=4, **shape) as engine:
            rank = engine.ranks[0]
            sizes.append(rank.caches.buffer.nbytes)
            tokens = rank.plan.groups[0].spec.block_size * shape["num_blocks"]
            assert tokens == 64 * 16
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tp": 4, "dcp": 4}, "DCP 4 at TP 4: a run of 4 ranks must keep the same heads"),
        ({"tp": 4, "dcp": 2, "dcp_interleave": 3}, "dcp_interleave 3 does not divide blocks of 16 tokens"),
    ],
)
def test_refused_by_name(answers: Callable[[str], Answers], config: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words), engine_of(answers("llama"), **config):
        pass
