"""A read that does not begin: the producer gets its blocks back at once, and no room of ours is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from rayk.transfer import consumer as consumer_module
from rayk.transfer.local_agent import LocalAgent
from rayk.transfer.rank import TransferRank
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.ticket_seal import sealed
from rayk.types.errors import HandshakeMismatch, InternalError, TransferError
from tests.transfer.cluster import Pair, Shape, local_pair
from tests.transfer.test_convert import Link

TABLES = [[3, 7, 5]]
OWN = [[1, 2, 3]]


def pair_with_ticket() -> tuple[Pair, TransferTicket]:
    pair = local_pair(Shape())
    pair.producer.write(pair.producer.shape.values(10), TABLES)
    return pair, replace(pair.producer.ticket(10, TABLES), lease_ns=10**9)


def with_held_lease(pair: Pair, ticket: TransferTicket) -> TransferRank:
    """The consumer's rank, where a ticket waits for blocks."""
    (rank,) = pair.consumer.ranks
    rank.hold(ticket)
    return rank


def later() -> int:
    return time.monotonic_ns() + 60_000_000_000


def in_wire(link: Link) -> int:
    """Blocks of the wire cache that somebody holds."""
    wire = link.d.ranks[0]._links["p"].wire
    assert wire is not None
    return int(wire._pool.num_blocks - 1 - wire.num_free_blocks)


@pytest.mark.parametrize("was_held", [True, False])
def test_a_refused_read_releases_its_lease(was_held: bool):
    pair, ticket = pair_with_ticket()
    rank = with_held_lease(pair, ticket) if was_held else pair.consumer.ranks[0]
    with pytest.raises(TransferError, match="neither here nor offered"):
        rank.start(replace(ticket, first_row=4), OWN, later())
    assert pair.released() == [["lease-r"]]
    assert not rank._waiting, "nobody renews it any more"


def test_a_changed_ticket_releases_no_lease_of_its_own_choice():
    """But that of the ticket that was held before."""
    pair, ticket = pair_with_ticket()
    changed = replace(sealed(ticket), lease_id="lease-other")
    for side in pair.producer.ranks:
        side.lease("lease-other", later())
    with pytest.raises(TransferError, match="the seal does not fit"):
        pair.consumer.ranks[0].start(changed, OWN, later())
    pair.poll()
    assert pair.producer.ranks[0]._leases.open_leases == ("lease-r", "lease-other")
    rank = with_held_lease(pair, ticket)
    with pytest.raises(TransferError, match="the seal does not fit"):
        rank.start(changed, OWN, later())
    assert pair.released() == [["lease-r"]]


def test_a_ticket_of_another_life_is_waited_for_no_longer():
    pair, ticket = pair_with_ticket()
    rank = with_held_lease(pair, ticket)
    with pytest.raises(HandshakeMismatch):
        rank.start(replace(ticket, epoch=9), OWN, later())
    assert pair.released() == [["lease-r"]], "by the one that was held"


@pytest.mark.parametrize("where", ["begin", "first read", "generations", "verify"])
def test_a_bug_ends_one_read_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
):
    pair, ticket = pair_with_ticket()
    rank = with_held_lease(pair, ticket)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    if where == "begin":
        monkeypatch.setattr(consumer_module.Consumption, "_lower", broken)
        with pytest.raises(InternalError, match="ZeroDivisionError: planted"):
            rank.start(ticket, OWN, later())
    else:
        what = {
            "first read": (LocalAgent, "read"),
            "generations": (consumer_module.Consumption, "_expected_generations"),
            "verify": (consumer_module, "compare_digests"),
        }[where]
        monkeypatch.setattr(*what, broken)
        rank.start(ticket, OWN, later())
        (outcome,) = pair.finish(ticket).values()
        assert isinstance(outcome.error, TransferError)
        assert "ZeroDivisionError: planted" in outcome.error.reason
        assert not outcome.is_draining
    assert "in broken" in caplog.text, "the traceback is in the log"
    assert pair.released() == [["lease-r"]]
    monkeypatch.undo()
    again = pair.producer.ticket(10, TABLES, "again")
    pair.start(again, OWN)
    assert all(o.ok for o in pair.finish(again).values())


def test_a_bug_that_comes_at_every_turn_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pair, ticket = pair_with_ticket()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(consumer_module.DataReads, "poll", broken)
    pair.consumer.agents[0].delay_polls = 10**6
    monkeypatch.setattr(LocalAgent, "release", lambda *_: False)
    pair.consumer.ranks[0].start(ticket, OWN, later())
    outcomes = [outcome for _ in range(5) for _, outcome in pair.poll()]
    assert [type(outcome.error) for outcome in outcomes] == [TransferError]
    assert outcomes[0].is_draining, "its blocks stay: they may still be written"
    assert caplog.text.count("Traceback") == 1


def test_a_late_first_read_gives_its_room_back():
    """Also where no engine is being connected any more."""
    pair = local_pair(Shape())
    (rank,) = pair.consumer.ranks
    lent = rank._landing._slots.num_lent
    pair.consumer.agents[0].delay_polls = 2
    assert not rank.wire("p", 60.0)
    rank._wirings.forget("p")
    assert rank._landing._slots.num_lent == lent + 1
    for _ in range(3):
        rank.poll(time.monotonic_ns())
    assert rank._landing._slots.num_lent == lent


def test_a_read_that_comes_twice_takes_its_room_once():
    link = Link(("float16", "fp8_e4m3"))
    tables, own = link.p.tables(3), link.d.tables(5)
    link.p.write(tables)
    wire = link.d.ranks[0]._links["p"].wire
    assert wire is not None
    everything = wire._pool.allocate(wire.num_free_blocks)
    ticket = link.ticket(tables)
    link.start(ticket, own)  # waits for room
    link.start(ticket, own)
    wire._pool.free(everything)
    (outcome,) = link.finish(1)
    assert outcome.ok, outcome.error
    link.poll()
    assert in_wire(link) == 0


def test_a_bug_at_the_start_of_a_conversion_keeps_no_room(monkeypatch: pytest.MonkeyPatch):
    link = Link(("float16", "fp8_e4m3"))
    tables, own = link.p.tables(3), link.d.tables(5)
    link.p.write(tables)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(consumer_module.Consumption, "_lower", broken)
    link.start(link.ticket(tables), own)
    (outcome,) = link.finish(1)
    assert isinstance(outcome.error, InternalError)
    assert in_wire(link) == 0
    link.poll()
    assert link.p.ranks[0].released() == ["lease-r"]
    monkeypatch.undo()
    link.start(link.ticket(tables, "again"), own)
    (outcome,) = link.finish(1)
    assert outcome.ok
