"""Requests that share prefixes on one engine that has too few blocks: tokens equal those of transformers,
what is shared is not computed again, and what may be found is never written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.kv.groups import CacheKey
from rayk.oracle.tiny import HYBRID
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.engine.stepped import Stepped
from tests.markers import one_per, slow
from tests.pd import NAN_POISON, make_request
from tests.spec_models import GROUP_MODELS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-hybrid": ("qwen3", {"overrides": dict(HYBRID)}),
    "falcon_h1": ("falcon_h1", {}),
    "mamba2": ("mamba2", {}),
    **{
        name: (
            GROUP_MODELS[name][0],
            {"overrides": dict(GROUP_MODELS[name][1])} if GROUP_MODELS[name][1] else {},
        )
        for name in ("llama4", "gemma3n")
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"state_block_size": 16},
    "mamba2": {"state_block_size": 12},
    "gemma3n": {"fast_prefill": True},
}


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


def run(engine: ThreadEngine, name: str, prompt: list[int], max_tokens: int = NUM_TOKENS) -> RequestResult:
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


def kept_pages(engine: Stepped) -> dict[int, tuple[object, list[torch.Tensor]]]:
    """What can be found now: block -> its name and a copy of its bytes in all layers."""
    manager = engine.manager
    assert manager.prefixes is not None
    groups = {g.index: g for g in engine.rank.plan.groups}
    return {
        block: (name, [page for key in groups[name[0]].keys for page in pages(engine, key, block)])
        for block, name in manager.prefixes._names.items()
    }


def pages(engine: Stepped, key: CacheKey, block: int) -> list[torch.Tensor]:
    """A copy of a cache's bytes in a block; kernel blocks are whole blocks here."""
    view = engine.rank.caches.view(*key)
    views = view.values() if isinstance(view, dict) else [view]
    return [v[block].contiguous().view(torch.uint8).clone() for v in views]


@one_per()
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=slow) for n in range(1, 6))])
@pytest.mark.parametrize("model", MODELS)
def test_many_requests_in_a_small_pool(model: str, seed: int, answers: Callable[[str], Answers]) -> None:
    """Conversations at several turns come in random order, some are aborted; blocks run short, so that
    requests are preempted and cached blocks lost."""
    path, prompts, expected = answers(model)
    settings = {"num_blocks": 400, "max_batch_tokens": 64, "max_seqs": 6, **SETTINGS.get(model, {})}
    engine = Stepped(path, prefix_caching=True, **settings)
    engine.restart(engine.manager.max_request_blocks(len(prompts[2]) + NUM_TOKENS, 64) + 2)
    draw = random.Random(seed)
    waiting = [(i, k) for i in (0, 1, 2, 2) for k in (0, 3, 9, 17)]
    draw.shuffle(waiting)
    asked: dict[str, tuple[int, int]] = {}
    states: dict[str, Any] = {}
    before = kept_pages(engine)
    while waiting or engine.scheduler.has_work:
        if waiting and (draw.random() < 0.3 or not engine.scheduler.has_work):
            index, turn = waiting.pop()
            name = f"r{len(asked)}"
            asked[name] = index, turn
            prompt = prompts[index] + expected[index][:turn]
            states[name] = engine.add(name, prompt, NUM_TOKENS - turn)
        if draw.random() < 0.02:
            name = draw.choice(sorted(states))
            if states[name].finish_reason is None:
                engine.scheduler.remove(name)
                states[name].finish_reason = FinishReason.ABORT
        engine.step(draw.choice((5, 16, 64)))
        # Lost blocks may come to hold the same again within a step.
        fresh = (
            {b for r in engine.batches[-1].requests for b in r.fresh_blocks()} if engine.batches else set()
        )
        now = kept_pages(engine)
        for block, (name, found) in now.items():
            if block in before and before[block][0] == name and block not in fresh:
                assert all(map(torch.equal, found, before[block][1])), f"block {block} was written"
        before = now
    assert engine.scheduler.num_preemptions > 0
    assert engine.manager.pool.num_free_blocks == engine.manager.pool.num_blocks - 1
    for name, (index, turn) in asked.items():
        output, wanted = states[name].output_token_ids, expected[index][turn:]
        is_whole = states[name].finish_reason is FinishReason.LENGTH
        assert output == (wanted if is_whole else wanted[: len(output)])
    # At any admission: in so small a pool it may only be those that come back who find something.
    shares = [r for batch in engine.batches for r in batch.requests if r.num_filled_blocks]
    assert any(r.num_computed_tokens for r in shares), "nothing was found again"


def test_what_tells_of_the_prompt_is_computed(answers: Callable[[str], Answers]) -> None:
    """Logits of prompt tokens take computing them: nothing of such a prompt is taken from the cache, and what
    is told equals what an engine without one tells. Others may use what it leaves."""
    path, prompts, _ = answers("qwen3")
    told = []
    for caching in (False, True):
        config = EngineConfig(model=str(path), prefix_caching=caching, num_blocks=64)
        with ThreadEngine(config, poison=NAN_POISON) as engine:
            for name in "ab":
                request = make_request(name, prompts[2], 2, prompt_logprobs=2)
                (done,) = engine.generate([request])
                assert done.info["num_cached_tokens"] == 0
                assert done.prompt_logprobs is not None
                assert len(done.prompt_logprobs) == len(prompts[2])
                told.append(done.prompt_logprobs)
            plain = run(engine, "plain", prompts[2])
            assert plain.info["num_cached_tokens"] == (288 if caching else 0)
    assert all(one == told[0] for one in told)
