"""Hand-overs between engines with drafters on their ranks: a model that drafts for itself foresees all that
it says if every row of its draft layers came over, and came right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.types.speculative import SpeculativeConfig
from tests.handover.cases import NUM_TOKENS, Model, models_by_name
from tests.markers import one_per, thorough
from tests.offload.node import Node
from tests.pd import Pair, make_request


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


def of_itself(model: Model, tp: int | None = None, draft_kv: str = "auto") -> dict[str, object]:
    """Settings of an engine whose model drafts for itself."""
    drafts = SpeculativeConfig(method="draft", model=str(model.path), num_tokens=4, tp=tp, draft_kv=draft_kv)
    return {"speculative": drafts}


def complete(pair: Pair, model: Model) -> tuple[int, int]:
    """Run all prompts at once; returns how many tokens D drafted, and how many it accepted."""
    done = pair.complete([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
    assert [d.token_ids for d in done] == model.expected
    pair.check_all_free()
    drafting = pair.d.engine.leader.scheduler.drafting
    assert drafting is not None
    return drafting.counts.num_draft_tokens, drafting.counts.num_accepted_tokens


@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("name", "tp", "draft_tp", "layouts"),
    [
        ("qwen3", (1, 1), (None, None), ("auto", "auto")),
        ("qwen3", (2, 1), (2, None), ("LBNHC", "BLHNC")),
        ("qwen3", (1, 2), (None, 2), ("auto", "auto")),
        ("llama", (2, 2), (None, 2), ("auto", "auto")),
        ("deepseek_v3", (2, 1), (2, None), ("auto", "auto")),
        ("gpt_oss", (1, 2), (None, 2), ("auto", "auto")),
    ],
)
def test_all_is_foreseen_after_a_hand_over(
    models: Callable[[str], Model],
    name: str,
    tp: tuple[int, int],
    draft_tp: tuple[int | None, int | None],
    layouts: tuple[str, str],
    push: bool,
) -> None:
    """Prompts are prefilled in chunks, of which the last one's rows take the token that P sampled."""
    model = models(name)
    changes = tuple(of_itself(model, own) for own in draft_tp)
    settings = {"num_blocks": 160, "max_batch_tokens": 64, "changes": changes}
    with Pair.open(model.path, tp=tp, layouts=layouts, push=push, **settings) as pair:
        drafted, accepted = complete(pair, model)
        assert drafted == accepted > 0
        counts = pair.p.engine.leader.scheduler.drafting.counts  # type: ignore[union-attr]
        assert counts.num_draft_tokens == 0, "P hands requests over with their first token"


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_nothing_is_proposed_where_rows_of_the_prompt_lack(
    models: Callable[[str], Model], push: bool
) -> None:
    model = models("qwen3")
    changes = ({}, of_itself(model, draft_kv="none"))
    with Pair.open(model.path, push=push, num_blocks=100, changes=changes) as pair:
        assert complete(pair, model) == (0, 0)
        drafting = pair.d.engine.leader.scheduler.drafting
        assert drafting is not None
        assert drafting.num_undrafted == len(model.prompts)


