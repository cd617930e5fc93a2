"""Hybrid models, prefilled on one engine and decoded on another: only the last state moves."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.manager import KVCacheManager
from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from tests.engine.test_states import FAMILIES, NUM_TOKENS, OTHERS, Model, of_all
from tests.markers import one_per, sweep
from tests.pd import Pair, Side, make_request


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> Model:
    path = checkpoint(request.param)
    return Model(path, reference(path))


def watch(side: Side) -> list[ScheduledBatch]:
    """Every batch that the side's first rank computes from now on."""
    seen: list[ScheduledBatch] = []
    rank = side.engine.ranks[0]
    step = rank.step
    rank.step = lambda batch: (seen.append(batch), step(batch))[1]  # type: ignore[method-assign]
    return seen


SIDES: dict[tuple[int, int], tuple[int | None, int | None]] = {
    (1, 2): (8, None),
    (2, 1): (None, 64),
    (1, 1): (5, 3),
}
"""Block sizes of states by TP."""


@one_per()
@pytest.mark.parametrize(
    ("model", "tp"),
    [*itertools.product(FAMILIES, SIDES), *zip(OTHERS, itertools.cycle(SIDES), strict=False)],
    indirect=["model"],
)
def test_blocks_of_states_may_differ(model: Model, tp: tuple[int, int]) -> None:
    """D goes on from the state that arrived, and computes no token of a prompt again."""
    changes = tuple({"state_block_size": size} for size in SIDES[tp])
    with Pair.open(model.path, tp=tp, changes=changes, max_batch_tokens=24) as pair:  # type: ignore[arg-type]
        batches = watch(pair.d)
        done = pair.complete([make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
        assert [d.token_ids for d in done] == model.expected
        assert [d.info["num_recomputed_tokens"] for d in done] == [0, 0, 0]
        shares = [share for batch in batches for share in batch.requests]
        assert all(len(share.token_ids) == 1 for share in shares)
        firsts = {s.request_id: s.num_computed_tokens for s in reversed(shares)}
        assert sorted(firsts.values()) == [len(p) for p in model.prompts]
        pair.check_all_free()


def tight_settings(model: Model) -> dict[str, Any]:
    """Settings with which three requests of the longest prompt fill D's pool, and soon need more blocks."""
    num_tokens, config = len(model.prompts[2]), load_config(model.path)
    # A request of one whole block needs no other: states must have small ones, or attention beside them.
    size = None if config.mamba1 or "attention+mamba2" in {x.mixer for x in config.layers} else 4
    for block_size in range(1, 32):
        settings: dict[str, Any] = {"state_block_size": size, "block_size": block_size, "num_blocks": 50}
        engine = EngineConfig(model=str(model.path), **settings)
        manager = KVCacheManager(plan_engine(engine, config).groups, 50)
        borders = [-num_tokens % g.spec.block_size for g in manager.groups]
        if min(borders) in range(1, 2 * NUM_TOKENS):
            manager.reserve_live("r", num_tokens)
            num_reserved = 49 - manager.pool.num_free_blocks
            return settings | {"num_blocks": 3 * num_reserved + 1, "max_batch_tokens": 4}
    raise AssertionError("no block of attention ends soon after the prompt")


@sweep(3)
@one_per()
@of_all
def test_a_request_preempted_at_d_computes_all_its_tokens_there(model: Model) -> None:
    """What had arrived is gone; the prompt is computed again, from no state, and counted."""
    expected = model.long_answers[2]
    with Pair.open(model.path, tp=(1, 2), changes=({}, tight_settings(model))) as pair:
        requests = [make_request(str(i), model.prompts[2], len(expected)) for i in range(3)]
        prefilled = [pair.prefill(r) for r in requests]
        batches = watch(pair.d)
        together = threading.Event()
        pair.d.engine.leader.post(lambda: together.wait(20) and None)  # until all have come
        streams = [pair.start_decode(r, c) for r, c in zip(requests, prefilled, strict=True)]
        together.set()
        done = [pair.d.engine.collect(s, into=c) for s, c in zip(streams, prefilled, strict=True)]
        assert [(d.token_ids, d.error) for d in done] == [(expected, None)] * 3
        assert pair.d.engine.leader.scheduler.num_preemptions > 0
        computed = Counter(
            share.request_id
            for batch in batches
            for share in batch.requests
            for at in range(len(share.token_ids))
            if share.num_computed_tokens + at < len(model.prompts[2])
        )
        assert [d.info["num_recomputed_tokens"] for d in done] == [computed[r.request_id] for r in requests]
        assert computed.total() > 0
        pair.check_all_free()
