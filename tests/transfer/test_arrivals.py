"""What a consumer rank makes of the messages of a push: in any order, twice, of attempts that are void."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.transfer.arrivals import Arrivals
from rayk.transfer.push_messages import ArrivedMessage, PushMessage, StoppedMessage, WroteMessage
from tests.each import each

OF_NEW: list[PushMessage] = [
    WroteMessage("w", 1, 0, 0),
    WroteMessage("w", 1, 0, 1),
    ArrivedMessage("w", 1, 0, 2),
]
OF_OLD: list[PushMessage] = [WroteMessage("w", 0, 0, 2), ArrivedMessage("w", 0, 0, 1)]
NOISE: list[PushMessage] = [
    WroteMessage("other", 1, 0, 5),
    WroteMessage("w", 1, 1, 3),
    ArrivedMessage("other", 1, 0, 0),
]


def reserved() -> Arrivals:
    """Two producer ranks; the second sends nothing here."""
    link: Any = SimpleNamespace(
        engine="p",
        epoch=3,
        producers=(SimpleNamespace(agent_name="p0"), SimpleNamespace(agent_name="p1")),
        plan=SimpleNamespace(producer_ranks=(0,)),
    )
    arrivals = Arrivals()
    arrivals.open("w", link, [[0, 4, 5]], [[0, 7, 7]])
    return arrivals


@each("order", itertools.permutations(range(5)), ids=str)
def test_an_attempt_is_here_when_all_of_it_is(order: tuple[int, ...]) -> None:
    arrivals, told = reserved(), set()
    for index in order:
        message = [*OF_NEW, *OF_OLD][index]
        for m in (message, *NOISE, message):
            arrivals.take(m, f"p{m.producer_rank}")
        told.add(index)
        assert arrivals.has_arrived("w", 0, 1) == (told >= {0, 1, 2})
    assert not arrivals.has_arrived("w", 0, 0), "a later attempt has begun"
    assert not arrivals.has_arrived("w", 1, 1), "it sends nothing here"


def test_blocks_are_clear_when_nobody_writes_any_more() -> None:
    arrivals = reserved()
    arrivals.stop("w", now_ns=0)
    assert arrivals.take_clear() == []
    (asked,) = arrivals.stop_requests(0)
    assert asked[1].producer_ranks == (0,)
    assert arrivals.stop_requests(1) == [], "asked a moment ago"
    assert len(arrivals.stop_requests(10**9)) == 1, "messages get lost"
    for message in OF_NEW:
        arrivals.take(message, "p0-push")
    assert arrivals.take_clear() == [], "another attempt may follow"
    arrivals.take(StoppedMessage("w", 0), "p0-push")
    arrivals.take(StoppedMessage("w", 0), "p0-push")
    assert arrivals.take_clear() == ["w"]
    assert arrivals.take_clear() == []
    assert arrivals.why_stopped("w", 0) is not None


def test_after_the_tickets_attempt_nobody_needs_to_be_asked() -> None:
    arrivals = reserved()
    for message in OF_NEW:
        arrivals.take(message, "p0-push")
    arrivals.stop("w", now_ns=0, attempt=1)
    assert arrivals.stop_requests(0) == []
    assert arrivals.take_clear() == ["w"]


def test_a_life_of_the_producer_that_is_over_writes_nothing() -> None:
    arrivals = reserved()
    arrivals.on_engine_gone("p", 2)
    assert arrivals.why_stopped("w", 0) is None
    arrivals.on_engine_gone("p", 3)
    assert "gone" in str(arrivals.why_stopped("w", 0))
    arrivals.stop("w", now_ns=0)
    assert arrivals.take_clear() == ["w"]


def test_a_block_that_was_handed_out_again_is_named() -> None:
    arrivals = reserved()
    now = [[9, 7, 7]]
    assert arrivals.lost_block("w", lambda tables: now) is None, "the null block's generation means nothing"
    now[0][2] = 8
    assert arrivals.lost_block("w", lambda tables: now) == 5


def test_what_was_never_opened_is_clear_at_once() -> None:
    arrivals = Arrivals()
    arrivals.stop("unknown", now_ns=0)
    assert arrivals.take_clear() == ["unknown"]


@pytest.mark.parametrize("peer", ["stranger", "p1-push"])
def test_nobody_speaks_for_a_producer_rank(peer: str) -> None:
    arrivals = reserved()
    arrivals.stop("w", now_ns=0)
    for message in (StoppedMessage("w", 0), WroteMessage("w", 2**62, 0, 0), StoppedMessage("w", 2**62)):
        arrivals.take(message, peer)
    assert arrivals.take_clear() == []
    for message in OF_NEW:
        arrivals.take(message, "p0-push")
    assert arrivals.has_arrived("w", 0, 1)
