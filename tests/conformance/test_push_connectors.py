"""Connectors that push, where the other side is slow: no byte comes once a request's blocks are back."""

from __future__ import annotations

import itertools
import pickle
import time
from types import SimpleNamespace

import pytest
import torch

from rayk.conformance.engines import EnginePair
from rayk.kv.caches import allocate
from rayk.transfer import KVRequest, LocalPushConnector, connectors, push_connectors
from rayk.transfer.local_agent import LocalAgent
from rayk.transfer.push_connectors import WRITING_SHARE
from rayk.transfer.push_messages import StopMessage
from rayk.transfer.transports import LOCAL_NETWORK

_NAMES = itertools.count()
FILLS = 17, 0
"""What the producer's buffer holds, and the consumer's."""
DEADLINE_S = 8.0


class Clock:
    """Shared by all ranks; stands still but where it is set."""

    now_s = 100.0

    def monotonic_ns(self):
        return int(self.now_s * 1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    made = Clock()
    for module in (connectors, push_connectors):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=made.monotonic_ns))
    return made


def connected():
    """A producer rank and a consumer rank, connected."""
    pair, number = EnginePair(), next(_NAMES)
    ranks = [LocalPushConnector(f"slow-{number}-{side}") for side in (0, 1)]
    for side, rank in enumerate(ranks):
        rank.register(allocate(pair.geometry(side, 0), torch.device("cpu"), fill=FILLS[side]))
    blobs = [[rank.describe()] for rank in ranks]
    for rank in ranks:
        rank.connect(*blobs)
    return ranks


def request(deadline_s: float, blocks: tuple[int, ...] = (3, 1)) -> KVRequest:
    return KVRequest(request_id="r", num_tokens=20, block_ids=(blocks,), deadline_s=deadline_s)


def reports(*waited, polled=()):
    """What each of these ranks reports, once; `polled` are polled too, and report nothing."""
    found = {}
    until = time.monotonic() + 60.0
    while len(found) < len(waited):
        assert time.monotonic() < until, "nothing was reported"
        found |= {rank.name: reported[0] for rank in waited if (reported := rank.poll())}
        assert not any(rank.poll() for rank in polled)
        time.sleep(0.001)
    return [found[rank.name] for rank in waited]


def test_all_that_is_live_arrives_and_nothing_else():
    producer, consumer = connected()
    producer.send(request(60.0, (2, 5)), [consumer.receive(request(60.0))])
    assert all(finished.ok for finished in reports(consumer, producer))
    written = consumer.caches.tensors[0] == FILLS[0]
    assert written[[1, 3]].any(dim=1).all()
    assert not written[[0, 2, *range(4, len(written))]].any()
    assert sum(consumer.held().values()) == sum(producer.held().values()) == 1, "the registrations"


def test_a_stranger_stops_nothing():
    producer, consumer = connected()
    offer = consumer.receive(request(60.0))
    stranger = LocalAgent("stranger", LOCAL_NETWORK)
    stranger.notify(producer.name, StopMessage(pickle.loads(offer)[0].reservation_id, 0, "stranger").encode())
    stranger.close()
    assert producer.poll() == []
    producer.send(request(60.0, (2, 5)), [offer])
    assert all(finished.ok for finished in reports(consumer, producer))


def test_a_producer_that_comes_too_late_writes_nothing(clock):
    producer, consumer = connected()
    producer.send(request(10 * DEADLINE_S, (2, 5)), [consumer.receive(request(DEADLINE_S))])
    clock.now_s += WRITING_SHARE * DEADLINE_S
    # The consumer asks it to stop, which it does not hear of: it is polled when all is over.
    assert not consumer.poll()
    clock.now_s += (1 - WRITING_SHARE) * DEADLINE_S
    (finished,) = reports(consumer)
    assert finished.error == "not all was written in time"
    before = consumer.caches.buffer.clone()
    producer.agent.notifications()
    (finished,) = reports(producer)
    assert "deadline" in finished.error
    assert torch.equal(consumer.caches.buffer, before)


def test_a_reservation_that_is_over_is_refused(clock):
    producer, consumer = connected()
    answer = consumer.receive(request(DEADLINE_S))
    clock.now_s += WRITING_SHARE * DEADLINE_S
    with pytest.raises(ValueError, match="the reservation of r is over"):
        producer.send(request(DEADLINE_S, (2, 5)), [answer])
    assert producer.held()["requests"] == 0


def test_blocks_come_back_early_when_the_producer_answers():
    producer, consumer = connected()
    consumer.receive(request(60.0))
    consumer.release("r")
    (finished,) = reports(consumer, polled=[producer])
    assert finished.error == "given up"


def test_blocks_come_back_early_when_the_producer_gives_up():
    producer, consumer = connected()
    producer.send(request(60.0, (2, 5)), [consumer.receive(request(60.0))])
    producer.poll()
    producer.release("r")
    ends = reports(consumer, producer)
    assert [end.error for end in ends] == [
        "producer rank 0 stopped: given up by the producer",
        "given up by the producer",
    ]
