"""jobs/benchmarks/offload_copies.py: copies per block are what the orders of axes allow, by arithmetic."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.markers import thorough

pytestmark = thorough

SCRIPT = Path(__file__).parents[2] / "jobs" / "benchmarks" / "offload_copies.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("offload_copies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def runs(case: Any, num_layers: int, num_heads: int) -> int:
    """Of one block's slice of heads of one rank: axes join from the innermost on while both orders agree and
    the axes inside are whole on both sides."""
    num_rows = min(case.block_size, case.tier_block_size)
    sizes = {"L": num_layers, "H": num_heads // case.tp, "N": num_rows}
    cut = {
        name
        for name, is_cut in (("H", case.tp > 1), ("N", case.block_size != case.tier_block_size))
        if is_cut
    }
    for here, there in zip(reversed(case.layout[:-1]), reversed(case.tier_layout[:-1]), strict=True):
        if here != there or here == "B":
            break
        del sizes[here]
        if here in cut:
            break
    product = 1
    for size in sizes.values():
        product *= size
    return product


def test_every_case_takes_as_many_copies_as_its_axes_allow(script: ModuleType) -> None:
    """Each a real store and a real load, whose rows say what was asked of the transport."""
    found: Counter[int] = Counter()
    for case in script.cases():
        copies = script.measure(case)
        wanted = runs(case, script.NUM_LAYERS, script.NUM_HEADS)
        assert (copies.num_stored, copies.num_loaded) == (wanted * case.num_slices,) * 2, case
        found[wanted] += 1
    assert found.total() == 4 * 3 * 2 * 2 * 2
    assert {1, script.NUM_LAYERS, script.NUM_LAYERS * script.NUM_HEADS} <= set(found)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("size", [16, 32])
def test_a_canonical_page_is_one_copy_and_pages_by_layer_are_as_many_as_layers(
    script: ModuleType, tp: int, size: int
) -> None:
    """Written out."""
    canonical = script.measure(script.Case("BHLNC", tp, size, "BHLNC", size))
    assert canonical.num_stored == canonical.num_loaded == 128 // size * tp
    layers = script.measure(script.Case("LBNHC", tp, size, "LBNHC", size))
    # A slice of heads is cut out of every row.
    per_block = 6 if tp == 1 else 6 * size
    assert layers.num_stored == layers.num_loaded == 128 // size * tp * per_block
    mixed = script.measure(script.Case("BLHNC", tp, size, "BHLNC", size))
    assert mixed.num_stored == mixed.num_loaded == 128 // size * 6 * 8


def test_the_table_has_a_row_per_engine_and_a_column_per_tier(script: ModuleType) -> None:
    rows = [[str(cell) for cell in row] for row in script.copies_rows("auto")]
    assert len(rows) == 4 * 3 * 2
    assert {len(row) for row in rows} == {3 + len(script.COLUMNS)} == {3 + 4}
    assert rows[0][:4] == ["BHLNC", "1", "16", "1 / 1"]
    copies = script.measure(script.Case("LBNHC", 1, 16, "LBNHC", 16), "auto")
    assert (copies.num_stored, copies.num_loaded) == (48, 48), "six layers, eight blocks"
