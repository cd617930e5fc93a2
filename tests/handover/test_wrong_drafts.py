"""A drafter that goes on from wrong KV of a prompt: tokens stay right, fewer drafts are accepted, and what is
proposed tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.experiments.drafted import ProposalComparison, compare_proposals, parting_in_words
from rayk.handover.planted import PlantedFault
from rayk.handover.planted_drafts import SpoiledDrafts
from rayk.types.config import EngineConfig
from rayk.types.fault_table import DRAFT_POINTS
from rayk.types.rows import RequestRow
from tests.handover.cases import NUM_TOKENS, Model, models_by_name
from tests.handover.test_drafters import of_itself
from tests.markers import one_per, sweep
from tests.pd import HANG_S, NAN_POISON, Pair, make_request


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


def requests(model: Model) -> list[Any]:
    return [make_request(f"cell/{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)]


def rows(model: Model, done: Sequence[RequestResult]) -> list[RequestRow]:
    """As the coordinator makes them."""
    return [
        RequestRow(
            cell_id="cell",
            repeat=0,
            request_id=f"cell/{index}",
            prompt_index=index,
            prompt_token_ids=list(prompt),
            output_token_ids=list(one.token_ids),
            proposals=[(at, list(tokens)) for at, tokens in one.info["proposals"]],
            draft_kv=one.info["draft_kv"],
        )
        for index, (prompt, one) in enumerate(zip(model.prompts, done, strict=True))
    ]


def shares(done: Sequence[RequestResult]) -> list[float]:
    """How much was accepted of each request's drafts."""
    return [sum(one.info["accepted_at"]) / sum(one.info["drafted_at"]) for one in done]


def compared(row: RequestRow, other: RequestRow) -> ProposalComparison:
    return compare_proposals(row, other, from_tokens=True)


def aggregated(model: Model, tp: int, draft_tp: int | None) -> list[RequestRow]:
    config = EngineConfig(model=str(model.path), tp=tp, num_blocks=100, **of_itself(model, draft_tp))  # type: ignore[arg-type]
    with ThreadEngine(config, poison=NAN_POISON, timeout_s=HANG_S) as engine:
        done = engine.generate(requests(model))
    assert shares(done) == [1.0] * len(done)
    return rows(model, done)


@sweep(5)
@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(("tp", "draft_tp"), [((1, 1), None), ((1, 2), None), ((2, 2), 2)])
@pytest.mark.parametrize("point", [None, *DRAFT_POINTS])
def test_wrong_drafts_are_told_by_what_is_proposed(
    models: Callable[[str], Model],
    point: str | None,
    tp: tuple[int, int],
    draft_tp: int | None,
    push: bool,
) -> None:
    model = models("qwen3")
    alone = aggregated(model, tp[1], draft_tp)
    changes = (of_itself(model, draft_tp), of_itself(model, draft_tp))
    with Pair.open(model.path, tp=tp, push=push, num_blocks=100, changes=changes) as pair:
        if point is not None:
            fault = PlantedFault(kind="wrong_drafts", point=point, request=1)
            for extension in pair.d.extensions:
                extension._spoiling = SpoiledDrafts(extension._views, [fault])
        done = pair.complete(requests(model))
        assert [one.token_ids for one in done] == model.expected, "drafts are verified"
        assert {one.info["draft_kv"] for one in done} == {"moved"}
        pair.check_all_free()
    found = [compared(a, b) for a, b in zip(rows(model, done), alone, strict=True)]
    assert all(one.num_compared >= 10 for one in found)
    assert not found[0].partings
    assert not found[2].partings, "the fault names the second request"
    if point is None:
        assert not found[1].partings
        assert shares(done) == [1.0] * len(done)
        return
    assert len(found[1].partings) > found[1].num_compared / 4
    assert shares(done)[::2] == [1.0, 1.0]
    assert shares(done)[1] < 0.8
    row = rows(model, done)[1]
    text = parting_in_words(row, found[1].partings[0], len(found[1].partings), found[1].num_compared)
    assert text.startswith("request 1: for output token ")
    assert "its KV of the prompt came over" in text


def test_what_is_recomputed_is_proposed_as_by_one_engine(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    alone = aggregated(model, 1, None)
    with Pair.open(model.path, num_blocks=100, changes=({}, of_itself(model))) as pair:
        done = pair.complete(requests(model))
        pair.check_all_free()
    for a, b in zip(rows(model, done), alone, strict=True):
        found = compared(a, b)
        assert found.num_compared >= 10
        assert not found.partings
