"""TransferRank end to end on local agents: every live byte, releases, fences, deadlines, handshakes."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch

from rayk.kv.layout import LAYOUTS
from rayk.types.errors import HandshakeMismatch, KVMismatch, TransferError
from tests.each import each
from tests.pd import Clock
from tests.transfer.cluster import Pair, Shape, local_pair, make_engine

TPS = [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (4, 1), (1, 4), (8, 1), (4, 8)]


@each("tp", TPS, ids=lambda t: f"{t[0]}to{t[1]}")
@each("layouts", [("BHLNC", "LBNHC"), ("LHBNC", "BLNHC"), ("BLHNC", "LBHNC")], ids="-".join)
def test_kv_arrives_verified_and_every_producer_rank_is_released(tp, layouts):
    shape = Shape(tp=tp, layouts=layouts)
    pair = local_pair(shape, delay_polls=1)
    values = shape.values(30)
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None] * tp[1]
    pair.consumer.check(values, tables)
    assert pair.released() == [["lease-r"]] * tp[0]
    for rank, outcome in outcomes.items():
        assert outcome.num_bytes_checked == 3 * len(pair.consumer.heads(rank)) * 30 * 8 * 4
        assert set(outcome.stage_ns) == {"read", "fence", "verify"}
        assert sum(r.bytes for r in outcome.rows) == 3 * len(pair.consumer.heads(rank)) * 32 * 8 * 4
        assert {r.verdict for r in outcome.rows} == {"OK"}
        assert {r.transport for r in outcome.rows} == {"local"}


@each("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
def test_all_layout_pairs(layouts):
    shape = Shape(tp=(2, 1), layouts=layouts, dtype="bfloat16", head_sizes=(6, 2))
    pair = local_pair(shape)
    values = shape.values(9)
    outcomes, tables = pair.transfer(values)
    assert outcomes[0].ok
    pair.consumer.check(values, tables)


@pytest.mark.parametrize("window", [None, 7], ids=["full", "window7"])
@pytest.mark.parametrize("block_sizes", [(4, 8), (8, 4), (6, 4)], ids=str)
def test_unlike_blocks_kernel_blocks_and_windows(block_sizes, window):
    shape = Shape(
        tp=(2, 4),
        block_sizes=block_sizes,
        kernel_block_sizes=(2, None),
        window=window,
        num_layers=6,
        dtype="int8",
    )
    pair = local_pair(shape)
    for i, num_tokens in enumerate((1, 8, 29)):
        values = shape.values(num_tokens, seed=i)
        outcomes, tables = pair.transfer(values, request_id=f"r{i}", seed=i)
        assert all(o.ok for o in outcomes.values())
        pair.consumer.check(values, tables)


def test_many_row_groups_and_several_requests_at_once():
    shape = Shape(tp=(1, 2), num_blocks=(400, 400), num_layers=1)
    pair = local_pair(shape, delay_polls=3)
    requests = {}
    for i, num_tokens in enumerate((300, 600)):
        base = 1 + 150 * i
        tables = [list(range(base, base + -(-num_tokens // 4)))]
        values = shape.values(num_tokens, seed=i)
        pair.producer.write(values, tables)
        requests[f"r{i}"] = (values, tables, pair.producer.ticket(num_tokens, tables, f"r{i}"))
    for _, tables, ticket in requests.values():
        pair.start(ticket, tables)
    outcomes = []
    while len(outcomes) < 4:
        outcomes += pair.poll()
    assert all(o.ok for _, o in outcomes)
    for values, tables, _ in requests.values():
        pair.consumer.check(values, tables)


def test_a_block_reused_while_being_read_is_named():
    shape = Shape(tp=(1, 2))
    pair = local_pair(shape, delay_polls=1)
    tables = [[3, 7, 5]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    pair.start(ticket, [[1, 2, 3]])
    pair.producer.ranks[0].bump_generations([7])
    for outcome in pair.finish(ticket).values():
        assert isinstance(outcome.error, TransferError)
        assert "block 7 was reused while being read" in str(outcome.error)
        assert "tokens 4 to 7 of layers" in str(outcome.error)
        assert {r.verdict for r in outcome.rows} == {"TRANSFER_ERROR"}
        assert "verify" not in outcome.stage_ns
    assert pair.released() == [["lease-r"]]


def test_a_block_reused_after_the_data_but_before_the_fence_is_refused():
    shape = Shape()
    pair = local_pair(shape, delay_polls=1)
    tables = [[3, 7, 5]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    pair.start(ticket, [[1, 2, 3]])
    # `start` polled once. This poll completes the data and posts the fence; the next one answers it.
    assert pair.poll() == []
    pair.consumer.check(shape.values(10), [[1, 2, 3]])
    pair.producer.ranks[0].bump_generations([5])
    (outcome,) = pair.finish(ticket).values()
    assert "block 5 was reused" in str(outcome.error)


def test_generations_of_earlier_uses_are_no_obstacle():
    shape = Shape()
    pair = local_pair(shape)
    pair.producer.ranks[0].bump_generations([3, 7, 5, 7])
    pair.producer.ranks[0].bump_generations([7])
    assert pair.producer.ranks[0].generations([[0, 3, 7]]) == ((0, 1, 2),)
    values = shape.values(10)
    tables = [[3, 7, 5]]
    pair.producer.write(values, tables)
    ticket = pair.producer.ticket(10, tables)
    pair.start(ticket, [[1, 2, 3]])
    assert pair.finish(ticket)[0].ok


def test_fences_wait_for_room_to_land_in():
    shape = Shape(tp=(2, 1))
    pair = local_pair(shape, delay_polls=2)
    landing = pair.consumer.ranks[0]._landing
    hoarded = landing.take(landing.num_slots - 4)
    assert hoarded is not None
    tickets = []
    for i in range(3):
        tables = [[1 + 3 * i, 2 + 3 * i, 3 + 3 * i]]
        pair.producer.write(shape.values(10, seed=i), tables)
        tickets.append(pair.producer.ticket(10, tables, f"r{i}"))
        pair.start(tickets[-1], tables)
    outcomes = []
    for _ in range(30):
        outcomes += pair.poll()
    assert [o.error for _, o in outcomes] == [None] * 3
    assert landing.take(5) is None
    assert landing.take(4) is not None, "every slot came back"


def test_a_deadline_ends_a_slow_transfer_and_frees_the_producer(monkeypatch):
    clock = Clock(monkeypatch)
    shape = Shape(tp=(2, 1))
    pair = local_pair(shape, delay_polls=10**9)
    tables = [[1, 2, 3]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    pair.start(ticket, tables, deadline_s=600.0)
    assert pair.poll() == []
    clock.go_on(600.0)
    (outcome,) = pair.finish(ticket).values()
    assert isinstance(outcome.error, TransferError)
    assert "deadline passed while reading" in str(outcome.error)
    assert outcome.error.producer == "p"
    assert not outcome.is_draining, "local reads can be cancelled"
    assert pair.released() == [["lease-r"]] * 2


def test_a_lost_producer_ends_the_transfer():
    shape = Shape()
    pair = local_pair(shape, delay_polls=2)
    tables = [[1, 2, 3]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    pair.start(ticket, tables)
    pair.producer.agents[0].close()
    outcomes = []
    for _ in range(5):
        outcomes += pair.consumer.ranks[0].poll(time.monotonic_ns())
    (outcome,) = outcomes
    assert isinstance(outcome.error, TransferError)
    assert "producer rank 0 failed" in str(outcome.error)


def test_disconnect_fails_what_is_in_flight_and_forgets_the_engine():
    shape = Shape(tp=(1, 2))
    pair = local_pair(shape, delay_polls=100)
    tables = [[1, 2, 3]]
    ticket = pair.producer.ticket(10, tables)
    pair.start(ticket, tables)
    for rank in pair.consumer.ranks:
        rank.disconnect("p")
    assert all("producer engine p is gone" in str(o.error) for o in pair.finish(ticket).values())
    with pytest.raises(HandshakeMismatch, match="not connected"):
        pair.start(ticket, tables)


def test_cancel():
    shape = Shape()
    pair = local_pair(shape, delay_polls=100)
    ticket = pair.producer.ticket(10, [[1, 2, 3]])
    pair.start(ticket, [[1, 2, 3]])
    pair.consumer.ranks[0].cancel("r")
    pair.consumer.ranks[0].cancel("unknown")
    assert "cancelled" in str(pair.finish(ticket)[0].error)
    assert pair.released() == [["lease-r"]]


def test_a_ticket_of_an_earlier_life_is_refused():
    shape = Shape()
    pair = local_pair(shape)
    ticket = replace(pair.producer.ticket(10, [[1, 2, 3]]), epoch=7)
    with pytest.raises(HandshakeMismatch, match="p epoch 7"):
        pair.start(ticket, [[1, 2, 3]])


def test_a_mismatch_keeps_the_lease_until_it_is_given_up():
    shape = Shape()
    pair = local_pair(shape)
    tables = [[1, 2, 3]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    # P's memory changes between its digest and the read, behind its own back.
    pair.producer.caches[0].view(1)[2, 1, 0, 3] += 1.0
    pair.start(ticket, tables)
    (outcome,) = pair.finish(ticket).values()
    assert isinstance(outcome.error, KVMismatch)
    assert {r.verdict for r in outcome.rows} == {"KV_MISMATCH"}
    assert pair.released(timeout_s=0.05) == [[]]
    pair.consumer.ranks[0].release_now("r")
    assert pair.released() == [["lease-r"]]
    pair.consumer.ranks[0].release_now("r")
    assert pair.released(timeout_s=0.05) == [[]]


def test_a_mismatch_nobody_looks_at_is_given_up_at_the_deadline(monkeypatch):
    clock = Clock(monkeypatch)
    shape = Shape()
    pair = local_pair(shape)
    pair.producer.write(shape.values(10), [[1, 2, 3]])
    ticket = pair.producer.ticket(10, [[1, 2, 3]])
    pair.producer.caches[0].view(1)[2, 1, 0, 3] += 1.0
    pair.start(ticket, [[1, 2, 3]], deadline_s=600.0)
    assert isinstance(pair.finish(ticket)[0].error, KVMismatch)
    clock.go_on(600.0)
    assert pair.released() == [["lease-r"]]


def test_a_new_life_of_the_producer_replaces_the_old_one():
    shape = Shape(tp=(2, 1))
    pair = local_pair(shape)
    network = pair.producer.agents[0].network
    for agent in pair.producer.agents:
        agent.close()
    from rayk.transfer.local_agent import LocalAgent

    reborn = make_engine(shape, 0, lambda name: LocalAgent(name, network), epoch=1)
    again = Pair(reborn, pair.consumer)
    again.connect()
    values = shape.values(10)
    outcomes, tables = again.transfer(values)
    assert outcomes[0].ok
    pair.consumer.check(values, tables)


def test_other_bytes_of_the_consumer_stay_untouched():
    """Blocks the request does not own keep their poison."""
    shape = Shape(tp=(2, 1), layouts=("LBNHC", "BLHNC"), dtype="int8")
    pair = local_pair(shape)
    values = shape.values(12)
    outcomes, tables = pair.transfer(values)
    assert outcomes[0].ok
    caches = pair.consumer.caches[0]
    others = [b for b in range(shape.num_blocks[1]) if b not in tables[0]]
    for layer in range(3):
        assert torch.all(caches.view(layer)[others] == 0x5A)
    assert torch.all(caches.generations == 0)


def test_a_notification_of_no_meaning_is_passed_over():
    shape = Shape()
    pair = local_pair(shape)
    tables = [[3, 7, 5]]
    pair.producer.write(shape.values(10), tables)
    ticket = pair.producer.ticket(10, tables)
    consumer, producer = (side.ranks[0] for side in (pair.consumer, pair.producer))
    consumer._agent.notify(producer.description.agent_name, b"hello")
    pair.start(ticket, [[1, 2, 3]])
    (outcome,) = pair.finish(ticket).values()
    assert outcome.ok
    assert pair.released() == [["lease-r"]]
