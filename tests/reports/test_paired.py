"""Paired differences: intervals that hold; regressions are marked where they are, and nowhere else."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from rayk.reports import Result, ResultWriter, load
from rayk.reports.compare import compare_markdown, sections, write_compare_html
from rayk.reports.compare_tables import MAX_UNSURE, change_row
from rayk.reports.paired import (
    CELL,
    CONFIDENCE,
    KEYS,
    MARGIN,
    MOVES,
    SIZES,
    TIMES,
    WHOLE,
    Change,
    changes,
    median_interval,
)
from rayk.types.rows import RequestRow, TransferRow
from tests.markers import thorough
from tests.reports.synthetic import MS, SPEC, cell_row

NUM_CELLS = 12


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    """Against all outcomes of coins: of 9 values, how many lie below the median is binomial."""
    for count in range(1, 15):
        ends = median_interval(list(range(count)), 0.95)
        probabilities = [math.comb(count, k) / 2**count for k in range(count + 1)]
        if ends is None:
            assert 2 * probabilities[0] > 0.05
            continue
        low, high = int(ends[0]), int(ends[1])
        # k values lie below the median: it is between the k-th and the next.
        covered = sum(p for k, p in enumerate(probabilities) if low < k <= high)
        assert covered >= 0.95
        narrower = sum(p for k, p in enumerate(probabilities) if low + 1 < k <= high - 1)
        assert narrower < 0.95
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0], 0.95) == (1.0, 6.0)


def run(
    folder: Path, *, num_requests: int, factor: float = 1.0, slow_cell: float = 1.0, seed: int = 0
) -> Result:
    """Cells whose requests take about 100 ms; the later token `factor` times as long, in cell 0 `slow_cell`
    times more."""
    draw, noise = random.Random(0), random.Random(seed)
    writer = ResultWriter(
        folder, spec_yaml=SPEC, environment={"packages": {"torch": f"2.{seed}"}, "python": "3.11"}
    )
    for number in range(NUM_CELLS):
        cell = cell_row(1, number + 1, ("BHLNC", "BHLNC"))
        rows = []
        for i in range(num_requests):
            first = int(draw.uniform(40, 60) * noise.uniform(0.98, 1.02) * MS)
            later = int(draw.uniform(40, 60) * noise.uniform(0.98, 1.02) * factor * MS)
            later = int(later * (slow_cell if number == 0 else 1.0))
            rows.append(
                RequestRow(
                    cell_id=cell.cell_id,
                    repeat=0,
                    request_id=f"{cell.cell_id}/0/{i}",
                    prompt_index=i,
                    prompt_token_ids=[1],
                    output_token_ids=[1, 2],
                    token_times_ns=[first, first + later],
                )
            )
        writer.write_cell(cell, rows, [])
    writer.finish()
    return load(folder)


def verdicts(found: list[Change], subject: str = "all cells") -> dict[str, str]:
    return {change.metric.name: change.verdict for change in found if change.subject == subject}


def test_a_slower_run_is_a_regression_and_the_faster_one_an_improvement(tmp_path: Path) -> None:
    base = run(tmp_path / "a", num_requests=20)
    slow = run(tmp_path / "b", num_requests=20, factor=1.5, seed=1)
    found = changes(base, slow)
    assert verdicts(found) == {"TTFT": "no change seen", "TPOT": "regression", "E2E": "regression"}
    tpot = next(c for c in found if c.metric.name == "TPOT")
    assert tpot.num_pairs == NUM_CELLS
    assert tpot.low is not None
    assert tpot.high is not None
    assert 1.4 < tpot.low <= tpot.ratio <= tpot.high < 1.6
    assert verdicts(changes(slow, base))["TPOT"] == "improvement"
    assert verdicts(found, "p1-d3-BHLNC-BHLNC")["TPOT"] == "regression"


@thorough
def test_one_slow_cell_is_named_and_the_run_is_not_blamed(tmp_path: Path) -> None:
    base = run(tmp_path / "a", num_requests=20)
    other = run(tmp_path / "b", num_requests=20, slow_cell=2.0, seed=1)
    found = changes(base, other)
    assert verdicts(found)["TPOT"] == "no change seen"
    marked = {(c.subject, c.metric.name) for c in found if c.verdict in ("regression", "improvement")}
    assert marked == {("p1-d1-BHLNC-BHLNC", "TPOT"), ("p1-d1-BHLNC-BHLNC", "E2E")}
    names = [section.title for section in sections([base, other])]
    assert names[:2] == ["Paired differences", "Cells that changed"]
    page = write_compare_html([base, other], tmp_path / "compare.html").read_text()
    assert page.count('<span class="chip unmet">regression</span>') == 2
    text = compare_markdown([base, other])
    assert "| p1-d1-BHLNC-BHLNC | TPOT, ms | b | 20 |" in text
    (short,) = (line for line in text.splitlines() if line.startswith("Worse: p1-d1-BHLNC-BHLNC TPOT +"))
    assert "p1-d1-BHLNC-BHLNC E2E +" in short
    assert short in page
    assert "Better" not in short
    assert "doubtful" not in short
    assert "\nNothing is known to be faster or slower." in compare_markdown([base, base])


@thorough
def test_few_pairs_are_said_to_be_few(tmp_path: Path) -> None:
    base, other = (run(tmp_path / n, num_requests=3, factor=f) for n, f in (("a", 1.0), ("b", 3.0)))
    found = changes(base, other)
    told = {"TTFT": "too few pairs", "TPOT": "unsure", "E2E": "unsure"}
    assert verdicts(found, "p1-d1-BHLNC-BHLNC") == told
    few = next(c for c in found if c.subject != "all cells")
    assert change_row(few, "b")[-2:] == ["", "too few pairs"]
    assert verdicts(found)["TPOT"] == "regression"  # 12 cells are enough


@thorough
def test_noise_alone_is_seldom_a_change(tmp_path: Path) -> None:
    """Many comparisons of equal runs: intervals are far from the margin, so none is marked."""
    base = run(tmp_path / "base", num_requests=20)
    for seed in range(1, 4):
        found = changes(base, run(tmp_path / str(seed), num_requests=20, seed=seed))
        assert {change.verdict for change in found} == {"no change seen"}
        assert all(c.low is not None and c.low < 1 + MARGIN for c in found)
    assert 0.9 < CONFIDENCE < 1


@thorough
def test_with_nothing_marked_the_page_says_so(tmp_path: Path) -> None:
    base, again = (run(tmp_path / n, num_requests=6, seed=s) for n, s in (("a", 0), ("b", 1)))
    [section] = [s for s in sections([base, again]) if s.title == "Cells that changed"]
    assert section.rows == []
    assert section.note.startswith("Nothing is known to have changed. Of 36 times and counts of cells, 0 are")
    assert "of 36 no change is seen" in section.note
    few = run(tmp_path / "c", num_requests=3)
    [section] = [s for s in sections([base, few]) if s.title == "Cells that changed"]
    assert section.note.startswith("Nothing is known")
    assert "2 are unsure" in section.note, "by chance beyond a quarter"
    assert "34 have too few pairs to say" in section.note
    markdown = compare_markdown([base, few])
    assert "## Cells that changed" in markdown
    assert section.note in markdown
    assert "Nothing is known" in write_compare_html([base, few], tmp_path / "compare.html").read_text()
    few.requests["cell_id"] = "other"
    [section] = [s for s in sections([base, few]) if s.title == "Cells that changed"]
    assert section.note.startswith("Nothing could be told: no request is in both runs.")


@thorough
def test_unsure_rows_are_few_and_counted(tmp_path: Path) -> None:
    base, slow = (run(tmp_path / n, num_requests=3, factor=f) for n, f in (("a", 1.0), ("b", 3.0)))
    [section] = [s for s in sections([base, slow]) if s.title == "Cells that changed"]
    assert len(section.rows) == MAX_UNSURE
    assert {row[-1] for row in section.rows} == {"unsure"}
    assert {row[1] for row in section.rows} == {"TPOT, ms"}, "the largest changes"
    assert "24 are unsure (the 10 largest are shown)" in section.note


@thorough
def test_requests_of_one_run_only_make_no_pair(tmp_path: Path) -> None:
    base = run(tmp_path / "a", num_requests=20)
    fewer = run(tmp_path / "b", num_requests=9, seed=1)
    counts = {c.num_pairs for c in changes(base, fewer) if c.subject != "all cells"}
    assert counts == {9}
    fewer.requests["cell_id"] = "other"
    assert changes(base, fewer) == []


@thorough
def test_the_environments_difference_is_shown_with_its_values(tmp_path: Path) -> None:
    found = sections([run(tmp_path / n, num_requests=1, seed=s) for n, s in (("a", 0), ("b", 1))])
    [section] = [s for s in found if s.title == "Environment"]
    assert section.rows == [["packages.torch", "2.0", "2.1"]]
    same = sections([run(tmp_path / n, num_requests=1) for n in "cd"])
    assert "Environment" not in [s.title for s in same]


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.06, 1.2, "regression"), (1.04, 1.2, "no change seen")]
)
def test_the_whole_interval_must_be_beyond_the_margin(low: float, high: float, verdict: str) -> None:
    time, rate = (
        Change(
            level=CELL,
            subject="c",
            metric=metric,
            num_pairs=9,
            base=1,
            other=1.1,
            ratio=1.1,
            low=low,
            high=high,
        )
        for metric in (TIMES[2], MOVES[1])
    )
    assert time.verdict == verdict
    assert rate.verdict == verdict.replace("regression", "improvement"), "more GB/s is better"


def move(
    folder: Path,
    *,
    factor: float = 1.0,
    descriptors: int = 8,
    seed: int = 0,
    num_requests: int = 30,
    token_layers: int | None = None,
) -> Result:
    """Two cells of P 2, D 1 and one of P 1, D 2; every request's KV takes `factor` times 2 ms to move, two
    reads at once where D is 2. Only P 2, D 1 has the factor."""
    noise = random.Random(seed)
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    for prefill, decode, layout in ((2, 1, "BHLNC"), (2, 1, "LBHNC"), (1, 2, "BHLNC")):
        cell = cell_row(prefill, decode, (layout, "BHLNC"), num_token_layers=token_layers)
        requests, transfers = [], []
        for i in range(num_requests):
            name = f"{cell.cell_id}/0/{i}"
            requests.append(
                RequestRow(
                    cell_id=cell.cell_id,
                    repeat=0,
                    request_id=name,
                    prompt_index=i,
                    prompt_token_ids=[1],
                    output_token_ids=[1, 2],
                    token_times_ns=[50 * MS, 90 * MS],
                )
            )
            for rank in range(decode):
                took = 2 * MS * noise.uniform(0.99, 1.01) * (factor if prefill == 2 else 1.0) / (1 + rank)
                transfers.append(
                    TransferRow(
                        cell_id=cell.cell_id,
                        repeat=0,
                        request_id=name,
                        producer_rank=0,
                        consumer_rank=rank,
                        group=0,
                        bytes=1_000_000,
                        num_descriptors=99,
                        num_descriptors_merged=descriptors if prefill == 2 else 8,
                        post_ns=MS // 10,
                        transfer_ns=int(took),
                    )
                )
        writer.write_cell(cell, requests, transfers)
    writer.finish()
    return load(folder)


@thorough
def test_slower_transfers_are_a_regression_of_their_tp_sizes(tmp_path: Path) -> None:
    base = move(tmp_path / "a")
    other = move(tmp_path / "b", factor=1.5, descriptors=16, seed=1)
    found = changes(base, other)
    slow = {"transfer": "regression", "rate": "regression", "descriptors": "regression", "bytes": "the same"}
    same = dict.fromkeys(["transfer", "rate"], "no change seen")
    same |= dict.fromkeys(["descriptors", "bytes"], "the same")
    assert verdicts(found, "P 2, D 1") == slow
    assert verdicts(found, "P 1, D 2") == same
    back = verdicts(changes(other, base), "P 2, D 1")
    assert back == dict.fromkeys(["transfer", "rate", "descriptors"], "improvement") | {"bytes": "the same"}
    told = {(c.level, c.subject, c.metric.name): c for c in found}
    time = told[SIZES, "P 2, D 1", "transfer"]
    assert time.num_pairs == 60
    assert time.low is not None
    assert time.high is not None
    assert 1.45 < time.low <= time.ratio <= time.high < 1.55
    rate = told[SIZES, "P 2, D 1", "rate"]
    assert rate.base == pytest.approx(0.5, rel=0.02)
    assert rate.ratio == pytest.approx(1 / 1.5, rel=0.02)
    assert told[SIZES, "P 2, D 1", "descriptors"].base == 8
    assert told[SIZES, "P 1, D 2", "descriptors"].base == 16, "of both ranks"
    assert told[WHOLE, "all cells", "transfer"].num_pairs == 3
    [section] = [s for s in sections([base, other]) if s.title == "Transfers by TP sizes"]
    assert [row[:2] for row in section.rows][4:6] == [
        ["P 2, D 1", "transfer, ms"],
        ["P 2, D 1", "rate, GB/s"],
    ]
    page = write_compare_html([base, other], tmp_path / "compare.html").read_text()
    assert "rate, GB/s" in page
    assert KEYS == ["cell_id", "repeat", "prompt_index"]


@thorough
def test_runs_that_moved_nothing_have_no_transfers_to_compare(tmp_path: Path) -> None:
    base, other = (run(tmp_path / n, num_requests=4, seed=s) for n, s in (("a", 0), ("b", 1)))
    assert {c.level for c in changes(base, other)} == {WHOLE, CELL}
    assert "Transfers by TP sizes" not in [s.title for s in sections([base, other])]


@thorough
def test_counts_are_told_exactly_however_few(tmp_path: Path) -> None:
    """Two requests: no statistics of times, but eight descriptors are not nine."""
    runs = [
        move(tmp_path / str(n), descriptors=n, num_requests=2, token_layers=t)
        for n, t in ((8, 100), (24, 100), (9, 102))
    ]
    base, more, other = runs
    found = changes(base, more)
    few = {"transfer": "too few pairs", "rate": "too few pairs"}
    same = {"descriptors": "the same", "bytes": "the same"}
    assert verdicts(found, "P 1, D 2") == few | same
    [told] = [c for c in found if c.subject == "P 2, D 1" and c.metric.name == "descriptors"]
    assert change_row(told, "b")[3:] == [
        *("4", "8.0", "24.0", "+200.0%", "exact: 4 of 4 differ", "regression"),
    ]
    found = changes(base, other)
    assert verdicts(found, "p2-d1-LBHNC-BHLNC") == {
        "TTFT": "too few pairs",
        "TPOT": "too few pairs",
        "E2E": "too few pairs",
        "descriptors": "regression",
        "bytes": "the same",
        "token-layers": "changed",
    }
    assert verdicts(found)["token-layers"] == "changed", "by 2%, less than the margin"
    [section] = [s for s in sections([base, other]) if s.title == "Cells that changed"]
    assert [row[:2] for row in section.rows][:2] == [
        ["p2-d1-BHLNC-BHLNC", "descriptors"],
        ["p2-d1-LBHNC-BHLNC", "descriptors"],
    ]
    assert {c.verdict for c in changes(base, base) if c.metric.is_count} == {"the same"}
