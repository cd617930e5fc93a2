"""Pauses after failures in a row, by a clock of our own."""

from __future__ import annotations

import random

import pytest

from rayk.offload.backoff import FIRST_S, IN_ROW, LONGEST_S, Backoff

S = 10**9


def fail(backoff: Backoff, now: int, took: int = S) -> float:
    """Something that began at `now`, and took so long."""
    assert backoff.may_try(now)
    return backoff.failed(now, now + took, "it stood still")


def test_one_failure_alone_changes_nothing() -> None:
    backoff = Backoff()
    for i in range(0, 100, 2):
        assert fail(backoff, i * S) == 0
        assert backoff.may_try((i + 1) * S)
        backoff.worked()
        assert backoff.describe((i + 1) * S) == ""


def test_pauses_double_up_to_the_longest_and_one_is_tried_after_each() -> None:
    backoff, now, pauses = Backoff(), 0, []
    for _ in range(IN_ROW - 1):
        assert fail(backoff, now) == 0
        now += S
    for _ in range(8):
        pauses.append(fail(backoff, now))
        now += S
        end = now + int(pauses[-1] * S)
        assert not any(backoff.may_try(at) for at in range(now, end, S // 10))
        assert "it stood still" in backoff.describe(now)
        now = end
    assert pauses == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, *[LONGEST_S] * 4]
    assert backoff.may_try(now)
    assert not backoff.may_try(now + S), "one is enough"
    backoff.worked()
    assert all(backoff.may_try(now + S) for _ in range(5))
    assert fail(backoff, now + S) == 0, "all is forgotten"


def test_failures_that_began_before_the_pause_tell_nothing_new() -> None:
    backoff = Backoff()
    for i in range(20):
        assert backoff.may_try(i)
    pauses = [backoff.failed(i, S + i, "it stood still") for i in range(20)]
    assert [p for p in pauses if p] == [FIRST_S]
    assert fail(backoff, 7 * S) == 2 * FIRST_S


@pytest.mark.parametrize("is_heard_of", [True, False])
def test_a_trial_that_tells_nothing_is_followed_by_another(is_heard_of: bool) -> None:
    backoff = Backoff()
    fail(backoff, 0)
    fail(backoff, S)
    now = int((2 + FIRST_S) * S)
    assert backoff.may_try(now)
    if is_heard_of:
        backoff.nothing_tried(1, now + S)
        assert not backoff.may_try(now + S), "that was another one, which began before the pause"
        backoff.nothing_tried(now, now + S)
        assert backoff.may_try(now + S)
    assert not backoff.may_try(now + 2 * S)
    assert backoff.may_try(now + int((1 + FIRST_S) * S))


def test_what_is_lost_for_ever_is_a_bounded_share_and_what_mends_comes_back() -> None:
    """Attempts that fail after 4 s each, for as long as the fault lasts; others come all the time."""
    for seed in range(20):
        draw, backoff = random.Random(seed), Backoff()
        fault_s, now, lost = draw.uniform(0, 2000), 0.0, 0.0
        mended = None
        while mended is None or now < mended + 10:
            now += draw.uniform(0.01, 3)
            if not backoff.may_try(int(now * S)):
                assert now < fault_s + LONGEST_S + 4
                continue
            if now < fault_s:
                began, now, lost = now, now + 4, lost + 4
                backoff.failed(int(began * S), int(now * S), "it stood still")
            else:
                mended = now if mended is None else mended
                backoff.worked()
        assert lost <= 4 * (IN_ROW + 4 + fault_s / LONGEST_S), seed
