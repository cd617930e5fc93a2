"""Rows to tables and back: what was measured is what is read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rayk.reports import ResultWriter, exit_code, headline, load
from rayk.reports.columns import CELL_FIELDS, REQUEST_FIELDS, STEP_FIELDS, TRANSFER_FIELDS
from rayk.reports.steps import read_steps
from rayk.reports.table_files import write_csv
from rayk.types.errors import UserError
from rayk.types.rows import CellRow, RequestRow, TransferRow
from rayk.types.steps import StepRow
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows, write_run

CELL_COLUMNS = """cell_id verdict reason num_requests num_token_mismatches first_divergence checks_done
near_tie_tolerance expected_verdict met prefill.effective_block_sizes decode.effective_block_sizes
kv_waste_bytes kv_waste_percent
num_kv_bytes_checked num_kv_bytes_mismatched transfer_bytes num_descriptors transfer_gb_per_s ttft_ms_p50
ttft_ms_p99 tpot_ms_p50 e2e_ms_p50 output_tokens_per_s wall_s mode prefill.tp decode.tp"""
REQUEST_COLUMNS = """cell_id repeat request_id prompt_index prompt_token_ids output_token_ids error
num_prompt_tokens num_cached_tokens num_recomputed_tokens prefill_engine decode_engine kv_path ttft_ms
tpot_ms itl_ms e2e_ms
finish_reason stage_queue_ns stage_prefill_ns stage_decode_ns"""
TRANSFER_COLUMNS = """cell_id request_id producer_rank consumer_rank group bytes num_descriptors post_ms
transfer_ms gb_per_s transport staged retries verdict"""


def writer(directory: Path, *, resume: bool = False, spec: str = SPEC) -> ResultWriter:
    return ResultWriter(directory, spec_yaml=spec, environment={"started": "now"}, resume=resume)


def test_every_column_of_the_contract_is_there(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = load(tmp_path)
    assert set(CELL_COLUMNS.split()) <= set(result.cells.columns)
    assert set(REQUEST_COLUMNS.split()) <= set(result.requests.columns)
    assert set(TRANSFER_COLUMNS.split()) <= set(result.transfers.columns)
    assert (tmp_path / "environment.json").is_file()
    assert (tmp_path / "report.html").is_file()
    assert result.spec_yaml == SPEC


def test_kv_waste_is_that_of_the_side_that_wastes_more(tmp_path: Path) -> None:
    run = writer(tmp_path)
    sides = ({"prefill": (7, 0.5), "decode": (9, 0.25)}, {"prefill": (7, 0.5)}, {})
    for number, wastes in enumerate(sides):
        run.write_cell(cell_row(1, 1, ("BHLNC", "BHLNC"), cell_id=str(number), kv_waste=wastes), [], [])
    cells = load(tmp_path).cells
    names = ["kv_waste_bytes", "kv_waste_percent", "prefill.kv_waste_bytes", "decode.kv_waste_bytes"]
    expected = np.array([[9, 0.25, 7, 9], [7, 0.5, 7, np.nan], [np.nan] * 4])
    np.testing.assert_array_equal(cells[names].to_numpy(dtype=float), expected)


def test_columns_are_there_and_typed_when_nothing_was_measured(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.write_cell(CellRow(cell_id="c", axes={"mode": "aggregated"}, verdict="UNSUPPORTED"), [], [])
    result = load(tmp_path)
    assert set(CELL_FIELDS) <= set(result.cells.columns)
    assert set(REQUEST_FIELDS) == set(result.requests.columns)
    assert set(TRANSFER_FIELDS) == set(result.transfers.columns)
    assert np.isnan(result.cells["transfer_gb_per_s"][0])
    assert np.isnan(result.cells["num_token_mismatches"][0])
    assert len(result.requests) == len(result.transfers) == 0


def test_times_become_milliseconds(tmp_path: Path) -> None:
    row = RequestRow(
        cell_id="c",
        repeat=0,
        request_id="r",
        prompt_index=3,
        prompt_token_ids=[1, 2],
        output_token_ids=[7, 8, 9],
        arrival_ns=1_000_000,
        token_times_ns=[5_000_000, 8_000_000, 9_000_000],
        stage_ns={"prefill": 4_000_000, "swap": 17},
    )
    failed = RequestRow(
        cell_id="c", repeat=0, request_id="s", prompt_index=4, prompt_token_ids=[1], error="x"
    )
    moved = TransferRow(
        cell_id="c",
        repeat=0,
        request_id="r",
        producer_rank=0,
        consumer_rank=1,
        group=0,
        bytes=3_000_000,
        num_descriptors=4,
        post_ns=500_000,
        transfer_ns=2_000_000,
    )
    cell = CellRow(cell_id="c", axes={"prefill.tp": 2}, verdict="PASS", wall_ns=1_500_000_000)
    writer(tmp_path).write_cell(cell, [row, failed], [moved, moved])
    result = load(tmp_path)
    request = result.requests.iloc[0]
    assert (request.ttft_ms, request.tpot_ms, request.e2e_ms) == (4.0, 2.0, 8.0)
    assert request.itl_ms.tolist() == [3.0, 1.0]
    assert (request.stage_prefill_ns, request.stage_swap_ns) == (4_000_000, 17)
    assert request.output_token_ids.tolist() == [7, 8, 9]
    assert result.requests["ttft_ms"].isna().tolist() == [False, True]
    assert result.requests["error"][1] == "x"
    transfer = result.transfers.iloc[0]
    assert (transfer.post_ms, transfer.transfer_ms, transfer.gb_per_s) == (0.5, 2.0, 1.5)
    total = result.cells.iloc[0]
    # Of one request: both were moving at the same time.
    assert (total.transfer_bytes, total.num_descriptors, total.transfer_gb_per_s) == (6_000_000, 8, 3.0)
    assert (total.num_requests, total.wall_s, total["prefill.tp"]) == (2, 1.5, 2)
    assert total.output_tokens_per_s == 3 / 0.008


def test_percentiles_are_numpys(tmp_path: Path) -> None:
    cell = cell_row(1, 2, ("BHLNC", "BHLNC"))
    writer(tmp_path).write_cell(cell, request_rows(cell, random.Random(3), count=11), [])
    result = load(tmp_path)
    ttft = result.requests["ttft_ms"].to_numpy()
    assert result.cells["ttft_ms_p50"][0] == pytest.approx(np.percentile(ttft, 50), rel=1e-12)
    assert result.cells["ttft_ms_p99"][0] == pytest.approx(np.percentile(ttft, 99), rel=1e-12)


def test_first_divergence_and_lists_round_trip(tmp_path: Path) -> None:
    cell = cell_row(1, 2, ("BHLNC", "BHLNC"), first_divergence=(2, 7), decode_effective_block_sizes=[16, 32])
    writer(tmp_path).write_cell(cell, [], [])
    row = load(tmp_path).cells.iloc[0]
    assert row.first_divergence == {"request": 2, "token_index": 7}
    assert row["decode.effective_block_sizes"].tolist() == [16, 32]
    assert row.checks_done.tolist() == ["tokens", "kv_bytes"]


def test_a_cell_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    run = writer(tmp_path)
    assert not (tmp_path / "cells.parquet").exists()
    for i, decode in enumerate((1, 2, 4), start=1):
        cell = cell_row(1, decode, ("BHLNC", "BHLNC"))
        run.write_cell(cell, request_rows(cell, random.Random(0)), [])
        assert len(pd.read_parquet(tmp_path / "cells.parquet")) == i
        assert len(pd.read_parquet(tmp_path / "requests.parquet")) == 6 * i
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_error_while_writing_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = writer(tmp_path)
    run.write_cell(cell_row(1, 1, ("BHLNC", "BHLNC")), [], [])

    def fail(table: object, path: Path) -> None:
        path.write_bytes(b"half a table")
        raise OSError("disk full")

    monkeypatch.setattr("rayk.reports.writer.pq.write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        run.write_cell(cell_row(1, 2, ("BHLNC", "BHLNC")), [], [])
    assert len(load(tmp_path).cells) == 1
    assert not list(tmp_path.glob(".*.tmp"))


def test_resume_continues_and_drops_rows_of_the_cell_in_flight(tmp_path: Path) -> None:
    first = writer(tmp_path)
    done, cut = cell_row(1, 1, ("BHLNC", "BHLNC")), cell_row(1, 2, ("BHLNC", "BHLNC"))
    first.write_cell(done, request_rows(done, random.Random(0)), transfer_rows(done, random.Random(0)))
    # A killed driver: the rows of the second cell reached the disk, the cell did not.
    orphans = writer(tmp_path / "other")
    orphans.write_cell(cut, request_rows(cut, random.Random(0)), [])
    both = [load(tmp_path).requests, load(tmp_path / "other").requests]
    pd.concat(both, ignore_index=True).to_parquet(tmp_path / "requests.parquet")

    again = writer(tmp_path, resume=True)
    assert again.finished == {done.cell_id: "PASS"}
    again.write_cell(cut, request_rows(cut, random.Random(1)), [])
    result = load(tmp_path)
    assert result.cells["cell_id"].tolist() == [done.cell_id, cut.cell_id]
    assert result.requests["cell_id"].value_counts().to_dict() == {done.cell_id: 6, cut.cell_id: 6}
    assert result.requests["output_token_ids"][0].tolist() == list(range(24))
    assert result.cells["decode.tp"].tolist() == [1, 2]


def test_a_folder_with_tables_needs_resume_and_the_same_spec(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(UserError, match="already holds a run's tables") as caught:
        writer(tmp_path)
    assert "--resume" in caught.value.mend
    with pytest.raises(
        UserError, match=r"in model \('checkpoints/qwen3-tiny', now 'other'\), repeat \(None, now 2\)"
    ):
        writer(tmp_path, resume=True, spec="name: synthetic\nmodel: other\nrepeat: 2\n")
    assert len(writer(tmp_path, resume=True).finished) == 18


def test_a_folder_with_other_files_is_fine_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    writer(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        writer(tmp_path / "notes.txt")


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        load(tmp_path / "none")
    with pytest.raises(UserError, match=r"no cells\.parquet"):
        load(tmp_path)
    write_run(tmp_path)
    (tmp_path / "cells.parquet").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot read the table"):
        load(tmp_path)


def cells_with(*verdicts: tuple[str, str]) -> pd.DataFrame:
    rows = [
        CellRow(cell_id=str(i), axes={}, verdict=v, expected_verdict=e) for i, (v, e) in enumerate(verdicts)
    ]
    return pd.DataFrame(
        [{"verdict": r.verdict, "expected_verdict": r.expected_verdict, "met": r.met} for r in rows]
    )


@pytest.mark.parametrize(
    ("verdicts", "code", "strict_code"),
    [
        ([("PASS", "PASS"), ("NEAR_TIE", "PASS")], 0, 0),
        ([("PASS", "PASS"), ("UNSUPPORTED", "PASS")], 0, 1),
        ([("UNSUPPORTED", "PASS")], 2, 2),
        ([("PASS", "PASS"), ("TIMEOUT", "PASS")], 1, 1),
        ([("KV_MISMATCH", "KV_MISMATCH")], 0, 0),
        ([("PASS", "KV_MISMATCH")], 1, 1),
        ([("NEAR_TIE", "KV_MISMATCH")], 1, 1),
    ],
)
def test_exit_codes(verdicts: list[tuple[str, str]], code: int, strict_code: int) -> None:
    cells = cells_with(*verdicts)
    assert exit_code(cells) == code
    assert exit_code(cells, strict=True) == strict_code


def test_headline_counts() -> None:
    cells = cells_with(("PASS", "PASS"), ("PASS", "PASS"), ("TIMEOUT", "PASS"))
    assert headline(cells) == "2 of 3 PASS, 1 TIMEOUT"
    faulty = cells_with(("PASS", "PASS"), ("KV_MISMATCH", "KV_MISMATCH"))
    assert headline(faulty) == "1 of 2 PASS, 1 KV_MISMATCH, 2 of 2 as expected"


def step_rows(cell_id: str, count: int) -> list[StepRow]:
    sizes = {"num_requests": 2, "num_logits": 2, "num_prefills": 1, "num_pairs": 40, "num_seen": 30}
    return [
        StepRow(
            cell_id=cell_id,
            repeat=0,
            engine="prefill0",
            step=number,
            begin_ns=1_500_000 * number,
            turn_ns=900,
            model_ns=700,
            num_tokens=9 - number,
            windowed=((5, 4), (9, 8)),
            **sizes,
        )
        for number in range(count)
    ]


def test_recorded_steps_come_back_and_runs_without_have_no_table(tmp_path: Path) -> None:
    """Two cells of three record steps; the last one is still pending when it is read, then taken over."""
    run = writer(tmp_path)
    sides = ("BHLNC", "BHLNC")
    for number, count in enumerate((3, 0, 2)):
        cell = cell_row(1, 1, sides, cell_id=str(number))
        run.write_cell(cell, [], [], step_rows(str(number), count))
    for _ in range(2):
        found = read_steps(tmp_path)
        assert set(found.columns) == set(STEP_FIELDS)
        assert found["cell_id"].tolist() == ["0"] * 3 + ["2"] * 2
        assert found["begin_ms"].tolist() == [0.0, 1.5, 3.0, 0.0, 1.5]
        assert [[list(pair) for pair in windows] for windows in found["windowed"]] == [[[5, 4], [9, 8]]] * 5
        run.close()
        run = writer(tmp_path, resume=True)
    run.finish()
    assert len(read_steps(tmp_path)) == 5
    paths = {path.name: path for path in write_csv(load(tmp_path), tmp_path)}
    written = pd.read_csv(paths["steps.csv"])["windowed"]
    assert list(map(json.loads, written)) == [[[5, 4], [9, 8]]] * 5
    write_run(tmp_path / "other")
    assert not (tmp_path / "other" / "steps.parquet").exists()
    assert read_steps(tmp_path / "other").empty
