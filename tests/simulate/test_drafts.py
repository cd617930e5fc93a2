"""Engines that draft in virtual time: how often tokens are right, and what that is worth."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.costs import CostBook, EngineCosts
from rayk.costs.table import StepTable
from rayk.reports.columns import request_record
from rayk.simulate import SimOutcome, cell_arrivals, simulate_cell
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError
from tests.simulate.cells import BOOK, DISPATCH_NS, MODEL, STEP_NS, TOKEN_NS, pair_book, pair_cell, sim_cell

PROMPTS = [tuple(range(i, i + 12)) for i in range(16)]
RATES = DraftRates((0.8, 0.5, 0.2), (0.9, 0.9, 0.6))
ROOMY = {"num_blocks": 4000, "max_batch_tokens": 256, "max_seqs": 16}
"""Drafts find tokens and blocks to spare."""


def drafting(num_tokens: int = 3, **changes: Any) -> dict[str, Any]:
    return {"speculative": {"method": "ngram", "num_tokens": num_tokens}, **changes}


def simulated(
    rates: DraftRates | None, *, seed: int = 0, num: int = 16, book: CostBook = BOOK, **changes: Any
) -> SimOutcome:
    cell = sim_cell(**changes)
    return simulate_cell(cell, MODEL, cell_arrivals(cell, PROMPTS[:num]), book, seed=seed, drafts=rates)


def test_a_request_takes_what_its_steps_take() -> None:
    """A prompt of 12 tokens, then 1 + 3 + 3 + 1 output tokens: steps of 3 tokens of which both drafts are
    right, and a last one without room for any."""
    sure = DraftRates((1.0, 1.0))
    (row,) = simulated(sure, num=1, sampling={"max_tokens": 8}, **drafting(2)).requests
    steps = [STEP_NS + TOKEN_NS * n for n in (12, 3, 3, 1)]
    ends = [DISPATCH_NS + sum(steps[: n + 1]) for n in range(4)]
    assert row.token_times_ns == [ends[0], *[ends[1]] * 3, *[ends[2]] * 3, ends[3]]
    assert (row.drafted_by_position, row.accepted_by_position) == ([2, 2], [2, 2])
    plain = simulated(None, num=1, sampling={"max_tokens": 8}).requests[0]
    assert row.output_token_ids == plain.output_token_ids


def test_wrong_drafts_cost_what_they_take_and_give_a_token_a_step() -> None:
    (row,) = simulated(DraftRates((0.0, 0.0)), num=1, sampling={"max_tokens": 4}, **drafting(2)).requests
    steps = [STEP_NS + TOKEN_NS * n for n in (12, 3, 2, 1)]  # no more than are left of the request
    assert row.token_times_ns == [DISPATCH_NS + sum(steps[: n + 1]) for n in range(4)]
    assert (row.drafted_by_position, row.accepted_by_position) == ([2, 1], [0, 0])


def test_drafts_are_right_as_often_as_is_said() -> None:
    outcome = simulated(RATES, seed=4, sampling={"max_tokens": 300}, engine=ROOMY, **drafting())
    counts = [
        [sum(column) for column in zip(*(getattr(row, name) for row in outcome.requests), strict=True)]
        for name in ("drafted_by_position", "accepted_by_position")
    ]
    for drafted, accepted, share in zip(*counts, RATES.accepted, strict=True):
        assert accepted / drafted == pytest.approx(share, abs=0.03)
    steps = [len(set(row.token_times_ns)) - 1 for row in outcome.requests]
    assert counts[0][2] / sum(steps) == pytest.approx(RATES.proposed[2], abs=0.03)
    tokens = sum(len(row.output_token_ids) - 1 for row in outcome.requests)
    assert tokens / sum(steps) == pytest.approx(RATES.tokens_per_step(3), rel=0.02)
    assert request_record(outcome.requests[0])["tokens_per_step"] > 1.5


def test_draws_depend_on_the_seed_and_on_nothing_that_runs_beside() -> None:
    """More engines and fewer rows change no request's drafts."""

    def tokens_per_time(**changes: Any) -> list[list[int]]:
        engine = ROOMY | changes.pop("engine", {})
        outcome = simulated(RATES, sampling={"max_tokens": 40}, engine=engine, **drafting(), **changes)
        assert all(row.error is None for row in outcome.requests)
        return [row.accepted_by_position for row in outcome.requests]

    first = tokens_per_time()
    assert tokens_per_time() == first
    assert tokens_per_time(seed=1) != first
    assert tokens_per_time(prefill={"num_engines": 2}) == first
    assert tokens_per_time(engine={"max_seqs": 3}) == first


