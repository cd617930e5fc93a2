"""The report of a bench, and two benches beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rayk.reports.compare import compare_markdown, sections
from rayk.reports.load_answers import (
    PARTS,
    belief_text,
    client_parts,
    client_shares,
    client_spreads,
    client_waterfall,
    load_answers,
)
from rayk.reports.paired_loads import MIN_BATCH, NUM_BATCHES, estimate_changes, load_changes
from tests.reports.synthetic_load import write_bench


def test_the_four_answers(tmp_path: Path) -> None:
    result = write_bench(tmp_path / "a", ("poisson rate=2", "poisson rate=4"))
    belief, speed, time, rerun = load_answers(result)
    assert belief.text == "Yes: 2 of 2 loads are VALID, nothing is held against any number."
    assert belief.tone == "met"
    assert speed.text.startswith(
        "poisson rate=4 had the most goodput: 4.00 answers/s, of them 3.90 good, 44 "
    )
    assert "gap between tokens (ITL) 8.0 ms" in speed.text
    assert time.text.startswith(("Mostly in the later tokens", "Mostly in getting the first token"))
    assert "the generator 1.0 ms" in time.text
    assert rerun.command.splitlines() == [
        f"git checkout {'c' * 40}",
        "rayk bench --url http://127.0.0.1:8000 --rate 4",
    ]
    assert "http://127.0.0.1:8000, serving qwen3-tiny" in rerun.text


def test_a_load_that_is_not_to_be_believed_comes_first(tmp_path: Path) -> None:
    belief = load_answers(write_bench(tmp_path / "a", verdict="NOISY"))[0]
    assert belief.text == "With care: 1 of 1 load is NOISY. poisson rate=4: means are known roughly."
    assert belief.tone == ""
    cells = write_bench(tmp_path / "b", ("a", "b"), verdict="INVALID").cells
    assert belief_text(cells).startswith("No: 2 of 2 loads are INVALID")
    belief, speed, *_ = load_answers(write_bench(tmp_path / "c", verdict="INVALID"))
    assert belief.tone == "unmet"
    assert speed.text == "Unknown: no load's numbers hold."


def test_parts_add_up_to_what_the_client_saw(tmp_path: Path) -> None:
    result = write_bench(tmp_path / "a")
    parts = client_parts(result)
    names = [part.name for part in PARTS]
    assert parts[names].sum(axis=1).tolist() == pytest.approx(result.requests["e2e_ms"].tolist())
    assert (parts["sent late"] == 1.0).all()
    assert (parts["later tokens"] / 80 - 1).abs().max() < 0.03
    shares = client_shares(result)
    assert sum(share["share"] for share in shares) == pytest.approx(1, abs=1e-3)
    assert [share["colour"] for share in shares] == [part.colour for part in PARTS]


def test_the_page_has_answers_curves_and_a_waterfall(tmp_path: Path) -> None:
    result = write_bench(tmp_path / "a", ("poisson rate=2", "poisson rate=4"))
    told = client_waterfall(result)
    assert told is not None
    assert [cell["id"] for cell in told["cells"]] == ["poisson rate=2", "poisson rate=4"]
    first = told["cells"][0]["requests"][3]
    row = result.requests.iloc[3]
    assert first[:2] == ["request 3", 750.0]
    assert sum(first[2]) == pytest.approx(row["e2e_ms"], abs=0.01)
    itl = next(plot for plot in client_spreads(result) if plot.id == "spread-itl")
    assert [trace["name"] for trace in itl.data] == ["poisson rate=2", "poisson rate=4"]
    gaps = np.concatenate(result.requests.iloc[10:100]["itl_ms"].to_list())
    assert max(itl.data[0]["x"]) == pytest.approx(gaps.max(), abs=1e-3)
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.index("In short") < page.index("<h2>Rates")
    match = re.search(r'id="waterfall-data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    assert json.loads(match.group(1)) == told


def test_the_same_requests_are_compared_in_batches(tmp_path: Path) -> None:
    base = write_bench(tmp_path / "a")
    slow = write_bench(tmp_path / "b", factor=1.3, seed=1)
    found = {change.metric.name: change for change in load_changes(base, slow)}
    verdicts = {name: change.verdict for name, change in found.items()}
    assert verdicts == {
        "TTFT": "no change seen",
        "TPOT": "regression",
        "E2E": "regression",
        "longest ITL": "regression",
    }
    tpot = found["TPOT"]
    assert tpot.num_pairs <= 90 // MIN_BATCH <= NUM_BATCHES
    assert tpot.low is not None
    assert tpot.high is not None
    assert 1.27 < tpot.low <= tpot.ratio <= tpot.high < 1.33
    assert {c.verdict for c in load_changes(slow, base) if c.metric.name == "TPOT"} == {"improvement"}
    again = write_bench(tmp_path / "c", seed=2)
    assert {c.verdict for c in load_changes(base, again)} == {"no change seen"}


def test_other_requests_make_no_pairs(tmp_path: Path) -> None:
    base, other = write_bench(tmp_path / "a"), write_bench(tmp_path / "b", prompts=7, factor=1.3)
    assert load_changes(base, other) == []
    assert load_changes(base, write_bench(tmp_path / "c", ("poisson rate=9",))) == []
    assert load_changes(base, write_bench(tmp_path / "d", verdict="INVALID")) == []
    titles = [section.title for section in sections([base, other])]
    assert titles[0] == "Estimates"


def test_few_requests_are_said_to_be_few(tmp_path: Path) -> None:
    base, other = (write_bench(tmp_path / n, count=30, factor=f) for n, f in (("a", 1.0), ("b", 3.0)))
    found = {change.metric.name: change.verdict for change in load_changes(base, other)}
    large = dict.fromkeys(["TPOT", "E2E", "longest ITL"], "unsure")
    assert found == large | {"TTFT": "too few pairs"}


def test_a_queue_that_drains_makes_batches_few(tmp_path: Path) -> None:
    """Ratios that drift are not independent: fewer and larger batches, and no finding from twenty."""
    base, other = write_bench(tmp_path / "a"), write_bench(tmp_path / "b", seed=1)
    other.requests["e2e_ms"] *= np.linspace(0.7, 1.4, len(other.requests))
    drifting = next(c for c in load_changes(base, other) if c.metric.name == "E2E")
    steady = next(c for c in load_changes(base, other) if c.metric.name == "TTFT")
    assert drifting.num_pairs < steady.num_pairs
    assert drifting.verdict in ("too few pairs", "no change seen")


def test_estimates_are_compared_by_both_intervals(tmp_path: Path) -> None:
    base, other = write_bench(tmp_path / "a"), write_bench(tmp_path / "b", prompts=7, factor=1.3)
    found = {change.metric.name: change for change in estimate_changes(base, other)}
    tpot = found["TPOT p50"]
    # Each end is 2% off its estimate.
    assert tpot.low == pytest.approx(tpot.ratio * 0.98 / 1.02)
    assert tpot.high == pytest.approx(tpot.ratio * 1.02 / 0.98)
    assert tpot.ratio == pytest.approx(1.3, rel=0.01)
    assert tpot.verdict == "regression"
    assert found["TTFT mean"].verdict == "no change seen"
    text = compare_markdown([base, other])
    assert text.startswith("# 1 load in every run, equal verdicts")
    assert "values differ" not in text, "whatever benches measured differs"
    assert "## Estimates" in text
    assert "| poisson rate=4 | TPOT p50, ms | b |  | 8" in text
    other.cells["tpot_ms_p50_high"] = np.nan
    assert "TPOT p50" not in {change.metric.name for change in estimate_changes(base, other)}
