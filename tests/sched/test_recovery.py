"""What a failure policy decides."""

from __future__ import annotations

import pytest

from rayk.sched.recovery import (
    Cause,
    Failure,
    GiveUp,
    Migrate,
    Recompute,
    Recovery,
    attempt_id,
    cause_of,
)
from rayk.types.errors import (
    DeadlineExceeded,
    EngineDied,
    HandshakeMismatch,
    KVMismatch,
    RaykError,
    SpecError,
    TransferError,
)

LIVE = (True, True, True)


def test_fail_gives_up():
    assert Recovery("fail", 3).decide(Failure(Cause.TRANSFER, 0), producers_live=LIVE) == GiveUp()


def test_recompute_keeps_what_is_valid_unless_its_engine_is_another():
    failure = Failure(Cause.MISMATCH, 0, num_valid_tokens=7)
    assert Recovery("recompute", 3).decide(failure, producers_live=LIVE) == Recompute(7)
    lost = Failure(Cause.CONSUMER_LOST, 0, num_valid_tokens=7)
    assert Recovery("recompute", 3).decide(lost, producers_live=LIVE) == Recompute(0)


@pytest.mark.parametrize(
    ("failed", "live", "expected"),
    [
        (0, (True, True, True), Migrate(1)),
        (2, (True, True, True), Migrate(0)),
        (0, (False, False, True), Migrate(2)),
        (1, (False, True, False), Migrate(1)),
        (1, (False, False, False), GiveUp()),
    ],
)
def test_migrate_goes_to_the_next_that_lives_and_to_the_same_last(
    failed: int, live: tuple[bool, ...], expected: object
):
    failure = Failure(Cause.TRANSFER, failed)
    assert Recovery("migrate", 3).decide(failure, producers_live=live) == expected


@pytest.mark.parametrize("policy", ["recompute", "migrate"])
@pytest.mark.parametrize("cause", [Cause.DEADLINE, Cause.REFUSED])
def test_some_failures_are_final(policy, cause: Cause):
    assert Recovery(policy, 3).decide(Failure(cause, 0), producers_live=LIVE) == GiveUp()


@pytest.mark.parametrize("policy", ["recompute", "migrate"])
def test_nobody_goes_on_without_a_consumer(policy):
    recovery = Recovery(policy, 3)
    failure = Failure(Cause.CONSUMER_LOST, 0)
    assert recovery.decide(failure, producers_live=LIVE, consumer_lives=False) == GiveUp()
    assert recovery.num_attempts == 1


def test_attempts_are_counted():
    recovery = Recovery("migrate", 3, max_attempts=3)
    failure = Failure(Cause.TRANSFER, 0)
    decided = [recovery.decide(failure, producers_live=LIVE) for _ in range(3)]
    assert decided == [Migrate(1), Migrate(1), GiveUp()]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TransferError("r", "lost"), Cause.TRANSFER),
        (KVMismatch("r", 0, 0, "k", 0, 0, "?"), Cause.MISMATCH),
        (EngineDied("p", "?"), Cause.PRODUCER_LOST),
        (EngineDied("d", "?"), Cause.CONSUMER_LOST),
        (EngineDied("other", "?"), Cause.REFUSED),
        (DeadlineExceeded("r", 1.0), Cause.DEADLINE),
        (HandshakeMismatch((("engine", "p epoch 1", "p epoch 2"),)), Cause.TRANSFER),
        (HandshakeMismatch((("block_size", "4", "8"),)), Cause.REFUSED),
        (SpecError("nonsense"), Cause.REFUSED),
    ],
    ids=str,
)
def test_errors_have_causes(error: RaykError, cause: Cause):
    assert cause_of(error, producer="p", consumer="d") is cause


def test_attempts_have_names_of_their_own():
    names = [attempt_id("r", attempt) for attempt in range(3)]
    assert names[0] == "r"
    assert len(set(names)) == 3
