"""Free ids kept as runs, against a plain set of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.kv import free_runs
from rayk.kv.free_runs import FreeRuns

NUM_IDS = 37


def first_run(free: set[int], count: int) -> int | None:
    """The first id from which so many are free, that begins a run of free ones."""
    starts = (i for i in sorted(free) if i - 1 not in free)
    return next((i for i in starts if all(i + n in free for n in range(count))), None)


def check(runs: FreeRuns, free: set[int]) -> None:
    assert len(runs) == len(free)
    assert [i for i in range(NUM_IDS) if i in runs] == sorted(free)
    assert [runs.first(n) for n in range(1, NUM_IDS)] == [first_run(free, n) for n in range(1, NUM_IDS)]


@pytest.mark.parametrize("near", [0, 5, 4096])
def test_ids_are_taken_as_of_a_set(near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_runs, "NEAR", near)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.data())
    def hold_equal(data: st.DataObject) -> None:
        runs, free = FreeRuns(NUM_IDS), set[int]()
        for _ in range(data.draw(st.integers(1, 25))):
            missing = sorted(set(range(NUM_IDS)) - free)
            what = data.draw(st.sampled_from(["add", "take", "take", "take", "lowest"]))
            if what == "add" or not free:
                added = data.draw(st.sets(st.sampled_from(missing))) if missing else set()
                runs.add_all(added)
                free |= added
            elif what == "take":
                wanted = data.draw(st.none() | st.integers(0, NUM_IDS - 1))
                expected = wanted if wanted in free else min(free)
                assert runs.take(wanted) == expected
                free.remove(expected)
            else:
                count = data.draw(st.integers(1, NUM_IDS))
                expected_ids = sorted(free)[:count]
                assert runs.take_lowest(count) == expected_ids
                free.difference_update(expected_ids)
            check(runs, free)

    hold_equal()
