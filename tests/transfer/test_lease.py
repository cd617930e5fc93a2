"""Leases that must be renewed: they end by themselves, and what is over stays over."""

from __future__ import annotations

from rayk.transfer import session as s
from rayk.transfer.lease import LeaseTable, ReleaseMessage, Renewals, RenewMessage

LENGTH = 30
DEADLINE = 100


def opened() -> LeaseTable:
    table = LeaseTable()
    table.open("a", DEADLINE, now_ns=0, lease_ns=LENGTH)
    return table


def test_a_lease_ends_when_nobody_has_renewed_it_for_its_length():
    table = opened()
    table.on_renew(RenewMessage("a", "d0", 1), 20)
    assert table.expire(49) == []
    assert table.expire(50) == ["a"]
    assert table.expire(51) == []


def test_a_lease_ends_at_its_deadline_however_often_it_was_renewed():
    table = opened()
    for number, now in enumerate(range(10, DEADLINE, 10)):
        table.on_renew(RenewMessage("a", "d0", number), now)
        assert table.expire(now) == []
    assert table.expire(DEADLINE) == ["a"]


def test_a_renewal_after_the_end_revives_nothing():
    """Neither before anybody has noticed the end, nor after."""
    table = opened()
    table.on_renew(RenewMessage("a", "d0", 1), LENGTH)
    assert table.expire(LENGTH) == ["a"]
    table.on_renew(RenewMessage("a", "d0", 2), LENGTH)
    assert table.open_leases == ()
    assert table.expire(DEADLINE) == []


def test_old_and_repeated_renewals_do_not_count():
    table = opened()
    table.on_renew(RenewMessage("a", "d0", 2), 10)
    table.on_renew(RenewMessage("a", "d0", 1), 30)
    table.on_renew(RenewMessage("a", "d0", 2), 35)
    assert table.expire(40) == ["a"]


def test_any_consumer_keeps_a_lease_until_it_has_released_it():
    table = opened()
    table.on_release(ReleaseMessage("a", "d0", 2))
    table.on_renew(RenewMessage("a", "d0", 1), 20)
    table.on_renew(RenewMessage("a", "d1", 1), 25)
    table.on_renew(RenewMessage("a", "d0", 2), 30)
    assert table.expire(54) == []
    assert table.expire(55) == ["a"]
    table.on_release(ReleaseMessage("a", "d1", 2))
    assert table.take_released() == []


def test_a_lease_without_a_length_lasts_until_its_deadline():
    table = LeaseTable()
    table.open("a", DEADLINE)
    table.on_renew(RenewMessage("a", "d0", 1), 10)
    assert table.expire(DEADLINE - 1) == []
    assert table.expire(DEADLINE) == ["a"]


def test_a_lease_that_was_ended_neither_expires_nor_is_released():
    table = opened()
    table.end("a")
    table.end("never opened")
    assert table.open_leases == ()
    table.on_release(ReleaseMessage("a", "d0", 1))
    assert table.take_released() == []
    assert table.expire(DEADLINE) == []


def test_renewals_come_three_times_within_a_length():
    renewals = Renewals(LENGTH)
    assert [now for now in range(100, 160) if renewals.is_due(now)] == [100, 110, 120, 130, 140, 150]
    never = Renewals(None)
    assert not any(never.is_due(now) for now in range(100))


def test_messages_are_told_apart():
    renewal, release = RenewMessage("a", "d0", 3), ReleaseMessage("a", "d0", 2)
    assert RenewMessage.decode(renewal.encode()) == renewal
    assert ReleaseMessage.decode(release.encode()) == release
    assert RenewMessage.decode(release.encode()) is None
    assert ReleaseMessage.decode(renewal.encode()) is None
    for junk in (b"", b"{}", b'["renew"]', b'["renew", "a", "b", "c"]', b'["release", 1, 2, null]', b"\xff"):
        assert RenewMessage.decode(junk) is None
        assert ReleaseMessage.decode(junk) is None


def renewals_of(session: s.Session, events: dict[int, s.Event], stop: int) -> list[int]:
    """When a session renews, ticked at every time; with these events besides."""
    times = []
    for now in range(stop):
        actions = session.handle(s.Tick(), now)
        actions += session.handle(events[now], now) if now in events else []
        times += [now for action in actions if isinstance(action, s.Renew)]
    return times


def session_of(num_reads: int = 1) -> s.Session:
    return s.Session(
        "r", num_reads=num_reads, fences={}, notify=(0, 1), deadline_ns=200, renewals=Renewals(LENGTH)
    )


def test_a_session_renews_until_it_releases():
    session = session_of()
    session.start()
    assert renewals_of(session, {25: s.Failed("cancelled")}, 60) == [0, 10, 20]


def test_a_lease_kept_after_a_mismatch_is_renewed():
    session = session_of(0)
    session.start()
    mismatch = s.KVMismatch("r", 0, 0, "k", 0, 0, "planted")
    assert renewals_of(session, {5: s.Verified(mismatch)}, 25) == [0, 10, 20]
    assert session.release() == [s.Release((0, 1))]
    assert renewals_of(session, {}, 60) == []


def test_the_first_release_says_how_many_there_will_be():
    table = opened()
    table.on_release(ReleaseMessage("a", "d0", 2))
    table.on_release(ReleaseMessage("a", "x0", 1))
    assert table.take_released() == []
    table.on_release(ReleaseMessage("a", "d1", 2))
    assert table.take_released() == ["a"]
