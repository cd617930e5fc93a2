"""Requests that draft move between engines, and out to a host tier and back; tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.drafts import NGRAM, Prophet
from tests.markers import one_per, thorough
from tests.offload.node import Node
from tests.pd import Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
DRAFTS: dict[str, Any] = {"speculative": NGRAM}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("model", "tp", "changes"),
    [
        ("llama", (1, 2), ({}, DRAFTS)),
        ("llama", (2, 1), (DRAFTS, DRAFTS)),
        ("llama", (1, 1), (DRAFTS, {})),
        ("gpt_oss", (1, 1), ({"block_size": 8}, DRAFTS)),
        ("deepseek_v3", (2, 1), ({}, {"block_size": 4, **DRAFTS})),
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
    """Twice: with drafts that are mostly right, and with looked up ones."""
    found = answers(model)
    names = [f"r{i}" for i in range(len(found.prompts))]
    with Pair.open(found.path, tp=tp, changes=changes, push=push, num_blocks=200) as pair:
        for again in ("", "-again"):
            requests = [
                make_request(name + again, p, NUM_TOKENS)
                for name, p in zip(names, found.prompts, strict=True)
            ]
            with monkeypatch.context() as patch:
                if not again:
                    Prophet(dict(zip(names, found.expected, strict=True))).plant(patch)
                done = pair.complete(requests)
            assert [d.token_ids for d in done] == found.expected
            drafts = "speculative" in changes[1]
            assert all(("accepted_at" in d.info) == drafts for d in done) or again
            assert not drafts or again or all(sum(d.info["accepted_at"]) > 8 for d in done)
            pair.check_all_free()


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt_oss", marks=thorough)])
def test_swapped_requests_go_on_where_they_were(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    found = answers(model)
    order = [1, 2, 1, 0, 1]
    Prophet({f"r{i}": found.expected[n] for i, n in enumerate(order)}).plant(monkeypatch)
    settings = {"num_blocks": 24 if model == "llama" else 48, "max_batch_tokens": 64, **DRAFTS}
    requests = [make_request(f"r{i}", found.prompts[n], NUM_TOKENS) for i, n in enumerate(order)]
    with Node.open(found.path, [settings], load="never") as node:
        done = node.engines[0].complete(requests)
        assert node.engines[0].offloading.counts["swaps"] > 0
        node.settle()
    assert [d.token_ids for d in done] == [found.expected[n] for n in order]
    assert sum(sum(d.info["accepted_at"]) for d in done) > 20
