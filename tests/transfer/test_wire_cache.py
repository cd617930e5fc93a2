"""A wire cache is registered as long as its producer engine is there, and until its last block is free."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

from rayk.transfer.local_agent import LocalAgent
from rayk.transfer.rank import TransferRank
from rayk.transfer.wire import WireCache
from rayk.types.errors import TransferError
from tests.transfer.test_convert import Link

FORMATS = ("float16", "fp8_e4m3")


def wire_of(rank: TransferRank) -> WireCache:
    wire = rank._links["p"].wire
    assert wire is not None
    return wire


def num_registered(rank: TransferRank) -> int:
    return len(rank._agent._regions)  # type: ignore[attr-defined]


def lives(link: Link, epoch: int) -> list[list[Any]]:
    """Descriptions of both engines, the producer in another life."""
    return [
        [replace(r.description, epoch=epoch) for r in link.p.ranks],
        [r.description for r in link.d.ranks],
    ]


def test_a_producer_that_comes_again_and_again_costs_one_wire_cache():
    link = Link(FORMATS)
    (rank,) = link.d.ranks
    before, first = num_registered(rank), weakref.ref(wire_of(rank))
    for epoch in range(1, 5):
        rank.connect(*lives(link, epoch))
        assert num_registered(rank) == before
    gc.collect()
    assert first() is None, "its memory is free"
    rank.disconnect("p")
    assert num_registered(rank) == before - 1


def test_it_stays_as_long_as_something_may_arrive_in_it(monkeypatch: pytest.MonkeyPatch):
    link = Link(FORMATS, (1, 1), {}, {"delay_polls": 10**9})
    (rank,) = link.d.ranks
    tables, own = link.p.tables(3), link.d.tables(5)
    link.p.write(tables)
    wire, before = wire_of(rank), num_registered(rank)
    # Nothing in flight can be cancelled, as over NIXL.
    monkeypatch.setattr(LocalAgent, "release", lambda agent, transfer: False)
    link.start(link.ticket(tables), own)
    rank.disconnect("p")
    (outcome,) = link.finish(1)
    assert outcome.is_draining
    assert num_registered(rank) == before
    assert wire.num_free_blocks < wire.caches.geometry.num_blocks - 1
    monkeypatch.undo()
    for pending in rank._agent._in_flight.values():  # type: ignore[attr-defined]
        pending.polls_left = 0
    until = time.monotonic() + 60
    while not (drained := rank.drained()):
        assert time.monotonic() < until
        rank.poll(time.monotonic_ns())
    assert drained == ["lease-r"]
    assert num_registered(rank) == before - 1


def test_a_connect_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    link = Link(FORMATS)
    (rank,) = link.d.ranks
    rank.disconnect("p")
    before = num_registered(rank)

    def refuse(*_: Any) -> Any:
        raise TransferError("", "planted")

    monkeypatch.setattr(LocalAgent, "prepare", refuse)
    for epoch in range(1, 4):
        with pytest.raises(TransferError, match="planted"):
            rank.connect(*lives(link, epoch))
        assert num_registered(rank) == before
        assert not rank._agent._peers  # type: ignore[attr-defined]
    monkeypatch.undo()
    rank.connect(*lives(link, 4))
    assert num_registered(rank) == before + 1
