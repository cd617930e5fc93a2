"""Models with recurrent states that draft, between engines: handed over, swapped out and back, and gone on
from by others. Tokens are transformers', which undrafted engines give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.drafts import NGRAM, Prophet
from tests.markers import one_per, sweep, thorough
from tests.offload.node import Node
from tests.offload.test_node_pairs import state_block
from tests.offload.test_swaps import crowd, pool_for
from tests.pd import Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {}) for family in ("falcon_h1", "qwen3_next", "jamba", "mamba2")
}
"""Mamba2 beside attention; a gated delta net, and Mamba1, between layers of attention; Mamba2 alone."""
DRAFTS: dict[str, Any] = {"speculative": NGRAM}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@sweep(5)
@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("model", "tp", "changes"),
    [
        ("falcon_h1", (2, 1), ({}, {"state_block_size": 3, **DRAFTS})),
        ("falcon_h1", (1, 2), (DRAFTS, DRAFTS)),
        ("qwen3_next", (1, 2), ({"state_block_size": 16}, DRAFTS)),
        ("qwen3_next", (2, 1), (DRAFTS, {})),
        ("jamba", (2, 1), ({}, {"state_block_size": 8, **DRAFTS})),
        ("mamba2", (1, 2), (DRAFTS, {"state_block_size": 1, **DRAFTS})),
    ],
)
def test_either_side_may_draft(
    answers: Callable[[str], Answers],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    tp: tuple[int, int],
    changes: Any,
    push: bool,
) -> None:
    """Twice: with drafts that are mostly right, and with looked up ones, which are mostly wrong. What one
    side has behind its pool, the other need not have."""
    found = answers(model)
    names = [f"r{i}" for i in range(len(found.prompts))]
    with Pair.open(found.path, tp=tp, changes=changes, push=push, num_blocks=400) as pair:
        for again in ("", "-again"):
            asked = zip(names, found.prompts, strict=True)
            requests = [make_request(name + again, p, NUM_TOKENS) for name, p in asked]
            with monkeypatch.context() as patch:
                if not again:
                    Prophet(dict(zip(names, found.expected, strict=True))).plant(patch)
                done = pair.complete(requests)
            assert [d.token_ids for d in done] == found.expected
            if "speculative" in changes[1] and not again:
                assert all(sum(d.info["accepted_at"]) > 8 for d in done)
            pair.check_all_free()


@thorough
@pytest.mark.parametrize(("model", "size"), [*((m, 16) for m in MODELS), ("falcon_h1", None)])
def test_swapped_requests_go_on_where_they_were(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str, size: int | None
) -> None:
    """More requests than fit, at two ranks; every other one drafts, and needs more blocks while others still
    hold theirs. Nothing is computed a second time: what came back is what had gone, though drafts were
    rejected in the step before."""
    found = answers(model)
    own = {"tp": 2, "layout": "LBNHC", "state_block_size": size}
    first = 1 if size is None else 0
    asked = crowd(found, 9, first)
    Prophet({f"r{i}": answer for i, (_, answer) in enumerate(asked) if i % 2}).plant(monkeypatch)
    own |= {"num_blocks": pool_for(found, own, 8, first), **DRAFTS}
    with Node.open(found.path, [own], load="never") as node:
        engine = node.engines[0]
        done = engine.complete(
            [make_request(f"r{i}", prompt, NUM_TOKENS) for i, (prompt, _) in enumerate(asked)]
        )
        assert [d.token_ids for d in done] == [answer for _, answer in asked]
        node.settle()
        assert engine.offloading.counts["swaps"] > 0, engine.offloading.status()
        assert sum(d.info["num_recomputed_tokens"] for d in done) == 0
        assert sum(sum(d.info.get("accepted_at", ())) for d in done) > len(done)


@thorough
@pytest.mark.parametrize("model", MODELS)
def test_others_go_on_from_what_a_drafted_request_stored(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """An engine at two ranks drafts, and stores its states; another takes them from the tier, those of the
    output too, and drafts on. Blocks of states end inside of drafts."""
    found = answers(model)
    prompt, expected = found.prompts[2], found.expected[2]
    size = state_block(model, found.path, 16)
    sides = ({"tp": 2, "state_block_size": size, **DRAFTS}, {"layout": "LBNHC", **DRAFTS})
    num_known = NUM_TOKENS - 3
    Prophet({"first": expected, "second": expected[num_known:]}).plant(monkeypatch)
    with Node.open(found.path, sides, common={"num_blocks": 160}) as node:
        producer, consumer = node.engines
        (first,) = producer.complete([make_request("first", prompt, NUM_TOKENS)])
        assert first.token_ids == expected
        assert sum(first.info["accepted_at"]) > 8
        node.settle()
        longer = prompt + expected[:num_known]
        (second,) = consumer.complete([make_request("second", longer, NUM_TOKENS - num_known)])
        assert second.token_ids == expected[num_known:]
        assert second.info["num_host_tokens"] > len(prompt) - (size or 0), "its last state is the tier's"
        node.settle()
