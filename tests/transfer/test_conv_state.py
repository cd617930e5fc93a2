"""jobs/benchmarks/conv_state.py counts what it says: nothing wrong as things are, and what is planted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.benchmarks import conv_state as job
from rayk.kv import maps
from rayk.kv.specs import Mamba2Spec

RESULTS = Path(job.__file__).parent / "results" / "conv_state.md"
SPEC = Mamba2Spec(64, "bfloat16", 4, 48, 64, 1, 128)
LAYOUTS = ("BHLNC", "BLNHC")


@pytest.mark.parametrize("num_groups", [1, 8])
@pytest.mark.parametrize("tp", list(itertools.product((1, 2, 4), repeat=2)), ids=lambda t: f"{t[0]}to{t[1]}")
def test_no_column_is_wrong_and_all_are_counted(tp: tuple[int, int], num_groups: int):
    counted = job.count_columns(replace(SPEC, num_groups=num_groups), tp, LAYOUTS)
    assert (counted.wrong, counted.outside) == (0, 0)
    # x once over all ranks, B and C whole on each where there is one group, else once, too.
    assert counted.total == 3072 + (tp[1] if num_groups == 1 else 8) * 256
    theirs = job.VLLM_ONE_GROUP.get(tp, (counted.total, 0, 0))
    assert counted.total == theirs[0] or num_groups == 8
    # The table that is kept says the same.
    kept = dict(zip((1, 8), RESULTS.read_text().split("## n_groups = ")[1:], strict=True))[num_groups]
    beside = "/".join(map(str, theirs)) if num_groups == 1 else "0 wrong"
    assert f"| {tp[0]} -> {tp[1]} | {beside} | {counted} |" in kept.splitlines()


@pytest.mark.parametrize(
    ("name", "by", "wrong", "outside"),
    [("conv_b", 6 * 10, 128, 0), ("conv_c", 6 * 10, 128, 10)],
    ids=["b-into-c", "c-into-states"],
)
def test_columns_read_elsewhere_are_counted(monkeypatch, name: str, by: int, wrong: int, outside: int):
    """The source's B or C, 10 columns of 6 bytes too late; behind C lie the states."""
    original, calls = maps._rows, []

    def rows(group: Any, field: Any, *args: Any) -> Any:
        calls.append(field)
        is_hit = len(calls) % 2 == 1 and field.field.name == name
        return original(group, replace(field, offset=field.offset + by) if is_hit else field, *args)

    monkeypatch.setattr(maps, "_rows", rows)
    counted = job.count_columns(SPEC, (1, 2), ("BLHNC", "BHLNC"))
    # On each of two ranks.
    assert (counted.wrong, counted.outside) == (2 * wrong, 2 * outside)
