"""Engines whose ranks are pipeline stages: greedy output is transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.engine.build import ThreadEngine
from rayk.engine.pipeline import Due, Pipeline
from rayk.types.batch import ScheduledBatch
from rayk.types.errors import Unsupported
from rayk.types.request import FinishReason, Request
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.engine.test_token_shards import engine_of, tokens_of
from tests.markers import one_per, thorough
from tests.pd import make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("gemma2", {}),
    "wide": ("mamba2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3n": ("gemma3n", {}),
    "falcon_h1": ("falcon_h1", {}),
}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@one_per()
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("llama", {"pp": 2}),
        ("llama", {"pp": 3, "pp_layers": (1, 2, 1)}),
        ("llama", {"pp": 4}),
        ("llama", {"tp": 2, "pp": 2}),
        ("llama", {"tp": 4, "dcp": 2, "pp": 2}),
        ("tied", {"pp": 2}),
        ("wide", {"pp": 2}),
        ("deepseek_v3", {"tp": 2, "pp": 2}),
        ("gpt_oss", {"pp": 2}),
        ("gemma3n", {"pp": 2, "pp_layers": (2, 4)}),
        ("falcon_h1", {"tp": 2, "pp": 2}),
    ],
)
def test_tokens_are_transformers(
    answers: Callable[[str], Answers], model: str, shape: dict[str, Any]
) -> None:
    """Chunked prefill beside decode, then the same prompts by way of the prefix cache."""
    found = answers(model)
    with engine_of(found, **shape, max_batch_tokens=70, prefix_caching=True) as engine:
        assert not engine.ranks[0].graph_sizes
        assert f"pp {shape['pp']}" in engine.ranks[0].scheduling_note
        assert tokens_of(engine, found) == found.expected
        assert tokens_of(engine, found, "again") == found.expected
        engine.leader.check_integrity()
        computed = [len(rank.decoder.layers) for rank in engine.ranks[:: shape.get("tp", 1)]]
    assert sum(computed) == engine.ranks[0].model_config.num_layers
    if "pp_layers" in shape:
        assert computed == list(shape["pp_layers"])[::-1], "the last stage comes first"


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_computes_what_came_as_many_turns_before_as_it_has_stages_before_it(stage: int) -> None:
    alone: Any = SimpleNamespace(stage=stage, comms=SimpleNamespace(before=None, after=None))
    pipeline = Pipeline(alone)
    turns = [None if step == 2 else ScheduledBatch(step=step, requests=()) for step in range(1, 6)]
    due = [pipeline.tick(batch, ("command", turn)) for turn, batch in enumerate(turns)]
    came = [None if b is None else Due(b, ("command", turn)) for turn, b in enumerate(turns)]
    assert due == [None] * stage + came[: len(turns) - stage]


def tokens_and_steps(engine: ThreadEngine, model: Answers) -> tuple[list[list[int]], list[list[int]]]:
    """Four requests' tokens, and of each step how many tokens of each request it computes."""
    step, sizes = engine.ranks[0].step, []

    def watched(batch: Any) -> Any:
        sizes.append([len(r.token_ids) for r in batch.requests])
        return step(batch)

    engine.ranks[0].step = watched  # type: ignore[method-assign]
    prompts = [*model.prompts, model.prompts[0]]
    results = engine.generate([make_request(f"{i}", p, NUM_TOKENS) for i, p in enumerate(prompts)])
    assert [r.error for r in results] == [None] * len(prompts)
    return [r.token_ids for r in results], sizes


@thorough
def test_decodes_spread_over_as_many_steps_as_there_are_stages(answers: Callable[[str], Answers]) -> None:
    llama = answers("llama")
    with engine_of(llama, pp=2, max_batch_tokens=70) as engine:
        tokens, sizes = tokens_and_steps(engine, llama)
    assert tokens == [*llama.expected, llama.expected[0]]
    decodes = [len(step) for step in sizes if set(step) == {1}]
    assert decodes.count(2) > 2 * decodes.count(1), "four requests go in two steps at a time"
    assert max(decodes) == 2


@thorough
def test_preempted_requests_and_fast_prefill(answers: Callable[[str], Answers]) -> None:
    """46 blocks of 8 tokens hold all prompts, but not all that follows."""
    llama = answers("llama")
    with engine_of(llama, pp=2, block_size=8, num_blocks=47) as engine:
        assert tokens_of(engine, llama) == llama.expected
        assert engine.leader.scheduler.num_preemptions > 0
    gemma3n = answers("gemma3n")
    for layers in ((1, 5), (2, 4)):
        config = {"pp": 2, "pp_layers": layers, "fast_prefill": True, "max_batch_tokens": 70}
        with engine_of(gemma3n, **config) as engine:
            assert engine.ranks[0].fast_prefill_layers
            assert tokens_of(engine, gemma3n) == gemma3n.expected


@thorough
def test_an_abort_in_flight_frees_blocks_once_no_stage_writes_them(
    answers: Callable[[str], Answers],
) -> None:
    """Each stage takes steps in their order, so that tokens of who gets the blocks next tell nothing: what
    arrives from elsewhere would be written over (handover/test_stages.py)."""
    llama = answers("llama")
    with engine_of(llama, pp=4, max_batch_tokens=24, block_size=8, num_blocks=47) as engine:
        leader, scheduler = engine.leader, engine.leader.scheduler
        schedule, free = scheduler.schedule, leader.manager.free
        aborted: set[str] = set()
        in_flight: list[int] = []

        def abort_at_the_third_chunk() -> ScheduledBatch | None:
            batch = schedule()
            for share in batch.requests if batch is not None else ():
                if share.request_id.startswith("d") and share.num_computed_tokens == 48:
                    aborted.add(share.request_id)
                    leader.abort(share.request_id)
            return batch

        def watched_free(request_id: str) -> None:
            steps = scheduler._in_flight.values()
            in_flight.append(sum(s.request_id == request_id for states in steps for s in states))
            free(request_id)

        scheduler.schedule = abort_at_the_third_chunk  # type: ignore[method-assign]
        leader.manager.free = watched_free  # type: ignore[method-assign]
        for number in range(4):
            doomed = engine.submit(make_request(f"d{number}", llama.prompts[2], NUM_TOKENS))
            rest: list[Request] = [
                make_request(f"r{number}.{i}", p, NUM_TOKENS) for i, p in enumerate(llama.prompts)
            ]
            waiting = [engine.submit(r) for r in rest]
            assert engine.collect(doomed).finish_reason == FinishReason.ABORT
            assert [engine.collect(e).token_ids for e in waiting] == llama.expected
        engine.leader.check_integrity()
    assert len(aborted) == 4
    assert set(in_flight) == {0}
    pool = engine.leader.manager.pool
    assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("gemma3n", {"pp": 2}, r"layer 5 shares layer 2's keys and values: .*; pp_layers: \[2, 4\]"),
        ("gemma3n", {"pp": 4}, "layer 5 shares layer 2's keys and values: .*; pp: 1 to 3"),
        ("llama", {"pp": 5}, "4 layers do not fill 5 stages"),
        ("llama", {"pp": 2, "pp_layers": (1, 2)}, "stages of 1, 2 layers do not divide 4 layers"),
        ("llama", {"pp": 2, "async_scheduling": "always"}, "async_scheduling: always with pp: 2"),
    ],
)
def test_refused_by_name(
    answers: Callable[[str], Answers], model: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsupported, match=words), engine_of(answers(model), **config):
        pass
