"""Links of one rank: several to one engine, whose replicas take turns, and both ways between two engines."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from rayk.transfer.agent import TransferAgent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.nixl_agent import NixlAgent
from rayk.transfer.plan import num_turns
from rayk.types.errors import HandshakeMismatch, RaykError
from tests.transfer.cluster import Engine, Pair, Shape, Values, local_pair, make_engine

NAMES = itertools.count()
MLA = Shape(family="deepseek_v3", layouts=("LBHNC", "BHLNC"))
GQA = Shape(units=2, query_heads=8, layouts=("BLHNC", "BHLNC"))
SHAPES = {
    "latents of 2 ranks": replace(MLA, tp=(2, 1)),
    "latents of 4 ranks": replace(MLA, tp=(4, 1)),
    "latents of 4 ranks, by 2": replace(MLA, tp=(4, 2)),
    "heads on 2 of 4 ranks each": replace(GQA, tp=(4, 1)),
    "heads on 4 of 8 ranks each, by 2": replace(GQA, tp=(8, 2)),
}


def connect_turns(pair: Pair) -> list[str]:
    """Link the consumer once per turn, as p~0, p~1, ...; the names."""
    ends = pair.producer.descriptions, pair.consumer.descriptions
    names = [f"p~{turn}" for turn in range(num_turns([d.geometry for d in ends[0]]))]
    for rank in pair.consumer.ranks:
        for turn, name in enumerate(names):
            rank.connect(*ends, turn=turn, name=name)
    return names


def send(pair: Pair, values: Values, name: str, request_id: str) -> dict[int, dict[int, int]]:
    """Move a request by one link, see that every byte is right and every producer rank told: consumer rank ->
    producer rank -> bytes read."""
    seed = next(NAMES)
    tables = pair.producer.tables(values.num_tokens, seed)
    pair.producer.write(values, tables)
    ticket = pair.producer.ticket(values.num_tokens, tables, request_id)
    at = pair.consumer.tables(values.num_tokens, seed)
    pair.start(replace(ticket, engine=name), at)
    outcomes = pair.finish(ticket)
    assert [o.error for o in outcomes.values()] == [None] * len(pair.consumer.ranks)
    pair.consumer.check(values, at)
    assert pair.released() == [[f"lease-{request_id}"]] * len(pair.producer.ranks)
    read: dict[int, Counter[int]] = {rank: Counter() for rank in outcomes}
    for rank, outcome in outcomes.items():
        for row in outcome.rows:
            read[rank][row.producer_rank] += row.bytes
    return {rank: dict(counts) for rank, counts in read.items()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_over_the_turns_every_replica_is_read_as_often(shape: Shape):
    pair = local_pair(shape, delay_polls=1)
    names = connect_turns(pair)
    assert len(names) == (shape.tp[0] if shape.family else shape.tp[0] // shape.units)
    total: dict[int, Counter[int]] = {rank: Counter() for rank in range(shape.tp[1])}
    for turn, name in enumerate(names):
        for rank, counts in send(pair, shape.values(21, seed=turn), name, f"r{turn}").items():
            total[rank].update(counts)
    for rank, counts in total.items():
        wanted = set(pair.consumer.heads(rank))
        holders = [p for p in range(shape.tp[0]) if shape.family or wanted & set(pair.producer.heads(p))]
        assert sorted(counts) == holders
        assert len(set(counts.values())) == 1, counts


def test_a_link_ends_and_leaves_the_other_turns_theirs():
    """Its transfers fail, those of other links to the same ranks go on; with the last one nothing is left."""
    shape = SHAPES["latents of 4 ranks"]
    pair = local_pair(shape, delay_polls=5)
    names = connect_turns(pair)
    (rank,), (agent,) = pair.consumer.ranks, pair.consumer.agents
    assert isinstance(agent, LocalAgent)
    rank.disconnect("p")
    tickets, wanted = [], []
    for turn in (0, 1):
        values = shape.values(13, seed=turn)
        tables = [[b + 8 * turn for b in t] for t in [[1, 2, 3, 4]]]
        pair.producer.write(values, tables)
        ticket = replace(pair.producer.ticket(13, tables, f"r{turn}"), engine=names[turn])
        pair.start(ticket, tables)
        tickets.append(ticket)
        wanted.append((values, tables))
    rank.disconnect(names[0])
    gone, error = finish_all([pair] * 2)
    assert "producer engine p is gone" in str(gone)
    assert error is None
    assert [sorted(leases) for leases in pair.released()] == [["lease-r0", "lease-r1"]] * 4
    pair.consumer.check(*wanted[1])
    with pytest.raises(HandshakeMismatch, match="not connected"):
        pair.start(tickets[0], [[20, 21, 22, 23]])
    assert send(pair, shape.values(9), names[3], "after")
    for name in names[1:]:
        assert agent._peers, "in use"
        rank.disconnect(name)
    assert not agent._peers
    assert not agent._handles


def test_what_a_link_that_ended_was_reading_fails():
    shape = SHAPES["latents of 4 ranks"]
    pair = local_pair(shape, delay_polls=100)
    names = connect_turns(pair)
    ticket = replace(pair.producer.ticket(10, [[1, 2, 3]]), engine=names[2])
    pair.start(ticket, [[1, 2, 3]])
    pair.consumer.ranks[0].disconnect(names[2])
    assert "producer engine p is gone" in str(pair.finish(ticket)[0].error)


def test_a_new_life_ends_all_links_to_the_old_one():
    shape = SHAPES["latents of 2 ranks"]
    pair = local_pair(shape)
    names = connect_turns(pair)
    (agent,) = pair.consumer.agents
    assert isinstance(agent, LocalAgent)
    for old in pair.producer.agents:
        old.close()
    reborn = make_engine(shape, 0, lambda name: LocalAgent(name, agent.network), epoch=1)
    again = Pair(reborn, pair.consumer)
    late = replace(pair.producer.ticket(5, [[1, 2]]), engine=names[1])
    for rank in (*pair.consumer.ranks, *reborn.ranks):
        rank.connect(reborn.descriptions, pair.consumer.descriptions, turn=1, name=names[1])
    with pytest.raises(HandshakeMismatch, match=r"p epoch 1"):
        again.start(late, [[1, 2]])
    with pytest.raises(HandshakeMismatch, match="not connected"):
        again.start(replace(late, engine=names[0]), [[1, 2]])
    assert agent._peers == {a.name for a in reborn.agents}
    assert send(again, shape.values(9), names[1], "again") == {0: {1: shape_bytes(shape, 9)}}


def shape_bytes(shape: Shape, num_tokens: int) -> int:
    """Of the blocks of a request, all layers."""
    rows = -(-num_tokens // shape.block_sizes[0]) * shape.block_sizes[0]
    return sum(rows * f.row_bytes * f.units for spec in shape.specs(0).values() for f in spec.fields())


def test_what_ends_reads_of_an_engine_ends_them_on_all_links():
    shape = SHAPES["latents of 2 ranks"]
    pair = local_pair(shape, delay_polls=100)
    names = connect_turns(pair)
    tickets = []
    for turn, name in enumerate(names):
        ticket = replace(pair.producer.ticket(5, [[1, 2]], f"r{turn}"), engine=name)
        pair.start(ticket, [[1 + 2 * turn, 2 + 2 * turn]])
        tickets.append(ticket)
    pair.consumer.ranks[0].end_reads("p", epoch=1)
    assert pair.poll() == []
    pair.consumer.ranks[0].end_reads("p", epoch=0)
    outcomes = {o.request_id: o for _, o in pair.poll()}
    assert sorted(outcomes) == ["r0", "r1"]
    assert all("producer engine p is gone" in str(o.error) for o in outcomes.values())


def mutual_pairs(make_agent: Callable[[str], TransferAgent]) -> tuple[Pair, Pair]:
    """Two engines of 2 ranks and of 1, each of which reads from the other."""
    shape = Shape(tp=(2, 1), units=2, layouts=("LBHNC", "BHLNC"))
    engines: list[Engine] = [make_engine(shape, side, make_agent) for side in (0, 1)]
    there, back = Pair(*engines), Pair(*engines[::-1])
    there.connect()
    back.connect()
    return there, back


def finish_all(pairs: list[Pair], timeout_s: float = 60.0) -> list[RaykError | None]:
    """How one request of each pair ends on each consumer rank, in that order."""
    errors: list[RaykError | None] = []
    until = time.monotonic() + timeout_s
    ranks = [rank for pair in pairs for rank in pair.consumer.ranks]
    while len(errors) < len(ranks):
        assert time.monotonic() < until, f"only {len(errors)} of {len(ranks)} ended"
        errors += [o.error for rank in ranks for o in rank.poll(time.monotonic_ns())]
    return errors


def check_mutual_pairs(there: Pair, back: Pair) -> None:
    """Both move at once; one ends, and the other goes on; and it comes again."""
    shape, names = there.producer.shape, {id(there): "p", id(back): "d"}
    for turn in range(3):
        moving = []
        for number, pair in enumerate((there, back)):
            values = shape.values(13, seed=2 * turn + number)
            tables = [[1 + 8 * number + b for b in range(4)]]
            pair.producer.write(values, tables)
            ticket = pair.producer.ticket(13, tables, f"{turn}.{number}")
            pair.start(ticket, [[20 + 8 * number + b for b in range(4)]])
            moving.append((pair, values, ticket))
        errors = finish_all([there, back])
        assert errors == [None] * sum(len(pair.consumer.ranks) for pair in (there, back))
        for number, (pair, values, _) in enumerate(moving):
            pair.consumer.check(values, [[20 + 8 * number + b for b in range(4)]])
            assert pair.released() == [[f"lease-{turn}.{number}"]] * len(pair.producer.ranks)
        ended, other = (there, back) if turn else (back, there)
        for rank in ended.consumer.ranks:
            rank.disconnect(names[id(ended)])
        assert send(other, shape.values(7, seed=turn), names[id(other)], f"alone {turn}")
        ended.connect()


def test_two_engines_read_from_each_other():
    network = LocalNetwork()
    check_mutual_pairs(*mutual_pairs(lambda name: LocalAgent(name, network, delay_polls=2)))


@pytest.mark.nixl
@pytest.mark.parametrize("mode", ["none", "peer"])
def test_two_engines_read_from_each_other_through_nixl(mode: str):
    run = next(NAMES)
    there, back = mutual_pairs(lambda name: NixlAgent(f"both{run}.{name}", error_handling=mode))
    try:
        check_mutual_pairs(there, back)
    finally:
        for rank in (*there.producer.ranks, *there.consumer.ranks):
            rank.close()
