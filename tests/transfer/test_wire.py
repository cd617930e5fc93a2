"""The first reads, which set the network up before requests come."""

from __future__ import annotations

import pytest

from rayk.transfer.rank import TransferRank
from rayk.types.errors import TransferError
from tests.transfer.cluster import Shape, local_pair


def wire(rank: TransferRank, timeout_s: float) -> int:
    """To the end; how often it was asked."""
    count = 1
    while not rank.wire("p", timeout_s):
        count += 1
    return count


def test_wiring_reads_from_every_rank_and_leaves_nothing_behind():
    shape = Shape(tp=(4, 2))
    pair = local_pair(shape, delay_polls=3)
    for rank in pair.consumer.ranks:
        for _ in range(3):
            assert wire(rank, 60.0) > 1, "it does not wait inside"
    values = shape.values(30)
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None, None]
    pair.consumer.check(values, tables)
    assert pair.released() == [["lease-r"]] * 4


def test_a_rank_that_does_not_answer_is_named_in_time():
    pair = local_pair(Shape(tp=(2, 1)), delay_polls=10**9)
    with pytest.raises(TransferError, match="from p to .*rank 0 cannot be read from: it does not answer"):
        wire(pair.consumer.ranks[0], 0.2)


def test_a_rank_that_is_gone_is_named():
    pair = local_pair(Shape(tp=(2, 1)))
    pair.producer.ranks[1].close()
    with pytest.raises(TransferError, match="rank 1 cannot be read from: peer .* is gone"):
        wire(pair.consumer.ranks[0], 60.0)
    landing = pair.consumer.ranks[0]._landing
    assert landing._slots.num_lent == 0


def test_a_late_answer_gives_its_room_back():
    pair = local_pair(Shape(tp=(2, 1)), delay_polls=10**9)
    (rank,) = pair.consumer.ranks
    with pytest.raises(TransferError, match="it does not answer"):
        wire(rank, 0.0)
    landing = rank._landing
    assert landing._slots.num_lent == 2, "the bytes may still come"
    for pending in rank._agent._in_flight.values():  # type: ignore[attr-defined]
        pending.polls_left = 0
    with pytest.raises(TransferError, match="it does not answer"):
        wire(rank, 0.0)
    assert landing._slots.num_lent == 2, "of the new ones"
