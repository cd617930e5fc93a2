"""Cells of vLLM's engines beside rayk's: which belong together, and what is told of them."""

from __future__ import annotations

from pathlib import Path

from rayk.reports import ResultWriter, load
from rayk.reports.report import markdown
from rayk.reports.side_by_side import COLUMNS, side_by_side
from rayk.reports.tp_pairs import pair_rows
from rayk.types.rows import CellRow, TransferRow
from tests.reports.synthetic import SPEC, cell_row

MS = 1_000_000


def add(writer: ResultWriter, kind: str, decode: int, descriptors: int, **changes: object) -> None:
    cell: CellRow = cell_row(1, decode, ("auto", "auto"))
    # What vLLM chooses itself, and what it does not heed, has no value.
    own = {"policy": "round_robin", "prefill.block_size": 16} if kind == "rayk" else {}
    cell.cell_id += f"-{kind}"
    cell.axes |= {"engine.kind": kind, "policy": None, "prefill.block_size": None} | own
    for name, value in changes.items():
        setattr(cell, name, value)
    row = TransferRow(
        cell_id=cell.cell_id,
        repeat=0,
        request_id="r0",
        producer_rank=0,
        consumer_rank=0,
        group=0,
        bytes=4096,
        num_descriptors=descriptors,
        num_descriptors_merged=descriptors if kind == "rayk" else None,
        transfer_ns=3 * MS,
    )
    writer.write_cell(cell, [], [row])


def test_each_cell_of_vllms_has_rayks_beside_it(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={"started": "now"})
    add(writer, "vllm", 1, 8)
    add(writer, "vllm", 2, 16, verdict="KV_MISMATCH", reason="columns of another rank")
    add(writer, "vllm", 4, 32)  # rayk's is missing
    add(writer, "rayk", 2, 6)
    add(writer, "rayk", 1, 4)
    writer.finish()
    result = load(tmp_path)
    equal, wrong = side_by_side(result)
    assert (equal["verdict/vllm"], equal["verdict/rayk"], equal["reason"]) == ("PASS", "PASS", "")
    assert (equal["posted/vllm"], equal["posted/rayk"]) == (8, 4)
    assert (wrong["verdict/vllm"], wrong["verdict/rayk"]) == ("KV_MISMATCH", "PASS")
    assert wrong["reason"] == "vLLM: columns of another rank"
    assert wrong["transfer_bytes/vllm"] == wrong["transfer_bytes/rayk"] == 4096
    assert {column.key for column in COLUMNS} == set(wrong)
    # Nor are their times and descriptors mixed where TP sizes are compared.
    assert {(row["layouts"], row["decode_tp"]): row["descriptors"] for row in pair_rows(result)} == {
        ("auto → auto", 1): 4.0,
        ("auto → auto", 2): 6.0,
        ("auto → auto, vLLM", 1): 8.0,
        ("auto → auto, vLLM", 2): 16.0,
        ("auto → auto, vLLM", 4): 32.0,
    }
    text = markdown(result)
    assert "## vLLM and rayk" in text
    assert "(vLLM tells no more)" in text
    assert "verdict, vLLM" in text


def test_a_run_of_one_kind_has_no_such_table(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={"started": "now"})
    writer.write_cell(cell_row(1, 2, ("auto", "auto")), [], [])
    writer.finish()
    assert side_by_side(load(tmp_path)) == []