@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("name", "tp", "draft_tp", "max_batch_tokens"),
    [
        ("qwen3", (1, 1), None, 512),
        ("qwen3", (1, 1), None, 30),
        ("qwen3", (2, 2), 2, 64),
        ("deepseek_v3", (1, 2), None, 512),
        ("gpt_oss", (2, 1), None, 64),
    ],
)
def test_a_drafter_of_d_alone_computes_its_rows_of_the_prompt(
    models: Callable[[str], Model],
    name: str,
    tp: tuple[int, int],
    draft_tp: int | None,
    max_batch_tokens: int,
    push: bool,
) -> None:
    """What it proposes from then on is all foreseen. With few tokens a step, that begins some steps late."""
    model = models(name)
    changes = ({}, of_itself(model, draft_tp))
    settings = {"num_blocks": 160, "max_batch_tokens": max_batch_tokens, "changes": changes}
    with Pair.open(model.path, tp=tp, push=push, **settings) as pair:
        done = pair.complete([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
        assert [d.token_ids for d in done] == model.expected
        assert {d.info["draft_kv"] for d in done} == {"recomputed"}
        counted = [d.info["num_draft_rows_recomputed"] for d in done]
        assert all(n >= len(p) for n, p in zip(counted, model.prompts, strict=True))
        drafting = pair.d.engine.leader.scheduler.drafting
        assert drafting is not None
        assert drafting.counts.num_draft_tokens == drafting.counts.num_accepted_tokens > 0
        pair.check_all_free()


def test_rows_that_d_computed_later_are_found_with_its_prefixes(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    settings = {"num_blocks": 120, "prefix_caching": True, "changes": ({}, of_itself(model))}
    with Pair.open(model.path, **settings) as pair:
        manager = pair.d.engine.leader.manager
        (done,) = pair.complete([make_request("r", model.prompts[2], NUM_TOKENS)])
        assert (done.token_ids, done.info["draft_kv"]) == (model.expected[2], "recomputed")
        assert manager.match("look", model.prompts[2], 299) == 288
        assert manager.num_undrafted_tokens == 0
        manager.free("look")
        (done,) = pair.complete([make_request("again", model.prompts[2], NUM_TOKENS)])
        assert done.token_ids == model.expected[2]
        drafting = pair.d.engine.leader.scheduler.drafting
        assert drafting is not None
        assert drafting.counts.num_draft_tokens == drafting.counts.num_accepted_tokens > 0
        pair.check_all_free()


@pytest.mark.parametrize("num_blocks", [14, 20])
def test_what_lacked_is_right_after_a_preemption(models: Callable[[str], Model], num_blocks: int) -> None:
    """D preempts requests whose rows it has computed, or not all of them yet, and computes all again."""
    model = models("qwen3")
    settings = {"num_blocks": 100, "max_batch_tokens": 64}
    changes = ({}, of_itself(model) | {"num_blocks": num_blocks, "max_batch_tokens": 40})
    prompts = [[*model.prompts[1], 5, i] for i in range(6)]
    with Pair.open(model.path, **settings, changes=({}, {"num_blocks": 100})) as pair:
        plain = pair.complete([make_request(f"p{i}", p, NUM_TOKENS) for i, p in enumerate(prompts)])
    with Pair.open(model.path, **settings, changes=changes) as pair:
        done = pair.complete([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(prompts)])
        assert [d.token_ids for d in done] == [p.token_ids for p in plain]
        scheduler = pair.d.engine.leader.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.drafting is not None
        counts = scheduler.drafting.counts
        assert counts.num_draft_tokens == counts.num_accepted_tokens > 0
        pair.check_all_free()


def test_a_drafter_of_p_alone_changes_nothing(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    with Pair.open(model.path, num_blocks=100, changes=(of_itself(model), {})) as pair:
        done = pair.complete([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
        assert [d.token_ids for d in done] == model.expected
        pair.check_all_free()


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=thorough)])
def test_swapped_requests_go_on_where_they_were(models: Callable[[str], Model], name: str) -> None:
    """What was swapped out with rows of draft layers is foreseen after it, too."""
    model, order = models(name), [1, 2, 1, 0, 1]
    settings = {"num_blocks": 24 if name == "llama" else 48, "max_batch_tokens": 64, **of_itself(model)}
    requests = [make_request(f"r{i}", model.prompts[n], NUM_TOKENS) for i, n in enumerate(order)]
    with Node.open(model.path, [settings], load="never") as node:
        done = node.engines[0].complete(requests)
        assert node.engines[0].offloading.counts["swaps"] > 0
        node.settle()
        drafting = node.engines[0].engine.leader.scheduler.drafting
        assert drafting is not None
        assert drafting.counts.num_accepted_tokens == drafting.counts.num_draft_tokens > 0
    assert [one.token_ids for one in done] == [model.expected[n] for n in order]
