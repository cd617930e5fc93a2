"""Plans whose engines draft: by arithmetic on tables made by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayk.costs import EngineCosts, step_of
from rayk.costs.book import CostBook
from rayk.costs.hull import Hull
from rayk.costs.table import StepTable
from rayk.planner.drafts import counted_rates, rates_of, request_rates, settings_of
from rayk.planner.estimate import EngineSide
from rayk.reports.plans import PlanResult
from rayk.specs.plan import load_plan
from rayk.specs.plan_drafts import DraftSearch
from rayk.specs.vllm_drafts import draft_settings
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import SpecError
from rayk.types.speculative import SpeculativeConfig
from tests.planner.plans import MS, book, make_plan, plan_spec

DRAFTS = {"num_tokens": [2], "acceptance": 0.7, "proposed": 1.0}
TOKENS = 1 + 0.7 + 0.49


def table(**ms: float) -> StepTable:
    return StepTable(terms=tuple(ms), constants=tuple(n * MS for n in ms.values()))


def drafting_book(verify: StepTable, *, decode_ms: float = 10.0, turn_ms: float = 0.0) -> CostBook:
    """Decode steps take 10 ms, whatever they are of, prompts a tenth of a ms per token."""
    found = book(decode={"one": decode_ms}, prefill={"one": 1.0, "tokens": 0.1})
    assert found.any_engine is not None
    engine = replace(found.any_engine, verify=verify, drafting={"ngram": table(one=turn_ms)})
    return replace(found, any_engine=engine)


def planned(folder: Path, costs: CostBook, *, drafts: Any = None, **changes: Any) -> PlanResult:
    search = {"mode": "aggregated", "speculative": DRAFTS | (drafts or {})}
    wanted: dict[str, Any] = {
        "cpu": {"slots": 1},
        "traffic": {"input_tokens": 32, "output_tokens": 61, "num_requests": 60, "rate": 0.5},
        "slo": {"ttft": "2s", "tpot": "40ms"},
        "search": search,
    } | changes
    return make_plan(folder, costs, **wanted).run()


def test_drafts_that_pay_are_chosen_and_the_command_has_them(tmp_path: Path) -> None:
    """A step of drafts takes 12 ms and gives 2.19 tokens, and a token may take 9 ms: a plain step's takes
    10."""
    found = planned(tmp_path, drafting_book(table(one=12.0)), slo={"ttft": "2s", "tpot": "9ms"})
    assert found.is_met
    best = found.plans.iloc[0]
    assert (best["num_drafts"], best["is_best"]) == (2, True)
    assert best["tokens_per_step"] == pytest.approx(TOKENS, rel=0.05)
    assert best["break_even"] == pytest.approx(1.2)
    assert best["tpot_ms_p50"] == pytest.approx(12 / TOKENS, rel=0.1)
    words = shlex.split(found.command)
    option = words[words.index("--speculative-config") + 1]
    assert draft_settings(option) == {"method": "ngram", "num_tokens": 2}
    (without,) = [row for row in found.facts["sensitivity"] if row["change"] == "no drafts"]
    assert without["tpot_ms_p50"] == pytest.approx(10)
    assert not without["met"]
    (told,) = [text for text in found.why if text.startswith("Drafts")]
    assert "from 1.20 on they pay" in told
    assert f"{without['tpot_ms_p50'] / best['tpot_ms_p50']:.2f} times as fast" in told
    assert "drafting 2 tokens" in found.facts["best_text"]


def test_drafts_that_do_not_pay_are_not_chosen_and_why_is_told(tmp_path: Path) -> None:
    """A step of drafts takes 30 ms, what the host makes of it included."""
    found = planned(tmp_path, drafting_book(table(one=28.0), turn_ms=2.0))
    assert set(found.plans["num_drafts"]) == {0, 2}
    assert found.plans.iloc[0]["num_drafts"] == 0
    assert "--speculative-config" not in found.command
    (told,) = [text for text in found.why if text.startswith("Drafts")]
    assert "from 3.00 on they pay" in told
    ratio = float(told.partition("comes ")[2].partition(" times")[0])
    assert ratio == pytest.approx(10 * TOKENS / 30, rel=0.1)


def test_plans_without_drafts_to_try_are_as_before(tmp_path: Path) -> None:
    found = planned(tmp_path, drafting_book(table(one=12.0)), search={"mode": "aggregated"})
    assert found.plans["num_drafts"].isna().all()
    assert not any("raft" in text for text in found.why)


@pytest.mark.parametrize(
    ("lacking", "why"), [({"verify": None}, "steps with drafts"), ({"drafting": {}}, "drafter ngram")]
)
def test_drafts_that_nobody_measured_are_left_out_and_told_of(
    tmp_path: Path, lacking: dict[str, Any], why: str
) -> None:
    costs = drafting_book(table(one=12.0))
    assert costs.any_engine is not None
    found = planned(tmp_path, replace(costs, any_engine=replace(costs.any_engine, **lacking)))
    assert set(found.plans["num_drafts"]) == {0}
    assert any(why in note and "--drafts" in note for note in found.facts["search"]["notes"])


def test_drafters_on_ranks_are_left_out_by_name(tmp_path: Path) -> None:
    found = planned(tmp_path, drafting_book(table(one=12.0)), drafts={"method": "mtp"})
    assert set(found.plans["num_drafts"]) == {0}
    assert any(note.startswith("drafts by mtp") for note in found.facts["search"]["notes"])


def test_steps_with_more_drafts_than_were_measured_are_refused(tmp_path: Path) -> None:
    narrow = replace(table(one=1.0), hull=Hull(bounds={"num_tokens": (0, 2)}))
    found = planned(tmp_path, drafting_book(narrow))
    refused = found.plans[found.plans["num_drafts"] == 2]
    assert len(refused)
    assert refused["why_not"].str.startswith("outside of what was measured").all()
    assert refused["why_not"].str.contains("num_tokens 3 is outside of 0 to 2").all()
    assert found.plans.iloc[0]["num_drafts"] == 0


def side(rates: DraftRates, num_tokens: int) -> EngineSide:
    """An engine whose steps with drafts take 3 ms, 0.2 ms a token and 1 us a pair more than others."""
    flat = EngineCosts.flat(2 * MS, 0.05 * MS)
    costs = replace(
        flat,
        verify=table(one=3.0, tokens=0.2, pairs=0.001),
        drafting={"ngram": table(one=0.5, drafts=0.03)},
    )
    return EngineSide(
        costs=costs,
        windows=(),
        max_batch_tokens=256,
        max_places=8,
        runs_ahead=False,
        speculative=SpeculativeConfig(method="ngram", num_tokens=num_tokens),
        rates=rates,
    )


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("proposed", [0.3, 1.0])
def test_a_mean_step_is_that_of_all_that_may_be_proposed(num_requests: int, proposed: float) -> None:
    """Each request has a draft of 3 tokens or none: over every outcome, by hand."""
    of = side(DraftRates((0.5, 0.4, 0.1), (proposed,) * 3), 3)
    expected = 0.0
    for outcome in product((3, 0), repeat=num_requests):
        weight = prod(proposed if n else 1 - proposed for n in outcome)
        drafts, tokens = sum(outcome), num_requests + sum(outcome)
        pairs = sum((1 + n) * 50 + (1 + n) * (2 + n) / 2 for n in outcome)
        turn = 0.5 + 0.03 * drafts
        step = 3 + 0.2 * tokens + 0.001 * pairs if drafts else 2 + 0.05 * tokens
        expected += weight * (turn + step)
    assert of.decode_ns(num_requests, 50) / MS == pytest.approx(expected, rel=0.01)
    assert of.tokens_per_step == pytest.approx(1 + proposed)
    plain = replace(of, speculative=None)
    assert plain.decode_ns(num_requests, 50) == 2 * MS + 0.05 * MS * num_requests
    assert plain.tokens_per_step == 1
    assert step_of([(4, 50)] * num_requests, num_drafts=3).kind == "verify"


def row(drafted: Any, accepted: Any, steps: Any, num_tokens: int) -> dict[str, Any]:
    return {
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
        "num_decode_steps": steps,
        "output_token_ids": np.zeros(num_tokens, dtype=np.int64),
    }


def test_rates_of_requests_that_were_measured() -> None:
    first = row(np.array([8, 4]), np.array([6, 1]), 10.0, 18)
    nothing = row(None, None, float("nan"), 11)  # of an engine that found no n-gram: a step for each token
    assert request_rates(first) == DraftRates((0.75, 0.25), (0.8, 0.4))
    assert request_rates(nothing).share_drafted == 0
    assert counted_rates([first, nothing]) == DraftRates((0.75, 0.25), (0.4, 0.2))
    assert counted_rates([first]).tokens_per_step(2) == pytest.approx((18 - 1) / 10)


def test_what_a_plan_says_of_acceptance() -> None:
    chance = DraftSearch(num_tokens=[1, 3], acceptance=0.5, proposed=0.6)
    assert rates_of(chance) == DraftRates((0.5, 0.25, 0.125), (0.6, 0.6, 0.6))
    listed = DraftSearch(method="mtp", num_tokens=2, acceptance=[0.9, 0.6, 0.5])
    assert rates_of(listed) == DraftRates((0.9, 0.6, 0.5), (1.0, 1.0, 1.0))
    assert settings_of(chance, 3) == SpeculativeConfig(method="ngram", num_tokens=3)
    assert settings_of(chance, 0) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"acceptance": [0.5, 0.6], "proposed": 1.0}, "grows from one position to the next"),
        (
            {"acceptance": [0.5], "proposed": 1.0, "num_tokens": [1, 2]},
            "1 positions, and num_tokens is up to 2",
        ),
        ({"acceptance": 0.5}, "how often do n-grams come again"),
        ({"acceptance": "runs/monday", "proposed": 0.5}, "the run of `acceptance` tells it"),
        ({"proposed": 0.5}, "acceptance"),
        ({"acceptance": 1.5, "proposed": 0.5}, "acceptance"),
        ({"acceptance": 0.5, "proposed": 0.5, "num_tokens": [0]}, "num_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        load_plan(plan_spec(tmp_path, search={"speculative": {"num_tokens": [2], **given}}))
