"""Hand-overs between engines that cache prefixes: pushed, converted, to unlike blocks, and when they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.types.errors import KVMismatch
from rayk.types.request import FinishReason
from tests.actors.test_recompute import damage, start_decode, tampering_agents
from tests.handover.cases import NUM_TOKENS, Model, models_by_name
from tests.markers import one_per
from tests.pd import Pair, make_request

NUM_CACHED = 256
"""Of a prompt of 300 tokens: a row group."""


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


def bytes_of(done: Any) -> tuple[int, int]:
    """Moved, and held."""
    rows = done.info["transfers"]
    return sum(r.bytes for r in rows), sum(r.held_bytes for r in rows)


@pytest.mark.parametrize(
    ("name", "tp", "settings"),
    [
        ("qwen3", (1, 1), {}),
        ("qwen3", (2, 1), {"push_layers": 1}),
        ("gemma3", (1, 2), {"max_batch_tokens": 64}),
        ("falcon_h1", (1, 1), {"state_block_size": 16, "num_blocks": 200}),
    ],
    ids=["qwen3", "qwen3-2to1", "gemma3-1to2", "falcon_h1"],
)
def test_a_push_brings_what_the_prefill_engine_had_cached_and_the_decode_engine_had_not(
    models: Callable[[str], Model], name: str, tp: tuple[int, int], settings: dict[str, Any]
) -> None:
    model = models(name)
    with Pair.open(model.path, tp=tp, push=True, prefix_caching=True, **settings) as pair:
        found = []
        for number in range(2):
            (done,) = pair.complete([make_request(f"r{number}", model.prompts[2], NUM_TOKENS)])
            assert done.token_ids == model.expected[2]
            assert (done.info["num_cached_tokens"] > 200) == bool(number)
            found.append(bytes_of(done))
        assert found[0][1] == 0
        assert sum(found[1]) == found[0][0]
        # Blocks of 80 tokens, which falcon_h1's attention has, end with no row group here.
        assert (found[1][1] > 0) == (name != "falcon_h1")
        for side in (pair.p, pair.d):
            assert not side.engine.leader.manager._keys, "of requests that are over"
        pair.check_all_free()


@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_neither_engine_goes_on_from_another_salts_tokens(models: Callable[[str], Model], push: bool) -> None:
    model = models("qwen3")
    with Pair.open(model.path, push=push, prefix_caching=True, num_blocks=200) as pair:
        found = {}
        for number, salt in enumerate((None, "a", "b", None, "a", "b")):
            request = replace(make_request(f"r{number}", model.prompts[2], NUM_TOKENS), cache_salt=salt)
            (done,) = pair.complete([request])
            assert done.token_ids == model.expected[2]
            found[number] = done.info["num_cached_tokens"], bytes_of(done)[1]
        assert [found[i] for i in range(3)] == [(0, 0)] * 3
        assert len({found[i] for i in range(3, 6)}) == 1
        assert min(found[3]) > 0
        pair.check_all_free()


@pytest.mark.parametrize("blocks", [(8, 32), (32, 8), (16, 24)], ids=str)
def test_engines_with_unlike_blocks(models: Callable[[str], Model], blocks: tuple[int, int]) -> None:
    """What D holds ends where its own blocks and row groups do; 24 of them need 768 tokens."""
    model = models("qwen3")
    changes: Any = tuple({"block_size": size, "num_blocks": 2048 // size} for size in blocks)
    with Pair.open(model.path, prefix_caching=True, changes=changes) as pair:
        (first,) = pair.complete([make_request("first", model.prompts[2], NUM_TOKENS)])
        done = pair.complete([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
        assert [d.token_ids for d in (first, *done)] == [model.expected[2], *model.expected]
        cached_bytes = bytes_of(done[2])[1]
        row_bytes = bytes_of(first)[0] // -(-300 // min(blocks)) // min(blocks)
        assert cached_bytes == (NUM_CACHED * row_bytes if NUM_CACHED % blocks[1] == 0 else 0)
        pair.check_all_free()


@pytest.mark.parametrize("tp", [(1, 1), (2, 1)], ids=["1to1", "2to1"])
def test_what_is_converted_on_its_way_is_held_too(
    models: Callable[[str], Model], tp: tuple[int, int]
) -> None:
    """D keeps fp8 of P's float32: what it holds is neither moved nor converted again."""
    model = models("qwen3")
    changes: Any = ({}, {"kv_dtype": "fp8_e4m3"})
    with Pair.open(model.path, tp=tp, prefix_caching=True, changes=changes) as pair:
        done = [pair.complete([make_request(f"r{i}", model.prompts[2], NUM_TOKENS)])[0] for i in range(2)]
        assert done[0].token_ids == done[1].token_ids
        moved, cached_bytes = zip(*map(bytes_of, done), strict=True)
        assert cached_bytes[0] == 0
        assert cached_bytes[1] == moved[0] - moved[1] == moved[0] * (NUM_CACHED // 16) // 19
        pair.check_all_free()


def twice(pair: Pair, model: Model, agents: list[Any], token: int, layer: int = 1) -> Any:
    """The longest prompt is completed, and prefilled again; a byte of D's copy will be changed."""
    (first,) = pair.complete([make_request("first", model.prompts[2], NUM_TOKENS)])
    assert first.token_ids == model.expected[2]
    prefilled = pair.prefill(make_request("r", model.prompts[2], NUM_TOKENS))
    name = pair.d.extensions[0].transfer.description.agent_name
    agent = next(a for a in agents if a.name == name)
    agent.waits_for_all, agent.tamper = True, damage(pair, 0, layer, token, "r")
    return prefilled


def test_a_wrong_byte_among_those_that_moved_is_named(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, make_agent=make_agent, prefix_caching=True) as pair:
        prefilled = twice(pair, model, agents, 270)
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        late = pair.decode(request, prefilled)
        assert isinstance(late.error, KVMismatch)
        assert late.error.num_bytes_checked == (300 - NUM_CACHED) * 4 * 2 * 2 * 16 * 4
        found = pair.diagnose("r", prefilled.payload)
        assert [(m.layer, m.token) for m in found] == [(1, 270)]
        pair.d.handover.settle("r")
        pair.check_all_free()


@pytest.mark.parametrize(("token", "num_valid"), [(270, NUM_CACHED), (299, NUM_CACHED)])
def test_a_failed_transfer_goes_on_from_what_was_held(
    models: Callable[[str], Model], token: int, num_valid: int
) -> None:
    """The wrong row group is computed again, in blocks that are nobody else's: the cache stays right."""
    model = models("qwen3")
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, make_agent=make_agent, prefix_caching=True) as pair:
        prefilled = twice(pair, model, agents, token)
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        done = pair.d.engine.collect(start_decode(pair, request, prefilled))
        assert done.error is None
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        assert done.info["num_valid_tokens"] == num_valid
        (again,) = pair.complete([make_request("again", model.prompts[2], NUM_TOKENS)])
        assert again.token_ids == model.expected[2]
        pair.check_all_free()


