"""What jobs/benchmarks/offload_overlap.py counts as a step that storing delayed."""

from __future__ import annotations

import pytest

from jobs.benchmarks.offload_overlap import LARGE_BYTES, TITLES, Measured, summary

STEP_S = 0.1


def _measured(stalls: dict[int, float]) -> Measured:
    """100 steps from 0 s on, of 0.1 s, or as many more as `stalls` says; 2 s to 4 s of them are stored in."""
    times, now = [], 0.0
    for i in range(100):
        times.append(now)
        now += STEP_S + stalls.get(i, 0.0)
    store = 2.0, 4.0, LARGE_BYTES
    return Measured(token_times=[times], stores={store}, rounds=[(1.9, 4.1)])


def test_steps_are_within_stores_or_between_them() -> None:
    within, between = _measured({}).steps()
    assert (len(within), len(between)) == (pytest.approx(20, abs=1), pytest.approx(69, abs=2))
    assert within + between == pytest.approx([STEP_S] * len(within + between))


def test_a_stall_at_the_end_of_a_store_is_that_stores() -> None:
    """It begins at 3.9 s, within the store, which is over a ninth of it later."""
    within, between = _measured({39: 0.8}).steps()
    assert max(within) == pytest.approx(0.9)
    assert max(between) == pytest.approx(STEP_S)


def test_a_stall_at_the_begin_of_a_store_is_that_stores() -> None:
    """It ends at 2.05 s: the first of the store."""
    within, between = _measured({11: 0.85}).steps()
    assert max(within) == pytest.approx(0.95)
    assert max(between) == pytest.approx(STEP_S)


def test_a_stall_between_stores_is_nobodys() -> None:
    within, between = _measured({60: 0.8}).steps()
    assert max(within) == pytest.approx(STEP_S)
    assert max(between) == pytest.approx(0.9)


def test_small_stores_are_neither_within_nor_between() -> None:
    measured = _measured({})
    num_between = len(measured.steps()[1])
    measured.stores.add((6.0, 6.02, LARGE_BYTES // 4))
    assert len(measured.steps()[1]) in (num_between - 1, num_between - 2)
    assert len(measured.steps()[0]) == pytest.approx(20, abs=1)


def test_the_fall_is_of_mean_steps() -> None:
    cells, fall, rate = summary(_measured(dict.fromkeys(range(20, 37), 0.025)), tp=1)
    assert 0 < fall < 20
    assert cells[-1] == f"{fall:.1f} %"
    assert rate == pytest.approx(LARGE_BYTES / 2.0 / 1e9)
    assert len(cells) == len(TITLES)