def test_requests_may_say_for_themselves_how_often_their_drafts_are_right() -> None:
    cell = sim_cell(sampling={"max_tokens": 9}, **drafting(2))
    rates = [DraftRates((1.0, 1.0)), None]
    arrivals = cell_arrivals(cell, PROMPTS[:2], drafts=rates)
    rows = simulate_cell(cell, MODEL, arrivals, BOOK, drafts=DraftRates((0.0, 0.0))).requests
    assert [sum(row.accepted_by_position) for row in rows] == [5, 0]
    with pytest.raises(UserError, match="nobody says how often they are right"):
        simulate_cell(cell, MODEL, cell_arrivals(cell, PROMPTS[:2], drafts=rates), BOOK)


def test_an_output_that_ends_inside_a_draft_is_cut_there() -> None:
    cell = sim_cell(sampling={"max_tokens": 30}, **drafting(3))
    arrivals = cell_arrivals(cell, PROMPTS[:1], num_output_tokens=[6], drafts=[DraftRates((1.0,) * 3)])
    (row,) = simulate_cell(cell, MODEL, arrivals, BOOK).requests
    assert (len(row.output_token_ids), row.finish_reason) == (6, "stop")
    assert row.output_token_ids[-1] == MODEL.eos_token_ids[0]
    assert row.accepted_by_position == [2, 2, 2], "those behind the end as well"


def test_steps_that_verify_have_a_table_of_their_own() -> None:
    """So have turns of an engine that drafts."""
    flat = EngineCosts.flat(STEP_NS, TOKEN_NS, host_ns=5000.0)
    costs = EngineCosts(
        key=flat.key,
        decode=flat.decode,
        prefill=flat.prefill,
        verify=StepTable(terms=("requests", "drafts"), constants=(7e5, 3e4)),
        drafting={"ngram": StepTable(terms=("one", "drafts"), constants=(1e4, 2e3))},
        host_ns=5000.0,
    )
    sure, sampling = DraftRates((1.0, 1.0)), {"max_tokens": 5}
    book = CostBook(any_engine=costs, folder="by hand")
    steps = simulated(sure, num=1, book=book, sampling=sampling, **drafting(2)).steps
    assert [(row.num_drafts, row.num_prefills) for row in steps] == [(0, 1), (2, 0), (0, 0)]
    assert [row.model_ns for row in steps] == [STEP_NS + 12 * TOKEN_NS, 760_000, STEP_NS + TOKEN_NS]
    assert [row.turn_ns - row.model_ns for row in steps] == [10_000, 14_000, 10_000]
    plain = simulated(None, num=1, book=book, sampling=sampling).steps
    assert {row.turn_ns - row.model_ns for row in plain} == {5000}


def test_decode_engines_draft_and_prefill_engines_propose_nothing() -> None:
    cell = pair_cell(sampling={"max_tokens": 10}, **drafting(2))
    arrivals = cell_arrivals(cell, PROMPTS)
    outcome = simulate_cell(cell, MODEL, arrivals, pair_book(cell), drafts=DraftRates((1.0, 1.0)))
    drafts = {
        side: sum(row.num_drafts for row in outcome.steps if row.engine.startswith(side))
        for side in ("prefill", "decode")
    }
    assert drafts == {"prefill": 0, "decode": 6 * len(PROMPTS)}
    assert all(len(row.output_token_ids) == 10 for row in outcome.requests)


def test_engines_whose_drafts_nobody_measured_are_refused() -> None:
    costs = EngineCosts.flat(STEP_NS, TOKEN_NS)
    for lacking in ({"verify": None}, {"drafting": {}}):
        book = CostBook(any_engine=EngineCosts.flat(STEP_NS, TOKEN_NS, **lacking), folder="old")
        with pytest.raises(UserError, match="no costs of") as refused:
            simulated(RATES, book=book, **drafting())
        assert (refused.value.where, "--drafts TOKENS" in refused.value.mend) == ("old", True)
        simulated(None, book=book)
    assert costs.turns_of(None) is None


def test_drafters_on_ranks_propose_as_often_right_and_take_time_in_every_turn() -> None:
    """Of three tokens, all of which are right, and none."""
    sampling, wanted = {"max_tokens": 10}, {"method": "mtp", "num_tokens": 3}
    turns = StepTable(terms=("one", "tokens"), constants=(200_000.0, 7_000.0))
    book = CostBook(any_engine=EngineCosts.flat(STEP_NS, TOKEN_NS, drafting={"mtp x3": turns}), folder="flat")
    sure = simulated(DraftRates((1.0,) * 3), num=1, book=book, sampling=sampling, speculative=wanted)
    (row,) = sure.requests
    assert (row.drafted_by_position, row.accepted_by_position) == ([2, 2, 2], [2, 2, 2])
    assert [step.num_tokens for step in sure.steps] == [12, 4, 4, 1]
    assert [step.turn_ns - step.model_ns for step in sure.steps] == [
        200_000 + 7_000 * n for n in (12, 4, 4, 1)
    ]
    wrong = simulated(DraftRates((0.0,) * 3), num=1, book=book, sampling=sampling, speculative=wanted)
    assert wrong.requests[0].output_token_ids == row.output_token_ids
    assert [step.num_tokens for step in wrong.steps] == [12, *[4] * 6, 3, 2, 1]