@pytest.mark.parametrize(
    ("name", "overrides", "layer"), [("gemma3", {}, 1), ("llama4", {"attention_chunk_size": 40}, 2)]
)
def test_where_windows_are_missing_the_cache_is_asked_again(
    checkpoint: Callable[..., Path],
    reference: Callable[..., Any],
    name: str,
    overrides: dict[str, Any],
    layer: int,
) -> None:
    """Of layers with windows or chunks only the last rows arrive: a prompt whose transfer failed is computed,
    but for what the decode engine computed before. At 240 tokens a chunk of 40 ends, and none of its rows is
    wanted: what would be computed from there on lies in blocks that are held."""
    path = checkpoint(name, overrides=overrides) if overrides else checkpoint(name)
    model = Model(path, reference(path))
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, make_agent=make_agent, prefix_caching=True, num_blocks=200) as pair:
        (own,) = pair.d.engine.generate([make_request("own", model.prompts[2], NUM_TOKENS)])
        assert own.token_ids == model.expected[2]
        prefilled = twice(pair, model, agents, 299, layer)
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        done = pair.d.engine.collect(start_decode(pair, request, prefilled))
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        assert done.info["num_valid_tokens"] == 0
        assert done.info["num_recomputed_tokens"] == 300 - 288
        pair.check_all_free()


def test_leases_keep_cached_blocks_from_others(models: Callable[[str], Model]) -> None:
    """P has room for one prompt more: what is leased is neither lost nor written, whoever comes."""
    model = models("qwen3")
    with Pair.open(model.path, prefix_caching=True, changes=({"num_blocks": 46}, {})) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        for number, prompt in enumerate((model.prompts[2][::-1], model.prompts[2], model.prompts[2][1:])):
            (other,) = pair.p.engine.generate([make_request(f"o{number}", prompt, 4)])
            assert other.finish_reason is FinishReason.LENGTH
            if number == 1:
                assert other.token_ids == model.expected[2][:4]
                assert other.info["num_cached_tokens"] == 288
        done = pair.decode(request, prefilled)
        assert done.error is None
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        pair.check_all_free()


def test_many_at_once_where_blocks_are_few(models: Callable[[str], Model]) -> None:
    """Conversations share what D holds while its pool has room for two of them; some are aborted."""
    model = models("qwen3")
    with Pair.open(
        model.path, prefix_caching=True, changes=({"num_blocks": 400}, {"num_blocks": 48})
    ) as pair:
        turns = [(i, k) for k in (0, 5, 9, 14) for i in (2, 1, 2)]
        requests = [
            make_request(f"r{n}", model.prompts[i] + model.expected[i][:k], NUM_TOKENS - k)
            for n, (i, k) in enumerate(turns)
        ]
        found = [pair.prefill(r) for r in requests]
        streams = [pair.start_decode(r, c) for r, c in zip(requests, found, strict=True)]
        for number in (3, 8):
            pair.d.engine.leader.abort(f"r{number}")
        for stream, completion in zip(streams, found, strict=True):
            pair.d.engine.collect(stream, into=completion)
        for number, (completion, (i, k)) in enumerate(zip(found, turns, strict=True)):
            if number in (3, 8) and completion.finish_reason is FinishReason.ABORT:
                pair.p.handover.settle(f"r{number}")
                continue
            assert completion.error is None
            assert completion.token_ids == model.expected[i][k:]
        assert sum(bytes_of(c)[1] for c in found if "transfers" in c.info) > 0
        pair.check_all_free()
