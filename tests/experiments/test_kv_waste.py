"""What a cell's row says of its KV groups, counted by hand for a model of one full and one sliding layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.actors.cell_run import CellOutcome
from rayk.experiments.judge import CellJudge
from rayk.reports import ResultWriter, load
from rayk.specs import Cell, expand, load_spec
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
    row = CellJudge("m", decoder((None, WINDOW)), tmp_path).judge(made, [[1, 2]], [outcome])
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
