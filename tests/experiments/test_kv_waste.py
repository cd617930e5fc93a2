"""What a cell's row says of its KV groups, counted by hand for a model of one full and one sliding layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.judge import CellJudge
from rayk.oracle.cache import AnswerStore
from rayk.reports import ResultWriter, load
from rayk.specs import Cell, expand, load_spec
from rayk.types.rows import RequestRow
from tests.specs.models import decoder, spec

WINDOW = 20
POSITIONS = 1024
ROW_BYTES = 2 * 2 * 16 * 4
"""K and V of 2 heads of 16, float32."""


def cell(**changes: Any) -> Cell:
    (made,) = expand(load_spec(spec(device="cpu", dtype="float32", **changes)).spec, decoder((None, WINDOW)))
    return made


def waste(block_size: int) -> int:
    """A request of all the model's positions: the sliding layer's 19 live rows in blocks of 16 or more."""
    blocks = {row // block_size for row in range(POSITIONS - WINDOW + 1, POSITIONS)}
    return (len(blocks) * block_size - (WINDOW - 1)) * ROW_BYTES


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"prefill": waste(16), "decode": waste(16)}),
        ({"prefill": {"block_size": 64}}, {"prefill": waste(64), "decode": waste(16)}),
        ({"mode": "aggregated", "prefill": {"tp": 2}}, {"prefill": waste(16)}),
        ({"engine": {"hybrid_kv": False}}, {"prefill": 0, "decode": 0}),
    ],
    ids=str,
)
def test_a_cells_row_says_what_its_groups_waste(
    changes: dict[str, Any], expected: dict[str, int], tmp_path: Path
) -> None:
    made = cell(checks=["kv_bytes"], **changes)
    outcome = CellOutcome(requests=[], num_kv_bytes_checked=1, wall_ns=1, facts={})
    row = CellJudge("m", decoder((None, WINDOW)), AnswerStore(tmp_path)).judge(made, [[1, 2]], [outcome])
    assert {side: num_bytes for side, (num_bytes, _) in row.kv_waste.items()} == expected
    needed = (POSITIONS + (POSITIONS if not made.prefill.hybrid_kv else WINDOW - 1)) * ROW_BYTES
    for num_bytes, percent in row.kv_waste.values():
        assert percent == pytest.approx(100 * num_bytes / (num_bytes + needed))
    writer = ResultWriter(tmp_path / "run", spec_yaml="name: x", environment={"started": "now"}, resume=False)
    writer.write_cell(row, [], [])
    (record,) = load(tmp_path / "run").cells.to_dict(orient="records")
    assert record["kv_waste_bytes"] == max(expected.values())
    assert record["prefill.kv_waste_bytes"] == expected["prefill"]
    for side, of_side in row.kv_groups.items():
        assert sum(g["padding_bytes"] + g["wasted_bytes"] for g in of_side) == expected[side]
        assert sum(g["used_bytes"] for g in of_side) == needed
        told = [dict(group) for group in record[f"{side}.kv_groups"]]
        assert told == of_side
    assert set(row.kv_groups) == set(expected)


def request(
    number: int, tokens: int, outputs: int, decode: str | None, error: str | None = None
) -> RequestRow:
    return RequestRow(
        cell_id="c",
        repeat=0,
        request_id=str(number),
        prompt_index=number,
        prompt_token_ids=[1] * tokens,
        output_token_ids=[2] * outputs,
        num_prompt_tokens=tokens,
        prefill_engine="prefill0",
        decode_engine=decode,
        error=error,
    )


def test_a_cells_row_says_what_its_own_requests_held(tmp_path: Path) -> None:
    made = cell(checks=["kv_bytes"], prefill={"tp": 2}, decode={"tp": 2})
    # The second ends where it was prefilled, the third failed.
    rows = [
        request(0, 40, 5, "decode0"),
        request(1, 7, 1, None),
        request(2, 99, 1, "decode0", error="TransferError: lost"),
    ]
    outcome = CellOutcome(requests=rows, num_kv_bytes_checked=1, wall_ns=1, facts={})
    row = CellJudge("m", decoder((None, WINDOW)), AnswerStore(tmp_path)).judge(made, [[1]] * 3, [outcome])
    of_full = {side: next(g for g in groups if g["kind"] == "full") for side, groups in row.kv_held.items()}
    used = {side: (g["num_requests"], g["used_bytes"], g["wasted_bytes"]) for side, g in of_full.items()}
    # 40 and 7 tokens in 3 and 1 blocks; 40 + 5 - 1 in 3.
    assert used == {
        "prefill": (2, 47 * ROW_BYTES, (64 - 47) * ROW_BYTES),
        "decode": (1, 44 * ROW_BYTES, (48 - 44) * ROW_BYTES),
    }
    writer = ResultWriter(tmp_path / "run", spec_yaml="name: x", environment={"started": "now"}, resume=False)
    writer.write_cell(row, rows, [])
    (record,) = load(tmp_path / "run").cells.to_dict(orient="records")
    assert [dict(group) for group in record["decode.kv_held"]] == row.kv_held["decode"]
