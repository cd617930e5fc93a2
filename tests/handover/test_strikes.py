"""Faults at the points of transfers between two engines of this process end as the table of faults says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import RequestResult
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import WarmUp
from rayk.transfer import faults
from rayk.transfer.faults import StrikeMessage, TransferFault
from rayk.transfer.faulty_agent import FaultyAgent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import KVMismatch, TransferError
from rayk.types.fault_table import MESSAGE_KINDS, Fault, expected
from rayk.types.request import Request
from tests.handover.cases import Model
from tests.pd import Clock, Pair, make_request, wait_until

NUM_TOKENS = 6
LEASE_S = 600.0
LOST_S = 0.3
"""What never comes is waited for so long."""


class FaultyPair:
    """Two engines whose agents take strikes; D's and P's first."""

    def __init__(self, pair: Pair, agents: list[FaultyAgent]) -> None:
        self.pair = pair
        self.p, self.d = agents

    def decode(
        self, request: Request, prefilled: RequestResult, *, recompute: bool, transfer_s: float
    ) -> RequestResult:
        ticket = prefilled.payload
        assert isinstance(ticket, TransferTicket)
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        tokens = tuple(prefilled.token_ids)
        self.pair.d.handover.submit_decode(
            request, ticket, tokens, transfer_s, events.put, recompute=recompute
        )
        return self.pair.d.engine.collect(events)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Clock(monkeypatch)


@pytest.fixture(scope="module")
def faulty(model: Model, clock: Clock) -> Iterator[FaultyPair]:
    del clock  # the engines' clock from their start on
    network, made = LocalNetwork(), []

    def make(name: str) -> FaultyAgent:
        made.append(FaultyAgent(LocalAgent(name, network)))
        return made[-1]

    with Pair.open(model.path, make_agent=make, renewed_lease_s=LEASE_S) as pair:
        yield FaultyPair(pair, made)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("point", ["post", "mid_transfer", "notify", "free", "lease_renewal"])
@pytest.mark.parametrize("kind", MESSAGE_KINDS)
def test_a_struck_transfer_ends_as_the_table_says(
    faulty: FaultyPair, clock: Clock, model: Model, kind: str, point: str, policy: str
) -> None:
    wanted = expected(Fault(kind, point), "pull", policy)
    pair = faulty.pair
    faulty.d.plant(TransferFault(kind=kind, point=point, delay_s=0.1, byte=1, bit=1))
    request = make_request(f"{kind}-{point}-{policy}", model.prompts[1], NUM_TOKENS)
    prefilled = pair.prefill(request)
    # A lost read is noticed at the deadline; nothing else waits for it.
    is_lost = kind == "drop" and (wanted.verdict != "PASS" or wanted.is_recovered)
    transfer_s = LOST_S if is_lost else 60.0
    done = faulty.decode(request, prefilled, recompute=policy == "recompute", transfer_s=transfer_s)
    assert not faulty.d._faults, "it struck"
    if wanted.verdict == "PASS":
        assert done.error is None
        assert prefilled.token_ids + done.token_ids == model.expected[1][:NUM_TOKENS]
        assert ("failure" in done.info) == wanted.is_recovered
    else:
        assert isinstance(done.error, KVMismatch if wanted.verdict == "KV_MISMATCH" else TransferError)
        assert done.token_ids == [], "nothing follows KV that is not proven"
        pair.d.handover.settle(request.request_id)
        pair.p.handover.settle(request.request_id)
    clock.go_on(LEASE_S)  # a lease whose end was not told ends by itself
    pair.check_all_free()
    for side in (pair.p, pair.d):
        assert side.engine.leader.manager.ledger.num_held == 0


def test_a_read_that_was_overtaken_is_posted_then(faulty: FaultyPair, model: Model) -> None:
    faulty.d.plant(TransferFault(kind="reorder", point="post"))
    requests = [make_request(f"r{i}", model.prompts[1], NUM_TOKENS) for i in range(2)]
    done = faulty.pair.complete(requests)
    assert [c.token_ids for c in done] == [model.expected[1][:NUM_TOKENS]] * 2
    faulty.pair.check_all_free()


@pytest.mark.parametrize(("kind", "is_lost"), [("drop", True), ("delay", False), ("duplicate", False)])
def test_a_handshake_that_was_struck_works_when_it_is_tried_again(
    faulty: FaultyPair, kind: str, is_lost: bool
) -> None:
    faulty.d.plant(TransferFault(kind=kind, point="handshake", delay_s=0.05))
    engine = faulty.pair.p.engine.name

    def wire() -> None:
        with faulty.d.wiring():
            while not all(faulty.pair.d.call(WarmUp(engine, 0.3))):
                pass

    if is_lost:
        with pytest.raises(TransferError, match="does not answer"):
            wire()
    wire()
    assert not faulty.d._faults


def test_a_rank_strikes_itself_when_it_is_told_and_only_once() -> None:
    network, killed = LocalNetwork(), []
    producer = FaultyAgent(LocalAgent("p", network), killed.append, "prefill")
    bystander = FaultyAgent(LocalAgent("b", network), killed.append, "prefill")
    consumer = FaultyAgent(LocalAgent("d", network), killed.append, "decode")
    fault = TransferFault(kind="stop", point="post", remote="prefill")
    producer.plant(fault)
    consumer.plant(fault)
    for peer in ("p", "b"):
        consumer.add_peer(peer, peer.encode())
    assert consumer.passes("post") == fault
    assert consumer.passes("post") is None
    assert producer.notifications() == bystander.notifications() == [], "nobody else sees the message"
    assert killed == ["stop"]
    consumer.notify("p", StrikeMessage("prefill").encode())
    assert producer.notifications() == []
    assert killed == ["stop"]


@pytest.mark.parametrize("point", ["post", "notify"])
def test_a_read_that_is_posted_when_its_peer_is_dead_fails_and_ends_nobody_else(
    model: Model, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    network, made, is_dead = LocalNetwork(), [], threading.Event()

    def make(name: str) -> FaultyAgent:
        def die(kind: str) -> None:
            network.leave(name)
            is_dead.set()

        made.append(FaultyAgent(LocalAgent(name, network), die, "prefill" if name[0] == "p" else "decode"))
        return made[-1]

    with Pair.open(model.path, make_agent=make) as pair:
        for agent in made:
            agent.plant(TransferFault(kind="kill", point=point, remote="prefill"))
        request = make_request("r", model.prompts[1], NUM_TOKENS)
        prefilled = pair.prefill(request)
        monkeypatch.setattr(faults, "DEATH_S", 3600.0)
        stream = pair.start_decode(request, prefilled, transfer_s=60.0)
        wait_until(is_dead.is_set)
        monkeypatch.setattr(faults, "DEATH_S", 0.0)
        done = pair.d.engine.collect(stream)
        assert isinstance(done.error, TransferError)
        assert "failed" in done.error.reason
        wait_until(pair.d.has_all_blocks)  # raises what D died of, if it did
