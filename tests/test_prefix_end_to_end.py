"""Prompts that share prefixes, of every family, on one engine and on two: tokens equal those of transformers.
What an engine has in its prefix cache is not computed, and what the decode engine has is not moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.kv.groups import KVCacheGroup
from rayk.oracle.tiny import HYBRID as WINDOWS_ASIDE
from rayk.transfer.handshake import ROWS_PER_GROUP, row_group_blocks
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.families import ATTENTION, GROUPED, HYBRID
from tests.markers import one_per, slow
from tests.pd import NAN_POISON, Pair, make_request
from tests.spec_models import GROUP_MODELS

STATES = {"state_block_size": 16, "block_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*ATTENTION, *HYBRID) if family not in GROUPED},
    "qwen3-hybrid": ("qwen3", {"overrides": dict(WINDOWS_ASIDE)}),
    **{
        name: (family, {"overrides": dict(values)} if values else {})
        for name, (family, values) in GROUP_MODELS.items()
    },
}
CHUNKS = (7, 64, 512)
MORE = 20
"""Output tokens with which a conversation goes on."""


class Cell(NamedTuple):
    """One model on one engine, or on two."""

    model: str
    tp: tuple[int, ...]
    chunk: int
    settings: dict[str, Any]


def cells() -> list[Any]:
    """Every model on one engine and on two; TP sizes, chunks and settings take turns. In `make test-all` a
    model meets one of both."""
    found = []
    chunks, tps = cycle(CHUNKS), cycle(((1,), (1, 2), (2,), (2, 1)))
    switches = cycle(({}, {"hybrid_kv": False}, {"fast_prefill": True}))
    for index, model in enumerate(MODELS):
        for turn in range(2):
            tp = next(t for t in tps if len(t) == 1 + (index + turn) % 2)
            settings: dict[str, Any] = {"num_blocks": 400, **next(switches)}
            settings |= STATES if MODELS[model][0] in HYBRID else {}
            cell = Cell(model, tp, next(chunks), settings)
            name = f"{model}-{'to'.join(map(str, tp))}-chunk{cell.chunk}"
            found.append(pytest.param(cell, id=name, marks=(slow,) if turn else ()))
    return found


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


def longest(groups: Sequence[KVCacheGroup], num_known: int, num_tokens: int) -> int:
    """What an engine that lost nothing has of a prompt: blocks of all groups end there."""
    unit = math.lcm(*(g.spec.block_size for g in groups))
    return min(num_known, num_tokens - 1) // unit * unit


@one_per("cell.model")
@pytest.mark.parametrize("cell", cells())
def test_tokens_are_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    settings = {"max_batch_tokens": cell.chunk, "prefix_caching": True, **cell.settings}
    if len(cell.tp) == 1:
        config = EngineConfig(model=str(path), tp=cell.tp[0], **settings)
        with ThreadEngine(config, poison=NAN_POISON) as engine:
            groups = engine.ranks[0].plan.groups
            converse(lambda requests: engine.generate(requests), prompts, expected, groups)
            engine.leader.check_integrity()
            pool = engine.leader.manager.pool
            assert pool.num_free_blocks == pool.num_blocks - 1
        return
    with Pair.open(path, tp=cell.tp, **settings) as pair:  # type: ignore[arg-type]
        groups = pair.p.engine.ranks[0].plan.groups
        converse(pair.complete, prompts, expected, groups, is_pair=True)
        pair.check_all_free()


def converse(
    complete: Callable[[list[Any]], list[RequestResult]],
    prompts: list[list[int]],
    expected: list[list[int]],
    groups: Sequence[KVCacheGroup],
    *,
    is_pair: bool = False,
) -> None:
    """The longest prompt, the same again beside others, and then behind a part of what was answered."""
    (first,) = complete([make_request("first", prompts[2], NUM_TOKENS)])
    assert first.token_ids == expected[2]
    assert first.info["num_cached_tokens"] == 0
    again = [make_request(f"again{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    # A decode engine's tokens are in its own cache, the prefill engine has the prompt.
    num_known = len(prompts[2]) if is_pair else len(prompts[2]) + NUM_TOKENS - 1
    again.append(make_request("more", prompts[2] + expected[2][:MORE], NUM_TOKENS - MORE))
    done = complete(again)
    assert [d.token_ids for d in done] == [*expected, expected[2][MORE:]]
    for completion, request in zip(done[2:], again[2:], strict=True):
        num_cached = longest(groups, num_known, len(request.prompt_token_ids))
        assert completion.info["num_cached_tokens"] == num_cached
        # A row group that is held whole lies in whole blocks.
        sees_all = any(lane.kind in ("full", "mla") for g in groups for lane in g.lanes)
        if num_cached and is_pair and sees_all and row_group_blocks(groups) == ROWS_PER_GROUP:
            assert sum(row.held_bytes for row in completion.info["transfers"]) > 0


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
        whole, cached = moved[0][0], moved[1][1]
        assert moved == [(whole, 0), (whole - cached, cached), (whole - cached, cached)]
        # The row groups that are held whole, of 19 blocks.
        assert cached == whole * (ROWS_PER_GROUP // 16) // 19
        pair.check_all_free()
