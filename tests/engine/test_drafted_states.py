"""Engines of models with recurrent states that draft: under everything that batching does to requests greedy
output is transformers', which is the output without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.groups import max_request_blocks
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.drafts import NGRAM, Prophet
from tests.engine.test_speculative import ask, foreseen, num_drafted_and_accepted
from tests.engine.test_token_shards import engine_of
from tests.markers import one_per, thorough
from tests.pd import make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {}) for family in ("falcon_h1", "qwen3_next", "jamba", "mamba2")
}
"""Mamba2 beside attention; a gated delta net, and Mamba1, between layers of attention; Mamba2 alone."""
CHUNK = 64


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def blocks_of_one(model: Answers, **settings: Any) -> int:
    """The most that a request holds, the null block among them."""
    groups = engine_groups(EngineConfig(model=str(model.path), **settings), load_config(model.path))
    return 1 + max_request_blocks(groups, len(model.prompts[2]) + NUM_TOKENS, CHUNK)


@thorough
@pytest.mark.parametrize(
    ("model", "size"),
    [("mamba2", 5), *product(("falcon_h1", "qwen3_next", "jamba"), (None, 5))],
)
def test_preempted_requests_give_the_same_tokens(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str, size: int | None
) -> None:
    found = answers(model)
    Prophet(foreseen(found, 3)).plant(monkeypatch)
    num_blocks = blocks_of_one(found, state_block_size=size) + 3
    settings = {"state_block_size": size, "num_blocks": num_blocks, "max_batch_tokens": CHUNK}
    with engine_of(found, speculative=NGRAM, **settings) as engine:
        ask(engine, found, 3)
        assert engine.leader.scheduler.num_preemptions > 0
        assert num_drafted_and_accepted(engine)[1] > 10


@thorough
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("model", "size"), [("mamba2", 1), ("mamba2", 5), ("falcon_h1", 16), ("qwen3_next", 4), ("jamba", 8)]
)
def test_conversations_in_a_small_pool(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str, size: int, seed: int
) -> None:
    """At several turns, in random order: what drafts left in blocks of states is found, and lost again."""
    found = answers(model)
    settings = {"state_block_size": size, "max_batch_tokens": CHUNK, "max_seqs": 6}
    num_blocks = blocks_of_one(found, **settings) * 3 // 2
    turns = [(i, k) for i in (0, 1, 2, 2) for k in (0, 3, 9, 17)]
    random.Random(seed).shuffle(turns)
    outputs = {f"r{n}": found.expected[i][k:] for n, (i, k) in enumerate(turns)}
    Prophet(outputs, err_every=5).plant(monkeypatch)
    requests = [
        make_request(f"r{n}", found.prompts[i] + found.expected[i][:k], NUM_TOKENS - k)
        for n, (i, k) in enumerate(turns)
    ]
    caching = {"prefix_caching": True, "num_blocks": num_blocks, "speculative": NGRAM}
    with engine_of(found, **settings, **caching) as engine:
        done = engine.generate(requests)
        assert [d.token_ids for d in done] == list(outputs.values())
        engine.leader.check_integrity()
        pool = engine.leader.manager.pool
        assert pool.num_free_blocks == pool.num_blocks - 1
        assert sum(d.info["num_cached_tokens"] for d in done) > 0
        assert num_drafted_and_accepted(engine)[1] > 20


@one_per()
@pytest.mark.parametrize(("model", "size"), [("mamba2", 1), ("mamba2", 6), ("falcon_h1", 4), ("jamba", 8)])
def test_what_drafts_computed_is_gone_on_from(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str, size: int
) -> None:
    """The conversation goes on from a state inside the output, in whose step some drafts were rejected."""
    found = answers(model)
    num_known = NUM_TOKENS - 2
    outputs = foreseen(found) | {f"on{i}": e[num_known:] for i, e in enumerate(found.expected)}
    Prophet(outputs, err_every=4).plant(monkeypatch)
    settings = {"state_block_size": size, "prefix_caching": True, "num_blocks": 1200}
    with engine_of(found, speculative=NGRAM, **settings) as engine:
        ask(engine, found)
        prefixes = engine.leader.manager.prefixes
        assert prefixes is not None
        unit = prefixes.unit_tokens
        for i, (prompt, expected) in enumerate(zip(found.prompts, found.expected, strict=True)):
            longer = prompt + expected[:num_known]
            (done,) = engine.generate([make_request(f"on{i}", longer, NUM_TOKENS - num_known)])
            assert done.token_ids == expected[num_known:]
            assert done.info["num_cached_tokens"] == (len(longer) - 1) // unit * unit
        longest = len(found.prompts[2])
        assert (longest + num_known - 1) // unit * unit > longest, "a state inside the output"
