"""Tables and report of drafts: counts by position, tokens per step, speed-up against the undrafted cell."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.request_record import RequestRecord
from rayk.reports import ResultWriter, load
from rayk.reports.columns import cell_record, incidental_columns, request_record
from rayk.reports.drafts import draft_plot, draft_rows
from rayk.reports.html import page_html
from rayk.reports.run_page import run_page
from rayk.reports.verdicts import shown_columns
from rayk.types.request import FinishReason
from rayk.types.rows import CellRow, RequestRow
from tests.reports.synthetic import MS, SPEC, cell_row, request_rows

LAYOUTS = ("auto", "auto")


def request(times: list[int], drafted: list[int], accepted: list[int], **changes: Any) -> RequestRow:
    fields = {"cell_id": "c", "repeat": 0, "request_id": "r", "prompt_index": 0, "prompt_token_ids": [1]}
    tokens = list(range(len(times)))
    return RequestRow(
        **(fields | changes),
        output_token_ids=tokens,
        token_times_ns=times,
        drafted_by_position=drafted,
        accepted_by_position=accepted,
    )


def cell(method: str | None, *, tp: int = 1, **changes: Any) -> CellRow:
    row = cell_row(tp, None, LAYOUTS, **changes)
    row.axes["speculative.method"] = method
    row.cell_id += f"-{method}"
    return row


def test_counts_are_summed_and_steps_are_counted_by_the_times_of_their_tokens() -> None:
    # The first token, then steps of 3 tokens (2 of 2 accepted), 1 (0 of 3) and 2 (1 of 1).
    times = [5 * MS, *[9 * MS] * 3, 12 * MS, *[15 * MS] * 2]
    found = request_record(request(times, [3, 2, 1], [2, 1, 0]))
    assert (found["num_drafts"], found["num_drafted"], found["num_accepted"]) == (3, 6, 3)
    assert found["acceptance_rate"] == 0.5
    assert (found["num_decode_steps"], found["tokens_per_step"]) == (3, 2.0)
    other = request([MS, 2 * MS, 3 * MS], [1], [0])
    told = cell_record(cell("ngram"), [request(times, [3, 2, 1], [2, 1, 0]), other], [])
    assert (told["drafted_by_position"], told["accepted_by_position"]) == ([4, 2, 1], [2, 1, 0])
    assert (told["num_decode_steps"], told["tokens_per_step"]) == (5, 8 / 5)
    assert told["acceptance_rate"] == pytest.approx(3 / 7)


def test_nothing_is_told_where_nothing_was_proposed() -> None:
    for found in (
        request_record(request([MS], [], [])),
        cell_record(cell(None), [request([MS], [], [])], []),
    ):
        assert found["num_drafted"] is None
        assert found["tokens_per_step"] is None
    assert {"num_drafted", "accepted_by_position"} <= {
        *incidental_columns("cells", ["num_drafted", "accepted_by_position", "verdict"])
    }


class Silent:
    """A log that keeps nothing."""

    def prefilled(self, attempt: str) -> None: ...
    def delivered(self, row: RequestRow, event: RequestEvent) -> None: ...
    def transferred(self, rows: Any, num_kv_bytes_checked: int) -> None: ...
    def captured(self, row: RequestRow, rows: Any) -> None: ...


class Engine:
    role = "decode"
    clock_offset_ns = 0


def test_what_every_engine_tells_of_a_request_is_added_up() -> None:
    row = request([], [], [])
    record = RequestRecord(row, Silent())
    record.begin("r", 0)
    record.enter(0, computes=True)
    first = EventInfo(drafted_at=(2, 1), accepted_at=(1, 0))
    record.hear(Engine(), RequestEvent(request_id="r", token_ids=(7, 8), info=first))
    record.hear(Engine(), RequestEvent(request_id="r", token_ids=(9,)))
    last = EventInfo(drafted_at=(1, 1, 1), accepted_at=(1, 1, 1))
    ended = RequestEvent(request_id="r", token_ids=(1,), finish_reason=FinishReason.LENGTH, info=last)
    record.hear(Engine(), ended)
    assert (row.drafted_by_position, row.accepted_by_position) == ([3, 2, 1], [2, 1, 1])
    assert row.token_times_ns[0] == row.token_times_ns[1], "tokens of one step have one time"


def write(folder: Path) -> Any:
    """An undrafted cell of 8 requests, one whose gaps are half as long, and one alone of its TP size."""
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    plain = cell("none")
    rows = request_rows(plain, random.Random(0), count=8)
    writer.write_cell(plain, rows, [])
    for tp in (1, 2):
        drafted = cell("ngram", tp=tp)
        again = request_rows(drafted, random.Random(0), count=8)
        for row in again:
            begin = row.token_times_ns[0]
            row.token_times_ns = [begin + (t - begin) // 2 for t in row.token_times_ns]
            row.drafted_by_position, row.accepted_by_position = [10, 5], [8, 1]
        writer.write_cell(drafted, again, [])
    writer.finish()
    return load(folder)


def test_the_report_compares_with_the_cell_that_differs_in_drafts_alone(tmp_path: Path) -> None:
    result = write(tmp_path / "run")
    alike, alone = draft_rows(result)
    assert (alike["cell_id"], alike["drafter"]) == ("agg-tp1-ngram", "ngram")
    assert alike["speedup"] == pytest.approx(2.0, rel=1e-6)
    low, high = map(float, alike["speedup_interval"].split(" to "))
    assert low == high == 2.0
    assert alike["positions"] == "80, 20"
    assert alike["accepted_percent"] == pytest.approx(60.0)
    assert alone["speedup"] is None
    (plot,) = draft_plot([alike, alone])
    assert [trace["y"] for trace in plot.data] == [[80.0, 20.0]] * 2
    (section,) = (s for s in run_page(result).sections if s.title == "Drafts")
    assert "undrafted TPOT ms" in [column.title for column in section.columns]
    html = page_html(run_page(result))
    assert "2.00 (2.00 to 2.00)" in html
    assert {"accepted", "tokens/step"} <= {column.title for column in shown_columns(result.cells)}


def test_runs_without_drafts_have_no_such_section(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "run", spec_yaml=SPEC, environment={})
    plain = cell_row(1, None, LAYOUTS)
    writer.write_cell(plain, request_rows(plain, random.Random(0)), [])
    writer.finish()
    result = load(tmp_path / "run")
    assert "Drafts" not in [section.title for section in run_page(result).sections]
    assert not {"accepted", "tokens/step"} & {column.title for column in shown_columns(result.cells)}


def test_acceptance_after_hand_overs_stands_beside_that_without(tmp_path: Path) -> None:
    """8 prompts, each with 10 tokens proposed: 8 accepted in one engine; after hand-overs 8, or 4 and 3."""
    writer = ResultWriter(tmp_path / "run", spec_yaml=SPEC, environment={})
    for decode, accepted in ((None, (8, 8)), (2, (8, 8)), (1, (4, 3))):
        row = cell_row(2 if decode is None else 1, decode, LAYOUTS)
        row.axes["speculative.method"] = "draft"
        requests = request_rows(row, random.Random(0), count=8)
        for number, one in enumerate(requests):
            one.drafted_by_position, one.accepted_by_position = [10], [accepted[number % 2]]
        writer.write_cell(row, requests, [])
    writer.finish()
    alone, right, wrong = draft_rows(load(tmp_path / "run"))
    assert alone["aggregated_percent"] is None
    assert (right["aggregated_percent"], right["acceptance_difference"]) == (80, 0)
    assert wrong["acceptance_difference"] == pytest.approx(-45)
    low, high = (float(end) for end in wrong["acceptance_interval"].split(" to "))
    # The standard deviation of four gaps of -40 and four of -50 is sqrt(200 / 7); t(0.975, 7) is 2.3646.
    half = 2.3646 * (200 / 7) ** 0.5 / 8**0.5
    assert (low, high) == (pytest.approx(-45 - half, abs=0.06), pytest.approx(-45 + half, abs=0.06))
