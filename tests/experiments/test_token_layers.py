"""What a cell's row says of what its engines computed, and of what its checks could not see for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.judge import CellJudge
from rayk.oracle.cache import AnswerStore
from rayk.reports import ResultWriter, load
from rayk.specs import expand, load_spec
from tests.specs.models import decoder, spec

COLUMNS = ["num_fast_prefill_layers", "num_token_layers", "decode.num_token_layers"]


def engine(num_token_layers: int | None, num_fast_prefill_layers: int = 2) -> dict[str, Any]:
    """What is known of an engine; it did not live to tell what it computed if None."""
    facts = {"num_fast_prefill_layers": num_fast_prefill_layers, "num_token_layers": num_token_layers}
    return {name: fact for name, fact in facts.items() if fact is not None}


def test_what_kernels_make_of_blocks_is_told_of_either_side(tmp_path: Path) -> None:
    facts = {
        "prefill0": {"block_sizes": [16, 16], "kernel_block_sizes": [1, 16]},
        "decode0": {"block_sizes": [48, 16], "kernel_block_sizes": [3, 8]},
    }
    (cell,) = expand(load_spec(spec(device="cpu", dtype="float32", checks=["kv_bytes"])).spec, decoder())
    outcomes = [CellOutcome(num_kv_bytes_checked=1, wall_ns=1, facts=facts)]
    row = CellJudge("m", decoder(), AnswerStore(tmp_path)).judge(cell, [[1, 2]], outcomes)
    assert (row.prefill_effective_block_sizes, row.decode_effective_block_sizes) == ([16, 16], [48, 16])
    assert row.prefill_effective_kernel_block_sizes == [1, 16]
    assert row.decode_effective_kernel_block_sizes == [3, 8]


@pytest.mark.parametrize(
    ("changes", "facts", "expected"),
    [
        ({}, [{"prefill0": engine(70), "decode0": engine(9, 0)}], (2, 70, 9)),
        (
            {"prefill": {"num_engines": 2}},
            [{"prefill0": engine(70), "prefill1": engine(4), "decode0": engine(9)}],
            (2, 74, 9),
        ),
        ({"mode": "aggregated"}, [{"prefill0": engine(70, 0)}, {"prefill0": engine(71, 0)}], (0, 141, None)),
        ({}, [{"prefill0": engine(None), "decode0": engine(9)}], (2, None, 9)),
        ({}, [{}], (None, None, None)),
        (
            {"decode": {"num_engines": 2}},
            [{"prefill0": engine(70), "decode0": engine(9), "decode1": engine(None)}],
            (2, 70, None),
        ),
    ],
)
def test_all_engines_of_a_side_and_all_repeats_are_added_up(
    changes: dict[str, Any], facts: list[dict[str, Any]], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    asked = spec(device="cpu", dtype="float32", checks=["kv_bytes"], repeat=len(facts), **changes)
    (cell,) = expand(load_spec(asked).spec, decoder())
    outcomes = [CellOutcome(num_kv_bytes_checked=1, wall_ns=1, facts=known) for known in facts]
    row = CellJudge("m", decoder(), AnswerStore(tmp_path)).judge(cell, [[1, 2]], outcomes)
    writer = ResultWriter(tmp_path / "run", spec_yaml="name: x", environment={"started": "now"}, resume=False)
    writer.write_cell(row, [], [])
    cells = load(tmp_path / "run").cells
    found = cells[COLUMNS].to_numpy(dtype=float)
    np.testing.assert_array_equal(found, [[np.nan if count is None else count for count in expected]])
