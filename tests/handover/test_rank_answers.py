"""What rank 0 does with its ranks' answers: it waits for each of them, and makes one ticket of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from rayk.handover.commands import TicketPart
from rayk.handover.rank_answers import RankAnswers
from rayk.handover.tickets import make_ticket
from rayk.transfer.ticket_seal import is_whole

FIELDS = {
    "request_id": "r",
    "lease_id": "l",
    "engine": "p",
    "epoch": 1,
    "num_tokens": 16,
    "block_tables": ((3,),),
}


def part(rank: int) -> TicketPart:
    return TicketPart(np.array([rank, 7]), ((5,),), lease_ns=9, digest_ns=rank)


def test_answers_are_complete_when_each_rank_gave_one_in_whatever_order() -> None:
    for order in permutations(range(3)):
        answers = RankAnswers[str](3)
        for place, rank in enumerate(order):
            for text in ("first", f"rank {rank}"):  # it may say something again
                assert answers.add(rank, text) == answers.is_complete == (place == 2), order
        assert answers.in_order() == ["rank 0", "rank 1", "rank 2"], order


def test_a_ticket_has_every_ranks_digests_and_no_renewal_that_nobody_asks_for() -> None:
    ticket = make_ticket([part(0), part(1)], **FIELDS)
    assert ticket.digests.tolist() == [[0, 7], [1, 7]]
    assert (ticket.generations, ticket.digest_ns, ticket.lease_ns) == (((5,),), (0, 1), None)
    assert is_whole(ticket)
    assert not is_whole(replace(ticket, num_tokens=17))
    with pytest.raises(AssertionError, match="disagree on generations"):
        make_ticket([part(0), replace(part(1), generations=((6,),))], **FIELDS)
