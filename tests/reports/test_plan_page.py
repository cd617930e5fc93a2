"""The pages of plans and of validations: the answer, its uncertainty and the command come first."""

from __future__ import annotations

import shlex
from pathlib import Path

import pandas as pd
import pytest

from rayk.reports.html import page_html
from rayk.reports.markdown import page_markdown
from rayk.reports.page import Page
from rayk.reports.plan_answers import shell_lines
from rayk.reports.plan_page import plan_page
from rayk.reports.report import folder_page, has_own_page, write_html
from rayk.reports.validation import metric_rows, write_validation
from rayk.reports.validation_page import validation_lines, validation_page
from tests.reports.synthetic_plan import SPEC, synthetic_facts, synthetic_plans
from tests.reports.synthetic_validation import BAD, synthetic_validation

QUESTIONS = [
    "What should I start?",
    "How good will it be?",
    "What limits it?",
    "What does the next best cost?",
    "How far may I trust it?",
]


def made(**changes: object) -> Page:
    return plan_page(synthetic_plans(), synthetic_facts(**changes), SPEC)


def test_a_plans_page_answers_five_questions() -> None:
    page = made()
    assert [answer.question for answer in page.answers] == QUESTIONS
    start, good, limit, next_best, trust = page.answers
    assert start.tone == "met"
    joined = start.command.replace("\\\n", "")  # as a shell does
    assert shlex.split(joined) == shlex.split(synthetic_facts()["command"])
    assert "96.8% (93.1% to 98.3%)" in good.text
    assert ["TTFT p90, ms", "350", "420", "560", "500"] in [list(row) for row in good.table]
    assert "inside steps 91 %" in limit.text
    assert "92.1 % good instead of 96.8 %" in next_best.text
    assert "No validation" in trust.text
    assert page.title.startswith("1 prefill engine and 3 decode engines")
    html = page_html(page)
    assert html.index("What should I start?") < html.index("Goodput against speed")
    assert "PREDICTED, not measured: times are those of the cost tables in costs/qwen3-8b" in html
    text = page_markdown(page)
    assert "| traffic +20 % | missed | 14.4 |" in text


def test_what_nobody_measured_is_marked_at_the_top() -> None:
    trust = synthetic_facts()["trust"] | {
        "unmeasured": True,
        "num_outside_hull": 6000,
        "doubts": ["The longest prompt has 2,048 tokens; 1,024 were measured."],
    }
    page = made(trust=trust)
    assert ("unmet", "UNMEASURED costs") in page.chips
    assert ("unmet", "5.0% of steps outside of the tables") in page.chips
    html = page_html(page)
    doubt = html.index("UNMEASURED: the tables are derived from data sheets")
    assert doubt < html.index("What should I start?")
    assert page.answers[-1].tone == "unmet"
    assert "1,024 were measured" in page.answers[-1].text


def test_a_plan_that_misses_the_objective_says_so_first() -> None:
    plans = synthetic_plans().assign(good_share=0.71, met=False)
    page = plan_page(plans, synthetic_facts(met=False, next_best=None), SPEC)
    assert page.answers[0].tone == "unmet"
    assert "No plan keeps the objective (90% of requests are to keep TTFT 500 ms" in page.answers[0].text
    assert ("unmet", "objective missed") in page.chips
    assert not page.answers[3].is_answered


def test_a_plan_of_nothing_is_a_page_all_the_same() -> None:
    facts = synthetic_facts(
        met=False, best=None, best_text=None, command=None, next_best=None, range={}, sensitivity=[], why=[]
    )
    page = plan_page(synthetic_plans().iloc[:0], facts, SPEC)
    assert page.title == "Nothing fits"
    assert page.answers[0].text == "Nothing that was tried fits these GPUs."
    assert "Nothing fits" in page_html(page)


def test_the_front_has_its_engines_beside_its_marks() -> None:
    (section,) = [s for s in made().sections if s.plots]
    line, names, *marks = section.plots[0].data
    assert line["x"] == sorted(line["x"])
    assert [text.split("<")[0] for text in names["text"]] == ["2P 2D", "1P 3D", "2P 6D", "1P 1D TP 4:4"]
    symbols = [symbol for mark in marks for symbol in mark["marker"]["symbol"]]
    assert symbols.count("star") == 1
    assert "square-open" in symbols, "an aggregated plan misses the objective"


def test_options_stand_on_lines_of_their_own() -> None:
    assert shell_lines("rayk serve m --set a=1 --set b=2") == "rayk serve m \\\n  --set a=1 \\\n  --set b=2"


def test_a_validations_page_names_the_worst_cell_and_its_stage(tmp_path: Path) -> None:
    found = synthetic_validation()
    assert not any(row["is_missed"] for row in metric_rows(found.errors)), "half of the cells are well"
    write_validation(found, tmp_path)
    path = write_html(tmp_path)
    assert has_own_page(tmp_path)
    page = folder_page(tmp_path)
    how_far, worst, ranks, rests, again = page.answers
    assert how_far.tone == "met"
    assert worst.text.startswith(f"{BAD}: its TTFT p50 is predicted -40.0% off, bound 15%.")
    assert "prefill_queue: 4% of the time predicted (10.00 ms), 10% measured (30.00 ms)" in worst.text
    assert "Kendall's tau: TTFT p50" in ranks.text
    assert "2026-11-28, in 40 cells" in rests.text
    assert again.command.split(" \\\n  ") == [
        "rayk plan",
        "--validate runs/validation/cells",
        "--costs runs/validation/costs",
        "--slo ttft=300ms,tpot=20ms",
    ]
    text = path.read_text()
    assert "agg-tp1-mamba" in text
    assert "pp over 1" in text


@pytest.mark.parametrize("missed", [True, False])
def test_a_bound_that_is_missed_is_in_the_title(missed: bool) -> None:
    found = synthetic_validation(unmeasured=True)
    errors = found.errors
    late = (errors["metric"] == "tpot_ms_p90") & missed
    errors.loc[late, "error"] = 0.3
    errors.loc[late, "is_missed"] = True
    page = validation_page(found)
    expected = "TPOT p90: predictions are further off than the bound" if missed else "Predictions are within"
    assert page.title.startswith(expected)
    assert page.answers[0].tone == ("unmet" if missed else "met")
    assert ("unmet", "UNMEASURED tables") in page.chips


def test_an_error_no_larger_than_repeats_differ_is_neither_kept_nor_missed() -> None:
    found = synthetic_validation()
    late = found.errors["metric"] == "tpot_ms_p90"
    found.errors.loc[late, "error"], found.errors.loc[late, "spread"] = 0.3, 0.2
    page = validation_page(found)
    assert page.title == "TPOT p90: repeats differ too much to tell"
    assert page.answers[0].tone == ""
    assert ("", "TPOT p90 30.0% of 8%, but repeats differ by 20%") in page.chips
    assert any("bound 8%, but repeats differ by 20% (signed" in line for line in validation_lines(found))


def test_marks_are_numbered_as_in_the_table() -> None:
    found = synthetic_validation()
    page = validation_page(found)
    plots = {plot.id: plot for section in page.sections for plot in section.plots}
    marks = plots["against-ttft_ms_p50"].data[-1]
    (table,) = [section for section in page.sections if section.title == "Errors by cell"]
    numbers = {row["cell_id"]: str(row["number"]) for row in table.rows}
    told = dict(zip(marks["text"], marks["customdata"], strict=True))
    assert BAD in told[numbers[BAD]]
    of_metric: pd.DataFrame = found.errors[found.errors["metric"] == "ttft_ms_p50"]
    assert marks["y"] == of_metric["predicted"].tolist()
