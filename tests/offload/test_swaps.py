"""Requests in a pool that is too small for them are swapped out to the host tier and back: tokens equal those
of transformers, nothing is computed twice, every block comes back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.manager import KVCacheManager
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups
from rayk.offload.costs import LoadChoice
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per, sweep
from tests.offload.node import Node
from tests.pd import make_request, wait_until

STATES = {"state_block_size": 16, "prefix_caching": True}
AHEAD = {"async_scheduling": "always"}
STAGES = {"tp": 1, "pp": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {}) for family in ("qwen3", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next")
}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """Of each model's prompts."""
    return make_answers(MODELS, checkpoint, reference)


def pool_for(model: Answers, own: dict[str, Any], num_requests: int, first: int = 0) -> int:
    """Blocks in which so many of the crowd fit when they begin, and not when they have grown."""
    groups = engine_groups(EngineConfig(model=str(model.path), **own), load_config(model.path))
    begun = KVCacheManager(groups, 1000)
    for i in range(num_requests):
        assert begun.extend(f"r{i}", len(model.prompts[first + i % 2])) is not None
    return 1000 - begun.pool.num_free_blocks + 1


def crowd(model: Answers, times: int, first: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt, its answer): two of the model's prompts so many times over."""
    return list(zip(model.prompts, model.expected, strict=True))[first : first + 2] * times


def too_many(
    name: str, model: Answers, more: dict[str, Any]
) -> tuple[dict[str, Any], list[tuple[list[int], list[int]]]]:
    """Settings of an engine at two ranks, and a crowd that does not fit into its pool."""
    own: dict[str, Any] = {"tp": 2, "layout": "LBNHC", **more}
    # Large blocks, which the shorter of the first two requests never fills.
    first = 1 if name in ("nemotron_h", "qwen3_next") and not more else 0
    return own | {"num_blocks": pool_for(model, own, 8, first)}, crowd(model, 9, first)


@sweep(2)
@one_per()
@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen3", AHEAD), *itertools.product(MODELS, ({}, STATES)), ("qwen3", STAGES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "in-place",
)
def test_a_crowd_in_a_small_pool_is_swapped_and_right(
    name: str, more: dict[str, Any], answers: Callable[[str], Answers]
) -> None:
    """More requests than fit, at two ranks: all tokens are right, none is computed a second time."""
    model = answers(name)
    own, asked = too_many(name, model, more)
    with Node.open(model.path, [own], load="never") as node:
        engine = node.engines[0]
        requests = [make_request(f"r{i}", prompt, NUM_TOKENS) for i, (prompt, _) in enumerate(asked)]
        found = engine.complete(requests)
        assert [c.token_ids for c in found] == [answer for _, answer in asked]
        node.settle()
        counts = engine.offloading.counts
        assert counts["swaps"] > 0, engine.offloading.status()
        assert sum(c.info["num_swaps"] for c in found) == counts["swaps"]
        assert sum(c.info["num_preemptions"] for c in found) == 0
        assert sum(c.info["num_recomputed_tokens"] for c in found) == 0
        assert counts["swapped_in_bytes"] > 0
        assert not counts["swaps_failed"]
        assert node.status()["num_kept"] == 0, "what was brought back is kept no longer"


def test_what_is_cheaper_to_compute_is_not_swapped(answers: Callable[[str], Answers]) -> None:
    """The cost model has its way, and says so; with `never` nobody asks it."""
    model = answers("qwen3")
    for swap in ("auto", "never"):
        with Node.open(model.path, [{"num_blocks": pool_for(model, {}, 8)}], load="never", swap=swap) as node:
            engine = node.engines[0]
            engine.offloading.costs.swap = lambda *_: LoadChoice(False, 2.0, 1.0)  # type: ignore[method-assign]
            asked = crowd(model, 9)
            requests = [make_request(f"r{i}", prompt, NUM_TOKENS) for i, (prompt, _) in enumerate(asked)]
            found = engine.complete(requests)
            assert [c.token_ids for c in found] == [answer for _, answer in asked]
            node.settle()
            counts = engine.offloading.counts
            assert sum(c.info["num_preemptions"] for c in found) > 0
            assert counts["swaps"] == 0
            assert counts["swaps_declined"] == counts["swaps_weighed"]
            assert bool(counts["swaps_weighed"]) == (swap == "auto")


