"""Descriptor lists are made when a transfer needs them, and only so many are kept."""

from __future__ import annotations

import pytest

from rayk.transfer import link as link_module
from rayk.transfer import plan as plan_module
from rayk.transfer.agent import DescriptorList, Handle, TransferAgent
from rayk.transfer.link import ProducerLink
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.nixl_agent import NixlAgent
from rayk.types.errors import TransferError
from tests.transfer.cluster import Pair, Shape, local_pair, make_engine

UNLIKE = Shape(tp=(2, 1), block_sizes=(16, 17), num_layers=2, num_blocks=(70, 70))
"""Blocks whose borders meet after 272 tokens: 32 patterns of each producer rank."""


def link_of(pair: Pair, rank: int = 0) -> ProducerLink:
    return pair.consumer.ranks[rank]._links["p"]


def num_lists(agent: TransferAgent) -> int:
    """Those of generations aside: one per producer rank."""
    return len(agent._handles) - 2


def read(pair: Pair, num_tokens: int, name: str) -> None:
    """One request, whole and right."""
    values = pair.producer.shape.values(num_tokens, seed=num_tokens)
    outcomes, tables = pair.transfer(values, name, seed=num_tokens)
    assert [o.error for o in outcomes.values()] == [None]
    pair.consumer.check(values, tables)


def test_connecting_prepares_one_pattern_of_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks meet in many ways; what a request does not need is not made."""
    made = []
    original = plan_module.match_rows
    monkeypatch.setattr(plan_module, "match_rows", lambda *a, **kw: made.append(kw) or original(*a, **kw))
    pair = local_pair(UNLIKE)
    assert len(link_of(pair).plan.reads) == 2
    assert len(made) == num_lists(pair.consumer.agents[0]) == len(link_of(pair).prepared) == 2
    read(pair, 16, "short")
    assert len(made) == 2, "a first block needs no other"
    read(pair, 300, "long")
    assert len(made) == num_lists(pair.consumer.agents[0]) == 2 * 32
    read(pair, 271, "again")
    assert len(made) == 2 * 32, "all are kept"


@pytest.mark.parametrize("delay_polls", [0, 3])
def test_the_least_recently_used_are_freed_when_no_read_uses_them(
    monkeypatch: pytest.MonkeyPatch, delay_polls: int
) -> None:
    """LocalAgent refuses to free what a read in flight was made of."""
    monkeypatch.setattr(link_module, "PREPARED_PER_READ", 2)
    pair = local_pair(UNLIKE, delay_polls)
    agent, prepared = pair.consumer.agents[0], link_of(pair).prepared
    tickets = []
    for i, num_tokens in enumerate((300, 40)):
        tables, landing = (
            [list(range(first, first + -(-num_tokens // size)))]
            for first, size in ((1 + 30 * i, 16), (40 - 30 * i, 17))
        )
        values = UNLIKE.values(num_tokens, seed=i)
        pair.producer.write(values, tables)
        tickets.append((pair.producer.ticket(num_tokens, tables, f"r{i}"), landing, values))
        pair.start(*tickets[-1][:2])
    if delay_polls:
        assert num_lists(agent) == len(prepared) == 2 * 32, "all are in use"
    outcomes = []
    while len(outcomes) < 2:
        outcomes += pair.poll()
    assert all(o.ok for _, o in outcomes)
    for _, landing, values in tickets:
        pair.consumer.check(values, landing)
    assert num_lists(agent) == len(prepared) == 4
    read(pair, 16, "first block")
    assert {(rank, 0, 0, 16) for rank in (0, 1)} <= {(key[0], *key[4:]) for key in prepared._kept}
    assert num_lists(agent) == len(prepared) == 4


def test_failed_and_cancelled_reads_give_their_lists_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "PREPARED_PER_READ", 1)
    pair = local_pair(UNLIKE, delay_polls=5)
    tables = pair.producer.tables(300)
    pair.start(pair.producer.ticket(300, tables, "cancelled"), pair.consumer.tables(300))
    prepared = link_of(pair).prepared
    assert len(prepared) == 64
    pair.consumer.ranks[0].cancel("cancelled")
    assert len(prepared) == 2

    def refuse(*_: object) -> Handle:
        raise TransferError("", "the network is gone")

    monkeypatch.setattr(pair.consumer.agents[0], "read", refuse)
    ticket = pair.producer.ticket(300, tables, "refused")
    pair.start(ticket, pair.consumer.tables(300))
    assert "the network is gone" in str(pair.finish(ticket)[0].error)
    assert len(prepared) == 2


def test_lists_that_an_agent_refuses_fail_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(LocalAgent):
        def prepare(
            self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
        ) -> Handle:
            if len(self._handles) >= 10:
                raise TransferError("", f"reads from {peer} cannot be prepared: no memory")
            return super().prepare(peer, local, remote, remote_device)

    network = LocalNetwork()
    pair = Pair(*(make_engine(UNLIKE, side, lambda name: Full(name, network)) for side in (0, 1)))
    pair.connect()
    ticket = pair.producer.ticket(300, pair.producer.tables(300), "long")
    pair.start(ticket, pair.consumer.tables(300))
    assert "no memory" in str(pair.finish(ticket)[0].error)
    read(pair, 16, "short")


def test_a_producer_that_left_takes_its_lists_along() -> None:
    pair = local_pair(UNLIKE, delay_polls=5)
    agent = pair.consumer.agents[0]
    pair.start(pair.producer.ticket(300, pair.producer.tables(300)), pair.consumer.tables(300))
    assert num_lists(agent) == 64
    pair.consumer.ranks[0].disconnect("p")
    assert len(agent._handles) == 0
    (outcome,) = [o for _, o in pair.poll()]
    assert "engine p is gone" in str(outcome.error)


@pytest.mark.nixl
def test_nixl_frees_lists_and_makes_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "PREPARED_PER_READ", 1)
    pair = Pair(*(make_engine(UNLIKE, side, lambda name: NixlAgent(f"kept.{name}")) for side in (0, 1)))
    pair.connect()
    agent, freed = pair.consumer.agents[0], []
    release = agent._nixl.release_dlist_handle
    monkeypatch.setattr(agent._nixl, "release_dlist_handle", lambda h: freed.append(h) or release(h))
    try:
        for i, num_tokens in enumerate((300, 20, 300)):
            read(pair, num_tokens, f"r{i}")
            assert num_lists(agent) == len(link_of(pair).prepared) == 2
        # Both sides' lists, of two producer ranks: all but one of 32 patterns, and again.
        assert len(freed) >= 2 * 2 * (31 + 31)
    finally:
        for rank in (*pair.consumer.ranks, *pair.producer.ranks):
            rank.close()
