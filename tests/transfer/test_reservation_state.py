"""Who may still write into reserved blocks, message by message."""

from __future__ import annotations

from rayk.transfer.push_messages import ArrivedMessage, StoppedMessage
from rayk.transfer.reservation_state import ReservationTable, StoppedTable, StopRequest

EVERY = 10


def table_of(*reservations: tuple[str, str, int], num_producers: int = 1) -> ReservationTable:
    """(reservation, engine, epoch)."""
    table = ReservationTable(EVERY)
    for reservation_id, engine, epoch in reservations:
        table.open(reservation_id, engine, epoch, num_producers)
    return table


def test_blocks_are_clear_when_every_rank_has_stopped():
    table = table_of(("a", "p0", 0), num_producers=2)
    table.stop("a", 0)
    assert table.tick(0) == [StopRequest("a", (0, 1))]
    table.on_stopped(StoppedMessage("a", 1, "aborted"))
    assert table.take_clear() == []
    assert table.open_reservations == ("a",)
    assert table.stopped("a") == {1: "aborted"}
    table.on_stopped(StoppedMessage("a", 0))
    assert table.take_clear() == ["a"]
    assert table.take_clear() == []
    assert table.open_reservations == ()


def test_ranks_that_must_stop_are_asked_again_and_only_they():
    table = table_of(("a", "p0", 0), ("b", "p0", 0), num_producers=3)
    assert table.tick(0) == []
    table.stop("a", 5)
    assert table.tick(4) == []
    assert table.tick(5) == [StopRequest("a", (0, 1, 2))]
    assert table.tick(5 + EVERY - 1) == []
    table.on_stopped(StoppedMessage("a", 1))
    assert table.tick(5 + EVERY) == [StopRequest("a", (0, 2))]
    # To want blocks back twice is to ask no sooner.
    table.stop("a", 5 + EVERY + 1)
    assert table.tick(5 + EVERY + 1) == []


def test_the_end_of_one_life_says_nothing_of_the_next():
    table = table_of(("old", "p0", 0), ("new", "p0", 1), ("other", "p1", 0), num_producers=2)
    for reservation_id in ("old", "new", "other"):
        table.stop(reservation_id, 0)
    table.on_engine_gone("p0", 0)
    assert table.take_clear() == ["old"]
    assert table.open_reservations == ("new", "other")
    assert table.stopped("new") == {}
    assert table.tick(0) == [StopRequest("new", (0, 1)), StopRequest("other", (0, 1))]
    # A late word of the first life's end.
    table.on_engine_gone("p0", 0)
    assert table.take_clear() == []
    table.on_engine_gone("p0", 1)
    assert table.take_clear() == ["new"]


def test_an_engine_that_goes_before_blocks_are_wanted_back_is_noted():
    table = table_of(("a", "p0", 3), num_producers=2)
    table.on_stopped(StoppedMessage("a", 0, "aborted"))
    table.on_engine_gone("p0", 3)
    assert table.stopped("a") == {0: "aborted", 1: "producer engine p0 is gone"}
    assert table.take_clear() == []
    table.stop("a", 0)
    assert table.take_clear() == ["a"]


def test_nobody_hears_of_reservations_that_are_not_here():
    table = table_of(("a", "p0", 0))
    table.stop("b", 0)
    table.on_progress(ArrivedMessage("b", 0, 0, 0))
    table.on_stopped(StoppedMessage("b", 0))
    table.on_engine_gone("p7", 0)
    assert not table.has_arrived("b", 0, 0)
    assert table.stopped("b") == {}
    assert (table.tick(0), table.take_clear(), table.open_reservations) == ([], [], ("a",))


def test_messages_of_what_is_clear_change_nothing():
    table = table_of(("a", "p0", 0))
    table.stop("a", 0)
    table.on_stopped(StoppedMessage("a", 0))
    assert table.take_clear() == ["a"]
    table.on_stopped(StoppedMessage("a", 0))
    table.on_progress(ArrivedMessage("a", 0, 0, 0))
    table.on_engine_gone("p0", 0)
    table.stop("a", 1)
    assert (table.take_clear(), table.tick(1)) == ([], [])
    assert not table.has_arrived("a", 0, 0)


def test_messages_that_come_twice_or_from_strangers_count_for_nothing():
    table = table_of(("a", "p0", 0), num_producers=2)
    table.stop("a", 0)
    for message in (
        StoppedMessage("a", 0, "first"),
        StoppedMessage("a", 0, "second"),
        StoppedMessage("a", 2),
    ):
        table.on_stopped(message)
    assert table.stopped("a") == {0: "first"}
    assert table.take_clear() == []
    table.on_progress(ArrivedMessage("a", 0, 2, 0))
    assert not table.has_arrived("a", 2, 0)


def test_the_latest_attempt_counts_in_whatever_order_they_come():
    table = table_of(("a", "p0", 0), num_producers=2)
    table.on_progress(ArrivedMessage("a", 1, 1, 0))
    table.on_progress(ArrivedMessage("a", 0, 1, 0))
    table.on_progress(ArrivedMessage("a", 1, 1, 0))
    assert [table.has_arrived("a", 1, attempt) for attempt in (0, 1)] == [False, True]
    assert not table.has_arrived("a", 0, 1)
    table.on_progress(ArrivedMessage("a", 1, 0, 0))
    assert table.has_arrived("a", 0, 1)
    assert table.has_arrived("a", 1, 1)


def test_an_arrival_of_the_tickets_attempt_is_a_ranks_last_word():
    table = table_of(("a", "p0", 0), num_producers=2)
    table.on_progress(ArrivedMessage("a", 1, 0, 0))
    table.on_progress(ArrivedMessage("a", 0, 1, 0))
    table.stop("a", 0, attempt=1)
    # Rank 1 has yet to write what it was begun anew for.
    assert table.tick(0) == [StopRequest("a", (1,))]
    table.on_stopped(StoppedMessage("a", 1))
    assert table.take_clear() == ["a"]


def test_without_a_ticket_an_arrival_is_no_last_word():
    table = table_of(("a", "p0", 0))
    table.on_progress(ArrivedMessage("a", 0, 0, 0))
    table.stop("a", 0)
    assert table.take_clear() == []
    assert table.tick(0) == [StopRequest("a", (0,))]


def test_a_producer_remembers_what_was_stopped_before_it_began(monkeypatch):
    monkeypatch.setattr(StoppedTable, "MAX_REMEMBERED", 3)
    stopped = StoppedTable()
    assert "a" not in stopped
    for reservation_id in ("a", "b", "b", "c"):
        stopped.stop(reservation_id)
    assert all(name in stopped for name in "abc")
    stopped.stop("d")
    assert "a" not in stopped
    assert all(name in stopped for name in "bcd")