def test_who_leaves_while_away_leaves_nothing(answers: Callable[[str], Answers]) -> None:
    """Requests are aborted at any time, also while they are swapped out, on their way, or back: the others'
    tokens are right, and neither the engine nor the tier keeps anything."""
    model = answers("qwen3")
    rng = random.Random(7)
    with Node.open(model.path, [{"num_blocks": pool_for(model, {}, 8)}], load="never") as node:
        engine = node.engines[0]
        leader, times = engine.engine.leader, engine.engine.loops[0].times
        asked = crowd(model, 15)
        streams = {}
        for i, (prompt, _) in enumerate(asked):
            streams[f"r{i}"] = engine.start(make_request(f"r{i}", prompt, NUM_TOKENS))
        aborted = set()
        num_away = 0

        def abort_one() -> bool:
            """Somebody who is away where there is anybody, on the loop's thread: nobody moves meanwhile."""
            away = [s.request_id for s in leader.scheduler._away._states.values()]
            left = sorted(set(streams) - aborted - {*away})
            aborted.add(name := rng.choice(away) if away else rng.choice(left))
            leader.abort(name)
            return bool(away)

        while len(aborted) < len(asked) - 2 and (len(aborted) < len(asked) // 3 or not num_away):
            num_away += engine.run(abort_one)
            wait_until(lambda n=times.num_turns: times.num_turns > n + 5)
        found = {name: engine.engine.collect(stream) for name, stream in streams.items()}
        for (name, done), (_, answer) in zip(found.items(), asked, strict=True):
            if done.finish_reason is FinishReason.ABORT:
                assert name in aborted
                assert done.token_ids == answer[: len(done.token_ids)]
            else:
                assert done.token_ids == answer
        assert num_away, "somebody was aborted while away"
        node.settle()
        wait_until(lambda: node.status()["num_kept"] == 0, what=lambda: str(node.status()))


@one_per()
@pytest.mark.parametrize("when", range(4))
def test_a_tier_that_is_lost_loses_no_request(when: int, answers: Callable[[str], Answers]) -> None:
    """The tier ends in the middle of swaps: whoever was away is computed again."""
    model = answers("gpt_oss")
    with Node.open(model.path, [{"num_blocks": pool_for(model, {}, 8)}], load="never") as node:
        engine = node.engines[0]
        asked = crowd(model, 12)
        streams = [
            engine.start(make_request(f"r{i}", prompt, NUM_TOKENS)) for i, (prompt, _) in enumerate(asked)
        ]
        wait_until(lambda: engine.offloading.counts["swaps"] > when, 30.0, lambda: "no swaps")
        node.thread.close()
        engine.run(lambda: engine.offloading.lost("it was ended"))
        found = [engine.engine.collect(stream) for stream in streams]
        assert [c.token_ids for c in found] == [answer for _, answer in asked]
        assert [c.error for c in found] == [None] * len(found)
        engine.settle()
        assert engine.offloading.why_off == "it was ended"
        more = engine.complete([make_request("later", asked[0][0], NUM_TOKENS)])[0]
        assert more.token_ids == asked[0][1], "it goes on without"


def test_a_tier_without_room_swaps_nobody(answers: Callable[[str], Answers]) -> None:
    """Its few blocks cannot hold a request: the engine computes again what it preempts."""
    model = answers("qwen3")
    with Node.open(
        model.path, [{"num_blocks": pool_for(model, {}, 8)}], load="never", host_bytes=40_000
    ) as node:
        engine = node.engines[0]
        asked = crowd(model, 9)
        requests = [make_request(f"r{i}", prompt, NUM_TOKENS) for i, (prompt, _) in enumerate(asked)]
        found = engine.complete(requests)
        assert [c.token_ids for c in found] == [answer for _, answer in asked]
        node.settle()
        counts = engine.offloading.counts
        assert counts["swaps_failed"] > 0
        assert sum(c.info["num_preemptions"] for c in found) > 0


def test_random_crowds_end_right(answers: Callable[[str], Answers]) -> None:
    """Two engines swap to one tier at once, with aborts, stores and loads between."""
    model = answers("qwen3")
    num_blocks = pool_for(model, {}, 6)
    engines = [
        {"num_blocks": num_blocks},
        {"num_blocks": num_blocks, "tp": 2, "layout": "LBNHC", "prefix_caching": True},
    ]
    with Node.open(model.path, engines, load="always", host_bytes=4 << 20) as node:
        rng, numbers = random.Random(3), itertools.count()
        for _ in range(3):
            waiting = []
            for _ in range(16):
                engine = rng.choice(node.engines)
                prompt, answer = rng.choice(crowd(model, 1))
                name = f"q{next(numbers)}"
                is_left = rng.random() < 0.2
                waiting.append((engine, name, engine.start(make_request(name, prompt, NUM_TOKENS)), answer))
                if is_left:
                    engine.engine.leader.abort(name)
            for engine, name, stream, answer in waiting:
                done = engine.engine.collect(stream)
                assert done.error is None, name
                assert done.token_ids == answer[: len(done.token_ids)], name
                assert done.finish_reason is FinishReason.ABORT or done.token_ids == answer, name
            node.settle()
        assert sum(e.offloading.counts["swaps"] for e in node.engines) > 0
        assert sum(e.offloading.counts["loads"] for e in node.engines) > 0


def test_engines_say_why_they_store_hardly_anything(answers: Callable[[str], Answers]) -> None:
    """States that are updated in place, and those that are kept at the ends of blocks."""
    model = answers("nemotron_h")
    with Node.open(model.path, [{}, STATES], load="never") as node:
        plain, cached = (engine.run(engine.offloading.status)["why_few"] for engine in node.engines)
        assert "state_block_size" in plain
        assert cached == ""
