"""Paced cells are judged by their pace and by the rule of their tokens, without a reference."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.judge import CellJudge
from rayk.experiments.paced import expected_tokens, judge_pace, late_p99_share
from rayk.specs import Cell, load_spec, plan_cells
from rayk.types.rows import CellRow, RequestRow
from tests.specs.models import decoder, spec

PROMPTS = [[5, 6, 7], [8, 9]]


def paced_cell() -> Cell:
    engine = {"compute": "paced", "costs": "costs"}
    planned = plan_cells(load_spec(spec(engine=engine, sampling={"max_tokens": 6})), decoder(), device="cpu")
    return planned[0][0]


def pace(**changes: Any) -> dict[str, Any]:
    """Of an engine with 100 steps, of which two came as late as its 99th percentile."""
    late = changes.get("late_p99_share", 0.05)
    kept = {
        "worst_shares": [late, late, *[0.01] * 98],
        "factor": 1.0,
        "num_steps": 100,
        "late_p50_share": 0.01,
        "late_p99_share": 0.05,
        "num_outside_hull": 0,
        "machine_busy_share": 0.4,
    }
    return kept | changes


def outcome(*paces: dict[str, Any], tokens: dict[int, list[int]] | None = None) -> CellOutcome:
    tokens = tokens or {}
    rows = [
        RequestRow(
            cell_id="c",
            repeat=0,
            request_id=f"c/{i}",
            prompt_index=i,
            prompt_token_ids=PROMPTS[i],
            output_token_ids=found,
        )
        for i, found in tokens.items()
    ]
    facts: dict[str, dict[str, Any]] = {f"prefill{i}": {"pace": p} for i, p in enumerate(paces)}
    return CellOutcome(requests=rows, facts=facts)


@pytest.mark.parametrize(
    ("paces", "reason"),
    [
        ([pace()], ""),
        ([pace(late_p99_share=0.1, machine_busy_share=0.7)], ""),
        ([pace(), pace(late_p99_share=0.31)], r"p99 31% of a step, most at prefill1.*engine.pace: 3.1 would"),
        ([pace(machine_busy_share=0.9, factor=2.0)], r"busy 90%.*engine.pace: 2.6 would do"),
        ([pace(late_p99_share=0.2, machine_busy_share=0.98)], r"p99 20%.*busy 98%.*engine.pace: 2 would do"),
        ([pace(num_outside_hull=3), pace(num_outside_hull=1200)], "^1,203 steps are unlike"),
        ([], "no engine lived to tell"),
    ],
)
def test_why_times_are_none(paces: list[dict[str, Any]], reason: str) -> None:
    measured, told = judge_pace([outcome(*paces)])
    assert bool(told) == bool(reason)
    if reason:
        assert re.search(reason, told), told
    if paces:
        assert measured["late_p99_share"] == max(p["late_p99_share"] for p in paces)
        assert measured["machine_busy_share"] == max(p["machine_busy_share"] for p in paces)


def test_lateness_is_that_of_all_steps() -> None:
    """As numpy finds it among all of them, whichever engine took them."""
    rng = np.random.default_rng(5)
    for num_engines in (1, 2, 7):
        shares = [rng.exponential(0.03, int(rng.integers(1, 400))) for _ in range(num_engines)]
        paces = [{"num_steps": len(s), "worst_shares": sorted(s, reverse=True)[:50]} for s in shares]
        whole = float(np.percentile(np.concatenate(shares), 99, method="higher"))
        assert late_p99_share(paces) == whole
    one_hiccup = [pace(worst_shares=[2.0, *[0.01] * 99]), *[pace(worst_shares=[0.01] * 100)] * 3]
    assert late_p99_share(one_hiccup) == 0.01, "a step among 400"


def test_a_machine_that_does_not_tell_is_no_busy_one() -> None:
    measured, told = judge_pace([outcome(pace(machine_busy_share=None))])
    assert (told, set(measured)) == ("", {"late_p99_share"})


def judged(*outcomes: CellOutcome) -> CellRow:
    cell = paced_cell()
    judge = CellJudge("no-such-checkpoint", decoder(), answers=None)  # type: ignore[arg-type]
    assert not judge.needs_reference(cell)
    judge.prepare(cell, PROMPTS)  # asks nobody
    return judge.judge(replace(cell, checks=("tokens",)), PROMPTS, outcomes)


def test_tokens_are_those_of_the_rule() -> None:
    right = expected_tokens(paced_cell(), decoder(), PROMPTS)
    assert {i: len(tokens) for i, tokens in right.items()} == {0: 6, 1: 6}
    row = judged(outcome(pace(), tokens=right), outcome(pace(late_p99_share=0.07), tokens=right))
    assert (row.verdict, row.num_token_mismatches) == ("PASS", 0)
    assert row.measured == {"late_p99_share": 0.07, "machine_busy_share": 0.4}

    swapped = judged(outcome(pace(), tokens={0: right[1], 1: right[1]}))
    assert (swapped.verdict, swapped.num_token_mismatches) == ("TOKEN_MISMATCH", 1)
    assert swapped.first_divergence == (0, 0)
    short = judged(outcome(pace(), tokens={0: right[0], 1: right[1][:4]}))
    assert short.first_divergence == (1, 4)
    assert "4 tokens, and the rule has 6" in short.reason


def test_wrong_tokens_are_graver_than_late_steps() -> None:
    right = expected_tokens(paced_cell(), decoder(), PROMPTS)
    late = outcome(pace(late_p99_share=0.5), tokens=right)
    row = judged(late)
    assert (row.verdict, row.met) == ("OUT_OF_PACE", False)
    assert "engine.pace: 5 would do" in row.reason
    wrong = outcome(pace(late_p99_share=0.5), tokens={0: right[1]})
    assert judged(wrong).verdict == "TOKEN_MISMATCH"
