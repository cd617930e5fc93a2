"""A run of rows made by hand: the page's answers, tables and figures say what follows from them."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.reports import Result, ResultWriter, load
from rayk.reports.answers import answers, pass_text
from rayk.reports.environment import copy_ceiling, copy_gb_per_s
from rayk.reports.plots import num_workers, pareto_rows, spread_plots
from rayk.reports.stages import (
    LIMITS,
    PARTS,
    largest,
    limit_rows,
    limit_shares,
    request_parts,
    shown_limits,
    waterfall_data,
)
from rayk.reports.tp_cost import cost_table, unequal_cost
from rayk.reports.tp_pairs import ceiling_of, pair_grids, pair_rows
from rayk.types.rows import CellRow, RequestRow, TransferRow
from tests.markers import one_per
from tests.reports.synthetic import MS, SPEC, cell_row

ENVIRONMENT = {"ceiling": {"what": "memcpy", "gb_per_s": 10.0}, "git_commit": "c" * 40}
STAGES = {
    "queue": 1,
    "dispatch": 2,
    "prefill_queue": 5,
    "prefill": 13,
    "ticket": 1,
    "digest": 1,
    "handover": 2,
    "reserve": 4,
    "read": 10,
    "fence": 1,
    "verify": 1,
    "notice": 1,
    "decode_queue": 3,
}
"""ms; decode takes the rest."""


def request_row(cell: CellRow, number: int, decode_ms: int, **stages: int) -> RequestRow:
    """Two tokens: the first from the prefill engine, the other at the end."""
    took = STAGES | {"decode": decode_ms} | stages
    first = sum(took[stage] for stage in ("queue", "dispatch", "prefill_queue", "prefill"))
    return RequestRow(
        cell_id=cell.cell_id,
        repeat=0,
        request_id=f"{cell.cell_id}/0/{number}",
        prompt_index=number,
        prompt_token_ids=[1],
        output_token_ids=[2, 3],
        due_ns=5 * MS * number,
        arrival_ns=MS,
        token_times_ns=[MS + first * MS, MS + sum(took.values()) * MS],
        stage_ns={name: ms * MS for name, ms in took.items()},
    )


def transfer_row(cell: CellRow, number: int, consumer: int, **changes: Any) -> TransferRow:
    """2 MB in 4 ms by 8 descriptors, 1 ms of it posting; begun 30 ms after the request was due."""
    fields = {
        "cell_id": cell.cell_id,
        "repeat": 0,
        "request_id": f"{cell.cell_id}/0/{number}",
        "producer_rank": 0,
        "consumer_rank": consumer,
        "group": 0,
        "bytes": 2_000_000,
        "num_descriptors": 16,
        "num_descriptors_merged": 8,
        "post_ns": MS,
        "transfer_ns": 4 * MS,
    }
    fields |= changes
    begin, took = fields.setdefault("begin_ns", 30 * MS), fields["transfer_ns"]
    fields.setdefault("end_ns", None if begin is None else begin + took)
    return TransferRow(**fields)


def write(folder: Path, environment: dict[str, Any] | None = None) -> Result:
    """Two requests at equal TP sizes, one at unequal ones, where a rank posts two reads one after the other
    while the other rank reads."""
    writer = ResultWriter(
        folder, spec_yaml=SPEC, environment=ENVIRONMENT if environment is None else environment
    )
    equal, unequal = (cell_row(p, 2, ("BHLNC", "BHLNC")) for p in (2, 1))
    writer.write_cell(
        equal,
        [request_row(equal, 0, 55), request_row(equal, 1, 155)],
        [transfer_row(equal, 0, 0), transfer_row(equal, 1, 0, transfer_ns=6 * MS)],
    )
    writer.write_cell(
        unequal,
        [request_row(unequal, 0, 55, read=20)],
        [
            transfer_row(unequal, 0, 0, transfer_ns=16 * MS, post_ns=2 * MS),
            transfer_row(unequal, 0, 0, producer_rank=1, post_ns=3 * MS, begin_ns=46 * MS),
            transfer_row(unequal, 0, 1, bytes=4_000_000, post_ns=4 * MS, begin_ns=31 * MS),
        ],
    )
    writer.finish()
    return load(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return write(tmp_path_factory.mktemp("numbers"))


def test_parts_add_up_to_the_request(run: Result) -> None:
    parts = request_parts(run)
    names = [part.name for part in PARTS]
    assert parts[names].sum(axis=1).tolist() == pytest.approx(run.requests["e2e_ms"].tolist())
    expected = 1, 2, 0, 0, 5, 13, 1, 1, 0, 2, 4, 1, 9, 1, 1, 1, 0, 3, 0, 55, 0
    assert parts[names].iloc[0].tolist() == [*expected]
    # A rank posts 2 and 3 ms one after the other, the other rank 4 at the same time: 5 of the 20 ms.
    assert parts[["post", "wait"]].iloc[2].tolist() == [5, 15]


def test_shares_name_the_limit(run: Result) -> None:
    shares = limit_shares(request_parts(run).head(1))
    assert set(shares) == set(LIMITS) - {"other", "host tier"}
    assert shares == pytest.approx(
        {
            "queue": 0.01,
            "prefill": 0.18,
            "ticket": 0.01,
            "link": 0.1,
            "decode KV": 0.04,
            "decode step": 0.59,
            "coordinator": 0.04,
            "checks": 0.03,
            "retries": 0.0,
        }
    )
    rows = limit_rows(run)
    assert [(row["cell_id"], row["limit"]) for row in rows] == [
        ("p2-d2-BHLNC-BHLNC", "decode step"),
        ("p1-d2-BHLNC-BHLNC", "decode step"),
    ]
    told = "1.0 ms until the decode engine looked, 3.0 ms until a step took it, 105.0 ms decoding"
    assert rows[0]["evidence"].startswith(told)
    assert rows[0]["decode step"] == pytest.approx(100 * 218 / 300)


@one_per()
@pytest.mark.parametrize(
    ("stage", "limit", "told"),
    [
        ("queue", "queue", "900.0 ms until sent"),
        ("dispatch", "coordinator", "900.0 ms to the first engine"),
        ("prefill_queue", "prefill", "900.0 ms waiting for room"),
        ("prefill", "prefill", "900.0 ms computing the prompt"),
        ("read", "link", "899.0 ms waiting for bytes"),
        ("reserve", "decode KV", "900.0 ms until blocks were free"),
        ("ticket", "ticket", "900.0 ms until the engine's turns ended and the ticket was written"),
        ("handover", "coordinator", "900.0 ms for the ticket's way"),
        ("notice", "decode step", "900.0 ms until the decode engine looked"),
        ("verify", "checks", "900.0 ms verify"),
        ("retry", "retries", "900.0 ms in attempts that failed"),
        ("decode_queue", "decode step", "900.0 ms until a step took it"),
        ("lookup", "host tier", "900.0 ms asking the host tier"),
        ("load", "host tier", "900.0 ms reading from it"),
        ("swap", "host tier", "900.0 ms swapped out to it"),
    ],
)
def test_each_limit_has_its_evidence(tmp_path: Path, stage: str, limit: str, told: str) -> None:
    cell = cell_row(1, 1, ("BHLNC", "BHLNC"))
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    writer.write_cell(cell, [request_row(cell, 0, 58, **{stage: 900})], [transfer_row(cell, 0, 0)])
    writer.finish()
    [row] = limit_rows(load(tmp_path))
    assert row["limit"] == limit
    assert told in row["evidence"]
    waterfall = waterfall_data(load(tmp_path))
    assert waterfall is not None
    has_tier = not {"lookup", "load", "relay", "swap"}.isdisjoint(part["name"] for part in waterfall["parts"])
    assert has_tier == ("host tier" in shown_limits([row])) == (limit == "host tier")


def test_what_no_stage_holds_is_told(tmp_path: Path) -> None:
    cell = cell_row(1, 1, ("BHLNC", "BHLNC"))
    rows = [request_row(cell, number, 55) for number in range(4)]
    for row, lost in zip(rows, ("handover", "decode", "", ""), strict=True):
        row.stage_ns.pop(lost, None)
    rows[2].error = "TransferError: lost"
    rows[3].stage_ns.clear()
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    writer.write_cell(cell, rows, [transfer_row(cell, 0, 0)])
    writer.finish()
    parts = request_parts(load(tmp_path))
    # The third failed, of the fourth nothing was measured.
    assert parts["request_id"].tolist() == [rows[i].request_id for i in (0, 1, 3)]
    assert parts["other"].tolist() == [2, 55, 0]
    assert parts["wait"].tolist() == [9, 10, 0]
    shares = limit_shares(parts)
    assert shares["other"] == pytest.approx(57 / 200)
    assert limit_shares(parts.head(1))["other"] == pytest.approx(0.02)
    assert largest(limit_shares(parts[1:2])) == "other"
    [row] = limit_rows(load(tmp_path))
    assert (row["limit"], row["other"]) == ("decode step", pytest.approx(28.5))


def test_stages_of_an_older_rayk_are_told_as_such(tmp_path: Path) -> None:
    older = write(tmp_path / "run")
    assert "older rayk" not in answers(older)[1].text
    text = answers(replace(older, schema_version=1))[1].text
    assert "prefill holds the queue at the engine, coordinator is what no other stage holds" in text


def test_a_push_posts_within_the_prefill(tmp_path: Path) -> None:
    cell = cell_row(1, 1, ("BHLNC", "BHLNC"))
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    writer.write_cell(
        cell, [request_row(cell, 0, 55)], [transfer_row(cell, 0, 0, mode="push", begin_ns=None)]
    )
    writer.finish()
    result = load(tmp_path)
    assert request_parts(result)[["post", "wait"]].iloc[0].tolist() == [0, 10]
    told = waterfall_data(result)
    assert told is not None
    assert told["cells"][0]["push"]
    [row] = pair_rows(result)
    # 2 MB were in flight for 4 ms; the request waited 10 ms for the last of them.
    assert (row["layouts"], row["ms"], row["gb_per_s"]) == ("BHLNC → BHLNC, push", 10.0, 0.5)
    assert pair_grids(result)[0]["facts"][0]["title"] == "ms after the prompt was computed"


def test_pairs_of_tp_sizes_cost_what_their_transfers_took(run: Result) -> None:
    unequal, equal = pair_rows(run)
    assert (equal["prefill_tp"], equal["decode_tp"], equal["is_equal"]) == (2, 2, True)
    # 4 MB in 4 + 6 ms is 0.4 GB/s, of 10 GB/s 4%.
    assert (equal["ms"], equal["descriptors"], equal["bytes"]) == (5.0, 8.0, 2e6)
    assert equal["gb_per_s"] == pytest.approx(0.4)
    assert equal["percent"] == pytest.approx(4.0)
    # Ranks read at the same time, each one read after the other: 8 MB in 20 ms, of which no pair has over 16.
    assert (unequal["ms"], unequal["descriptors"], unequal["bytes"]) == (20.0, 24.0, 8e6)
    assert unequal["gb_per_s"] == pytest.approx(0.4)
    assert run.cells["transfer_gb_per_s"].tolist() == pytest.approx([0.4, 0.4])
    assert (equal["low_ms"], equal["is_span"], equal["is_merged"]) == (None, True, True)
    # From 30 to 50 ms the one rank, from 31 to 35 the other.
    assert (equal["rank_ms"], unequal["rank_ms"]) == (5.0, 20.0)
    assert unequal_cost(run) == (
        "Nothing that can be told from chance: too few repeats and decode sizes (16.00 ms (5.00 times) more "
        "where P < D). Each request is held against the same prompt's at the same decode TP with P = D."
    )
    # Of the one prompt that ran at both.
    assert cost_table(run) == [
        ["", "P < D"],
        ["pairs (units)", "1 (1)"],
        ["ms per request", "20.00"],
        ["ms at P = D", "4.00"],
        ["more, ms", "+16.00"],
        ["its 95% interval", "too few units"],
        ["times", "5.00"],
        ["slowest rank alone, ms (at P = D)", "20.00 (4.00)"],
        ["descriptors (at P = D)", "24.0 (8.0)"],
        ["bytes (at P = D)", "7.6 MiB (1.9 MiB)"],
    ]
    [grid] = pair_grids(run)
    assert [fact["title"] for fact in grid["facts"]] == [
        "ms per request",
        "descriptors posted",
        "bytes per request",
        "rate per request, all ranks",
    ]
    rows = grid["facts"][3]["rows"]
    assert [(label, cells[0]["text"]) for label, cells in rows] == [
        ("P 1", "0.40 GB/s"),
        ("P 2", "0.40 GB/s"),
    ]
    assert [cells[0]["note"] for _, cells in rows] == ["4% of ceiling", "4% of ceiling"]
    assert [cells[0]["heat"] for _, cells in grid["facts"][0]["rows"]] == [1.0, 0.25]


def test_without_a_ceiling_there_are_no_percents(tmp_path: Path) -> None:
    result = write(tmp_path / "old", {})
    assert "no measured ceiling" in ceiling_of(result.environment).text
    assert [row["percent"] for row in pair_rows(result)] == [None, None]
    gpus = ENVIRONMENT | {"devices": {"gpus": ["H100"]}}
    assert ceiling_of(gpus).gb_per_s is None
    assert "host memory" in ceiling_of(gpus).text
    measured = copy_ceiling()
    assert measured["gb_per_s"] > 0
    assert copy_gb_per_s({"ceiling": measured}) == measured["gb_per_s"]
    assert copy_gb_per_s({"ceiling": "none"}) is None


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    alone = cell_row(1, None, ("BHLNC", ""))
    writer.write_cell(alone, [], [])
    assert "No KV was moved" in unequal_cost(load(tmp_path))
    equal = cell_row(1, 1, ("BHLNC", "BHLNC"))
    writer.write_cell(equal, [request_row(equal, 0, 9)], [transfer_row(equal, 0, 0)])
    writer.finish()
    assert "unequal TP sizes" in unequal_cost(load(tmp_path))
    assert "Cannot be said" in unequal_cost(load(tmp_path))


def test_the_waterfall_has_every_request(run: Result) -> None:
    page = (run.directory / "report.html").read_text() if run.directory else ""
    match = re.search(r'id="waterfall-data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    told = json.loads(match.group(1))
    assert [part["name"] for part in told["parts"]] == [p.name for p in PARTS if p.limit != "host tier"]
    assert [len(cell["requests"]) for cell in told["cells"]] == [2, 1]
    assert told["cells"][0]["requests"][1] == [
        "0/1",
        5.0,
        [1, 2, 5, 13, 1, 1, 2, 4, 1, 9, 1, 1, 1, 0, 3, 155, 0],
    ]
    few = waterfall_data(run, max_requests=2)
    assert few is not None
    assert [(len(cell["requests"]), cell["of"]) for cell in few["cells"]] == [(1, 2), (1, 1)]


def test_curves_are_the_share_of_requests(run: Result) -> None:
    ttft, itl, e2e = spread_plots(run)
    assert [plot.id for plot in (ttft, itl, e2e)] == ["spread-ttft", "spread-itl", "spread-e2e"]
    equal = e2e.data[1]
    assert (equal["name"], equal["x"], equal["y"]) == ("P 2, D 2", [100.0, 200.0], [50.0, 100.0])


def test_the_best_cells_are_those_that_no_other_beats() -> None:
    import pandas as pd

    def cell(name: str, rate: float, tpot: float, tp: int = 2) -> dict[str, Any]:
        sizes = {"prefill.tp": tp, "decode.tp": None, "mode": "aggregated"}
        return {"cell_id": name, "output_tokens_per_s": rate, "tpot_ms_p50": tpot, **sizes}

    rows = pareto_rows(
        pd.DataFrame(
            [cell("fast", 100, 5), cell("much", 400, 10), cell("worse", 300, 10), cell("none", 1, 0)]
        )
    )
    assert [(r["cell_id"], r["per_worker"], r["per_user"], r["is_best"]) for r in rows] == [
        ("fast", 50.0, 200.0, True),
        ("much", 200.0, 100.0, True),
        ("worse", 150.0, 100.0, False),
    ]
    assert (
        num_workers({"prefill.tp": 2, "prefill.num_engines": 3, "decode.tp": 4, "decode.num_engines": None})
        == 10
    )
    assert num_workers({}) is None


def test_the_four_answers(run: Result, tmp_path: Path) -> None:
    passed, time, cost, rerun = answers(run)
    assert passed.text == "Yes: 2 of 2 cells passed. Checked: kv_bytes, tokens."
    assert passed.tone == "met"
    assert "Mostly in decode step" in time.text
    # (59 + 159 + 59) of 100 + 200 + 110 ms: `notice`, `decode_queue` and `decode`.
    assert "decode step 68%" in time.text
    assert (cost.text, cost.table) == (unequal_cost(run), cost_table(run))
    page = (run.directory / "report.html").read_text() if run.directory else ""
    card = page[page.index("What did unequal TP sizes cost?") : page.index("How do I run it again?")]
    found = [html.unescape(text) for text in re.findall(r">([^<>]+)</t[dh]>", card)]
    assert found == [text for row in cost.table for text in row if text]
    assert f"git checkout {'c' * 40}" in rerun.command
    assert "--out runs/synthetic-again" in rerun.command
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    assert pass_text(load_or_none(writer)) == "Unknown: no cell is finished."
    for tp, verdict in ((1, "PASS"), (2, "TIMEOUT"), (4, "UNSUPPORTED")):
        writer.write_cell(cell_row(1, tp, ("BHLNC", "BHLNC"), verdict=verdict), [], [])
    writer.finish()
    failed = answers(load(tmp_path))
    assert failed[0].text == "No: 1 of 3 cells failed: p1-d2-BHLNC-BHLNC (TIMEOUT)."
    assert failed[0].tone == "unmet"
    assert "Unknown" in failed[1].text


def load_or_none(writer: ResultWriter) -> Any:
    """The cells of a run that has none yet."""
    writer.finish()
    return load(writer.directory).cells


def test_what_cannot_run_is_no_failure(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for tp, verdict in ((1, "PASS"), (2, "NEAR_TIE"), (4, "UNSUPPORTED")):
        writer.write_cell(cell_row(1, tp, ("BHLNC", "BHLNC"), verdict=verdict), [], [])
    writer.finish()
    text = pass_text(load(tmp_path).cells)
    assert text.startswith(
        "Yes: 2 of 3 cells passed, 1 of them with a near tie of two tokens, 1 cannot run here"
    )
